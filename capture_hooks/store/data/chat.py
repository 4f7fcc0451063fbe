"""Conversations as token ids, with exactly the assistant's tokens marked.

A template with ``{% generation %}`` marks says itself what the assistant writes.  For any other, the text up
to each assistant turn is rendered as a server would render that prompt, and the text up to its end as a
server would for the next one; what lies between is the assistant's.  That only holds where each rendering
is a prefix of the whole, in text and in tokens, which is checked and never assumed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
_INSTEAD = "use a template with {% generation %} marks, or give token ids"


class ChatEncoder:
    """Applies one tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer.
        template: a Jinja template to use instead of the tokenizer's own.

    Raises:
        DataError: there is no template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        try:
            self.template: str = tokenizer.get_chat_template(template)
        except ValueError:
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise DataError(
                f"the tokenizer {name} has no chat template, which conversations need; "
                "use the instruction-tuned model's tokenizer, give a template, or data as text or token ids"
            ) from None
        self._marked = bool(_MARKS.search(self.template))
        self._special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}

    @property
    def digest(self) -> str:
        """SHA-256 of the template's text."""
        return hashlib.sha256(self.template.encode()).hexdigest()

    def encode(
        self, place: str, messages: Sequence[Mapping[str, Any]], tools: Any = None
    ) -> tuple[list[int], list[bool]]:
        """Token ids of the whole conversation and which of them the assistant wrote (its end-of-turn too).

        Raises:
            DataError: the template refuses the conversation, or does not let the assistant's tokens be told.
        """
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise DataError(f"{place}: the conversation has no assistant turn, so there is nothing to learn")
        encode = self._from_marks if self._marked else self._from_prefixes
        return encode(place, list(messages), turns, tools)

    def _from_marks(
        self, place: str, messages: list[Any], turns: list[int], tools: Any
    ) -> tuple[list[int], list[bool]]:
        encoded = self._apply(
            place, messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = [bool(bit) for bit in encoded["assistant_masks"]]
        if not any(mask):
            raise DataError(
                f"{place}: the chat template's {{% generation %}} marks select no token of this conversation"
            )
        return list(encoded["input_ids"]), mask

    def _from_prefixes(
        self, place: str, messages: list[Any], turns: list[int], tools: Any
    ) -> tuple[list[int], list[bool]]:
        whole = self._apply(place, messages, tools, tokenize=False)
        ids = self._tokens(whole)
        mask = [False] * len(ids)
        for turn in turns:
            prompt = self._apply(place, messages[:turn], tools, tokenize=False, add_generation_prompt=True)
            answered = self._apply(place, messages[: turn + 1], tools, tokenize=False)
            for text, what in ((prompt, "the prompt before"), (answered, "the conversation up to")):
                if not whole.startswith(text):
                    raise DataError(
                        f"{place}: under this chat template {what} assistant turn {turn} is not a prefix of "
                        f"the whole conversation (it rewrites earlier turns: {_parting(whole, text)}), "
                        f"so the assistant's tokens cannot be told; {_INSTEAD}"
                    )
            start = self._boundary(place, ids, prompt, turn)
            end = self._boundary(place, ids, answered, turn)
            end = self._without_glue(ids, start, end)
            mask[start:end] = [True] * (end - start)
        return ids, mask

    def _boundary(self, place: str, ids: list[int], prefix: str, turn: int) -> int:
        tokens = self._tokens(prefix)
        if ids[: len(tokens)] != tokens:
            raise DataError(
                f"{place}: a token of the whole conversation lies across an edge of assistant turn {turn} "
                f"(after {prefix[-20:]!r}), so it is neither the template's nor the assistant's; "
                f"strip the turn's leading or trailing white space, or {_INSTEAD}"
            )
        return len(tokens)

    def _without_glue(self, ids: list[int], start: int, end: int) -> int:
        """Leave out white space that the template sets after the end-of-turn token: no model writes it."""
        last = next((at for at in reversed(range(start, end)) if ids[at] in self._special), None)
        if last is None or str(self._tokenizer.decode(ids[last + 1 : end])).strip():
            return end
        return last + 1

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _apply(self, place: str, messages: list[Any], tools: Any, **how: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self.template, **how
            )
        except (TemplateError, TypeError, IndexError) as error:
            raise DataError(f"{place}: the chat template refuses this conversation: {error}") from None


def messages_of(place: str, value: Any) -> list[dict[str, Any]]:
    """Turns as ``{"role", "content"}``, from that form or from ShareGPT's ``{"from", "value"}``.

    Raises:
        DataError: another form, naming the turn.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: a conversation is a non-empty list of turns, not {str(value)[:40]!r}")
    turns = []
    for at, turn in enumerate(value):
        if isinstance(turn, dict) and "role" in turn and "content" in turn:
            # Rows of a `datasets` directory carry None for the fields that other rows have.
            made = {key: field for key, field in turn.items() if field is not None or key == "content"}
        elif isinstance(turn, dict) and "from" in turn and "value" in turn:
            made = {"role": turn["from"], "content": turn["value"]}
        else:
            keys = sorted(turn) if isinstance(turn, dict) else type(turn).__name__
            raise DataError(
                f"{place}: turn {at} has neither 'role' and 'content' nor 'from' and 'value' (it is {keys})"
            )
        made["role"] = _ROLES.get(made["role"], made["role"])
        turns.append(made)
    return turns


def _parting(whole: str, text: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(whole, text, strict=False)) if a != b), min(len(whole), len(text))
    )
    return f"{text[at : at + 20]!r} becomes {whole[at : at + 20]!r}"
