"""One tokenizer's chat templates: which one a conversation gets, what it reads, and its text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import DataError
from ...foreign import read_text
from .records import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKS: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TAGS: Final = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_CLOCK: Final = "strftime_now"
#: What ``strftime`` knows, as a template may ask for it; glibc's forms without padding too.
_DIRECTIVES: Final = (
    *(f"%{letter}" for letter in "aAbBcdDeFgGHIjklmMnpPrRsStTuUVwWxXyYzZ"),
    *(f"%-{letter}" for letter in "dHIjmMSyUW"),
)
#: Transformers gives templates a ``strftime_now`` that reads the clock; this one reads ``clock_readings``.
#: ``{{- '' }}`` at its end keeps Jinja from trimming the line break that the template may begin with.
_STOPPED_CLOCK: Final = (
    "{%- macro strftime_now(format) -%}{%- set at = namespace(text=format) -%}"
    "{%- for directive, reading in clock_readings -%}"
    "{%- set at.text = at.text | replace(directive, reading) -%}"
    "{%- endfor -%}{{ at.text }}{%- endmacro -%}{{- '' }}"
)


@dataclass(frozen=True, slots=True)
class TemplateSettings:
    """How conversations are rendered, beside what the tokenizer says.

    Attributes:
        chat_template: a Jinja text, or the name of one of the tokenizer's templates; None for its own choice.
        arguments: variables for the template, such as ``enable_thinking``.
        clock: what a template that asks for the date is told, in ISO form; None for now.
    """

    chat_template: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    clock: str | None = None


class ChatTemplates:
    """A tokenizer's chat templates under fixed settings.

    Args:
        tokenizer: a transformers tokenizer.
        settings: see `TemplateSettings`.

    Raises:
        DataError: there is no template, none of that name, the text is no Jinja, or no template reads an
            argument.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: TemplateSettings) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self._used: set[str] = set()
        named = _templates(tokenizer, settings.chat_template)
        #: Variables that each template reads, by its text.
        self._reads = {text: _variables(text) for text in named.values()}
        for name in settings.arguments:
            if is_reserved(name):
                raise DataError(f"the template's variable {name!r} is set by the conversation or the command")
            if not any(name in reads for reads in self._reads.values()):
                known = sorted(set().union(*self._reads.values()) - _GIVEN)
                raise DataError(
                    f"the chat template reads no variable {name!r}, so setting it changes nothing; "
                    f"it reads {', '.join(known) or 'none but the messages'}"
                )
        try:
            self._clock = datetime.fromisoformat(settings.clock) if settings.clock else datetime.now()
        except ValueError:
            raise DataError(f"{settings.clock!r} is no date; give it as 2026-11-30T12:00:00") from None
        self._readings = [[directive, self._clock.strftime(directive)] for directive in _DIRECTIVES]

    @property
    def digest(self) -> str | None:
        """SHA-256 of the texts of the templates that were used, with the arguments; None before any was."""
        if not self._used:
            return None
        if len(self._used) == 1 and not self.settings.arguments:
            return hashlib.sha256(next(iter(self._used)).encode()).hexdigest()
        parts = [*sorted(self._used), *(f"{k}={v!r}" for k, v in sorted(self.settings.arguments.items()))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def clock(self) -> str | None:
        """The time given to the templates, in ISO form; None where none of them reads the clock."""
        asked = any(_CLOCK in text for text in self._used)
        return self._clock.replace(microsecond=0).isoformat() if asked else None

    def choose(self, tools: Sequence[Any]) -> str:
        """The text of the template for a conversation, as ``apply_chat_template`` chooses it."""
        chosen = self.tokenizer.get_chat_template(self.settings.chat_template, list(tools) or None)
        self._used.add(chosen)
        return chosen

    def reads(self, template: str, variable: str) -> bool:
        """Whether a template looks at a variable."""
        return variable in self._reads[template]

    def is_marked(self, template: str) -> bool:
        """Whether it says by ``{% generation %}`` what the assistant writes."""
        return bool(_MARKS.search(template))

    def render(
        self,
        place: str,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        arguments: Mapping[str, Any] | None = None,
        prompt: bool = False,
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The text of a conversation, and the characters that ``{% generation %}`` marks in it.

        Args:
            place: of the row, for errors.
            template: what `choose` gave.
            messages: as the template takes them.
            tools: JSON schemas.
            arguments: variables of this row, beside those of the settings.
            prompt: end where the assistant is to answer.

        Raises:
            RowError: the template refuses the conversation.
        """
        from jinja2 import TemplateError

        text = template
        variables = {**self.tokenizer.special_tokens_map, **self.settings.arguments, **(arguments or {})}
        if _CLOCK in template:
            text = _STOPPED_CLOCK + template
            variables["clock_readings"] = self._readings
        try:
            rendered, marks = _rendered(
                conversations=[[dict(message) for message in messages]],
                tools=list(tools) or None,
                chat_template=text,
                return_assistant_tokens_mask=self.is_marked(template),
                add_generation_prompt=prompt,
                **variables,
            )
        except (TemplateError, TypeError, IndexError, KeyError, AttributeError, ValueError) as error:
            raise RowError(
                place, "the chat template refuses", f"the chat template refuses this conversation: {error}"
            ) from None
        return rendered[0], tuple(marks[0]) if marks else ()


def _rendered(**arguments: Any) -> Any:
    """Transformers' rendering; it declares that it returns a string and returns texts and marked ranges."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template(**arguments)


#: Arguments of the rendering itself.
_OURS: Final = frozenset(
    {"messages", "conversations", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"return_assistant_tokens_mask", "clock_readings"}
)
#: Variables that every template gets.
_GIVEN: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
    | {"raise_exception", _CLOCK, "namespace", "range", "dict", "lipsum", "cycler", "joiner"}
)


def is_reserved(name: str) -> bool:
    """Whether a template's variable is set by the conversation or the command."""
    return name in _OURS


def _templates(tokenizer: PreTrainedTokenizerBase, given: str | None) -> dict[str, str]:
    own = getattr(tokenizer, "chat_template", None)
    named = dict(own) if isinstance(own, dict) else ({"default": own} if own else {})
    if given is not None:
        if given in named and isinstance(own, dict):
            return {given: named[given]}
        if re.fullmatch(r"[\w.-]+", given):
            raise DataError(
                f"the tokenizer has no chat template {given!r}; it has {', '.join(sorted(named)) or 'none'}"
            )
        return {"given": given}
    if not named:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise DataError(
            f"the tokenizer {name} has no chat template, which conversations need; "
            "use the instruction-tuned model's tokenizer, give a template, or data as text or token ids"
        )
    if "default" not in named:
        raise DataError(
            f"the tokenizer has several chat templates, none called 'default': {', '.join(sorted(named))}; "
            "choose one by name (--chat-template)"
        )
    return {name: named[name] for name in ("default", "tool_use") if name in named}


def _variables(template: str) -> frozenset[str]:
    """Names that a template reads without setting them.

    Raises:
        DataError: it is no Jinja.
    """
    from jinja2 import Environment, TemplateSyntaxError, meta

    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_TAGS.sub("", template))
        return frozenset(meta.find_undeclared_variables(parsed))
    except TemplateSyntaxError as error:
        raise DataError(f"the chat template is no Jinja: {error.message} (line {error.lineno})") from None


def read_template(given: str) -> str:
    """The text of a template file, or ``given`` where it is the name of one of the tokenizer's.

    Raises:
        DataError: the file is not readable text.
    """
    if re.fullmatch(r"[\w-]{1,100}", given) and not Path(given).exists():
        return given
    return read_text(Path(given), "the chat template", DataError)
