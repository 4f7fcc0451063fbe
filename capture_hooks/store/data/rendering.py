"""A conversation as the text that a server's model would have read and written.

For each assistant turn that is learnt, the prompt is what a server sends for the messages before it, and the
answer is what the target would have written after that prompt, up to and with its end-of-turn token.  Where
those prompts and answers all stand at the beginning of the whole conversation's rendering, one sequence holds
them all.  A template that rewrites earlier turns (it removes their thoughts: Qwen3, DeepSeek-R1; it ends the
last turn otherwise: gpt-oss) gives each turn a sequence of its own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .records import RowError
from .template import ChatTemplates, is_reserved
from .wire import Conversation, ImagePart, Message, TextPart


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt as a server sends it, and what the target writes after it.

    Attributes:
        turn: number of the assistant's message in the row.
        text: prompt and answer; the answer begins at character ``start``.
        start: see there.
        learnt: ranges of characters to learn; all lie after ``start``.
        images: the images in ``text``, in order.
    """

    turn: int
    text: str
    start: int
    learnt: tuple[tuple[int, int], ...]
    images: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        return self.text[: self.start]


@dataclass(slots=True)
class Notes:
    """What was passed over while rendering, counted for a summary.

    Attributes:
        unread: fields of turns that the template does not print, by name.
        joined: messages whose several text parts became one text.
        openings: assistant turns before which nothing was said; no server is asked for those.
    """

    unread: Counter[str] = field(default_factory=Counter)
    joined: int = 0
    openings: int = 0


class Rendering:
    """One conversation under one tokenizer's templates.

    Args:
        place: of its row.
        conversation: in the wire form.
        templates: the tokenizer's.
        specials: texts of the tokenizer's special tokens.
        notes: counts what is passed over.

    Raises:
        RowError: the template refuses the conversation, or a field of it changes nothing in the rendering.
    """

    def __init__(
        self,
        place: str,
        conversation: Conversation,
        templates: ChatTemplates,
        specials: Callable[[str], Iterator[tuple[int, int]]],
        notes: Notes,
    ) -> None:
        self.place = place
        self.conversation = conversation
        self._templates = templates
        self._specials = specials
        self._notes = notes
        self._template = templates.choose(conversation.tools)
        self._check_arguments_of_row()
        self._messages, self.whole = self._written()
        self._check_fields()

    @property
    def ends_with_answer(self) -> bool:
        """Whether the last message is the assistant's."""
        return self.conversation.messages[-1].is_assistant

    @cached_property
    def learnt_turns(self) -> tuple[int, ...]:
        """Assistant's turns that are learnt and that a server can be asked for."""
        turns = [at for at, message in enumerate(self.conversation.messages) if message.is_assistant]
        if turns and turns[0] == 0:
            self._notes.openings += 1
        return tuple(at for at in turns if at > 0 and self.conversation.messages[at].learn)

    def prompt(self, messages: int | None = None) -> str:
        """What a server sends to have the message after the first ``messages`` written; None for all."""
        return self._render(self._messages[:messages], prompt=True)[0]

    def images(self, messages: int | None = None) -> tuple[str, ...]:
        """The images in the first ``messages`` messages."""
        return tuple(i for message in self.conversation.messages[:messages] for i in message.images)

    def answer(self, turn: int) -> Answer:
        """The assistant's ``turn`` and its prompt.

        Raises:
            RowError: the target would not have written this answer after this prompt.
        """
        prompt = self.prompt(turn)
        answered, marks = self._render(self._messages[: turn + 1])
        if answered.startswith(prompt):
            self._check_reasoning(turn, answered)
            start, end = len(prompt), self._end(turn, answered, len(prompt))
            text = answered[:end]
            if not marks:
                text += self._ended_by_the_next_turn(turn, text)
                end = len(text)
        else:
            text, start, marks = self._written_by_the_target(turn, prompt, answered), len(prompt), ()
            end = len(text)
        spans: tuple[tuple[int, int], ...] = ((start, end),)
        if self._templates.is_marked(self._template) and answered.startswith(prompt):
            clipped = ((max(first, start), min(last, end)) for first, last in marks)
            spans = tuple((first, last) for first, last in clipped if first < last)
            if not spans:
                raise RowError(
                    self.place,
                    "generation marks that select nothing",
                    "the chat template's {% generation %} marks select no token of assistant turn "
                    f"{turn} of this conversation",
                )
        if start == len(text):
            raise RowError(
                self.place, "an empty answer", f"messages[{turn}]: the assistant's turn renders to nothing"
            )
        return Answer(turn, text, start, spans, self.images(turn + 1))

    def _end(self, turn: int, answered: str, start: int) -> int:
        """Where the assistant's turn ends: with its last special token, before what only the template writes.

        A template may set white space after a turn, or close the conversation after it (stock Phi-3 appends
        ``<|endoftext|>`` to ``<|end|>``).  Such a close is special tokens alone, behind a turn that has ended
        with one, and it is missing where the same conversation goes on.
        """
        specials = [span for span in self._specials(answered) if span[0] >= start]
        if not specials or answered[specials[-1][1] :].strip():
            return len(answered)
        last = specials[-1][1]
        if len(specials) == 1:
            return last
        try:
            further = self._render(self._messages[: turn + 1], prompt=True)[0]
        except RowError:
            return last
        common = _common(answered, further)
        common = next((first for first, end in specials if first < common < end), common)
        inside = [span for span in specials if span[1] <= common]
        close = [span for span in specials if span[0] >= common]
        ended = bool(inside) and not answered[inside[-1][1] : common].strip()
        written = "".join(answered[first:end] for first, end in close)
        if ended and "".join(answered[common:].split()) == written:
            return inside[-1][1]
        return last

    def _ended_by_the_next_turn(self, turn: int, text: str) -> str:
        """The special token that begins the next turn, where the target ends its own with it (GLM-4.5)."""
        after = self._messages[: turn + 2]
        if len(after) < turn + 2 or any(end == len(text) for _, end in self._specials(text)):
            return ""
        try:
            further = self._render(after)[0]
        except RowError:
            return ""
        common = _common(text, further)
        if common < len(text):  # the template has removed the turn's thought, now that it is history
            visible = _text_of(self.conversation.messages[turn]).rpartition("</think>")[2].strip()
            common = further.find(visible, common) + len(visible) if visible in further[common:] else -1
        return next((further[first:end] for first, end in self._specials(further) if first == common), "")

    def _written_by_the_target(self, turn: int, prompt: str, answered: str) -> str:
        """Prompt and answer where the prompt is not how the answered conversation begins.

        Either the template writes earlier messages otherwise once they are answered; the answer then stands
        behind the same header.  Or the prompt opens a thought that the template removes from answered turns
        (DeepSeek-R1); what the target wrote is then the message's own text, thought included.
        """
        message = self.conversation.messages[turn]
        visible = _text_of(message)
        header = self._header(turn, prompt)
        if header.strip() and header in answered:
            start = answered.rfind(header) + len(header)
            answer = answered[start : self._end(turn, answered, start)]
            if visible.rpartition("</think>")[2].strip() in answer:
                self._check_reasoning(turn, answered)
                return prompt + answer
        opened = prompt[_common(prompt, answered) :]
        thought, closed, after = visible.rpartition("</think>")
        if message.reasoning_content is not None:
            raw = f"<think>\n{message.reasoning_content.strip()}\n</think>\n\n{visible}"
            shown = visible.strip()
        else:
            raw, shown = visible, (after if closed else visible).strip()
        written = next((raw[len(o) :] for o in (opened, opened.rstrip()) if o and raw.startswith(o)), None)
        if written is None and thought.strip() and opened.strip() == "<think>" and "<think>" not in thought:
            written = raw  # the opening tag was the prompt's, so some tools leave it out of the answer
        at = answered.rfind(shown) if shown else -1
        if written is None or at < 0:
            raise RowError(
                self.place,
                "an answer that does not follow the prompt",
                f"messages[{turn}]: a server's prompt for this turn ends with {opened[-40:]!r}, and this "
                "answer does not begin there: the target would not have written it; have it answer again "
                "(capture-hooks data regenerate), or choose another template or other arguments "
                "(--chat-template, --template-arg)",
            )
        if opened.rstrip() != opened and not raw.startswith(opened):
            written = written.lstrip("\n")
        tail = answered[at + len(shown) : self._end(turn, answered, at)]
        return prompt + written.rstrip() + tail

    def _header(self, turn: int, prompt: str) -> str:
        """The generation prompt: what the template adds where the assistant's turn begins."""
        try:
            before = self._render(self._messages[:turn])[0]
        except RowError:
            return ""
        return prompt.removeprefix(before) if prompt.startswith(before) else ""

    def _render(
        self, messages: Sequence[dict[str, Any]], *, prompt: bool = False, tools: bool = True
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        if not messages:
            raise RowError(self.place, "nothing before the answer", "a server is not asked without a message")
        return self._templates.render(
            self.place,
            self._template,
            messages,
            tools=self.conversation.tools if tools else (),
            arguments=self.conversation.template_arguments,
            prompt=prompt,
        )

    def _written(self) -> tuple[list[dict[str, Any]], str]:
        """The messages in the form that this template takes, and the text of them all.

        Contents are texts or lists of parts, arguments of calls are objects or JSON texts: the first form is
        taken in which everything that is said appears in the text, as servers find out from the template.
        """
        conversation = self.conversation
        has_calls = any(message.tool_calls for message in conversation.messages)
        needs_parts = bool(conversation.images)
        forms = [(parts, as_json) for as_json in (False, *[True] * has_calls) for parts in (False, True)]
        refusal: RowError | None = None
        for parts, as_json in forms:
            if needs_parts and not parts:
                continue
            messages = [
                _written(message, self._template, parts, as_json) for message in conversation.messages
            ]
            try:
                text = self._render(messages)[0]
                self._check_contents(messages, text)
                self._check_arguments(text, as_json)
            except RowError as error:
                refusal = refusal or error
                continue
            if not parts:
                self._notes.joined += sum(
                    not isinstance(message.content, str) for message in conversation.messages
                )
            return messages, text
        assert refusal is not None
        raise refusal

    def _check_contents(self, messages: list[dict[str, Any]], text: str) -> None:
        """Every message's content shows: a mark set at its end appears in the rendering."""
        marked, marks = [], {}
        for at, message in enumerate(messages):
            content = _marked(message["content"], f"Zq{at}qZ")
            if content is not None:
                marks[at] = f"Zq{at}qZ"
                message = message | {"content": content}
            marked.append(message)
        if not marks:
            return
        shown = self._render(marked)[0]
        for at, mark in marks.items():
            if mark in shown or self._shows_when_answered(marked, at, mark):
                continue
            role = self.conversation.messages[at].role
            raise RowError(
                self.place,
                f"a message of role {role!r} that the template leaves out",
                f"messages[{at}]: the chat template leaves out this message's content (role {role!r}), "
                "so a server's model would not see it; use a template that has this role, or remove it",
            )
        if _has_python_list(messages, text):
            raise RowError(
                self.place, "parts that the template prints as Python", "the template takes no parts"
            )

    def _shows_when_answered(self, marked: list[dict[str, Any]], at: int, mark: str) -> bool:
        """Whether a message shows in the prompt of the next answer, if not in the whole conversation."""
        later = (i for i in range(at, len(marked)) if self.conversation.messages[i].is_assistant)
        end = next(later, None)
        if end is None:
            return False
        try:
            return mark in self._render(marked[: end + 1])[0]
        except RowError:
            return False

    def _check_arguments(self, text: str, as_json: bool) -> None:
        """Arguments of calls are not printed as Python's ``{'city': 'Paris'}``."""
        for message in self.conversation.messages:
            for call in message.tool_calls:
                arguments = call.function.arguments
                if (
                    arguments
                    and not as_json
                    and str(arguments) in text
                    and json.dumps(arguments) != str(arguments)
                ):
                    raise RowError(
                        self.place,
                        "arguments that the template prints as Python",
                        "the chat template prints the arguments of tool calls as Python does, not as JSON; "
                        "use a template that applies 'tojson' to them",
                    )

    def _check_arguments_of_row(self) -> None:
        for name in self.conversation.template_arguments:
            if is_reserved(name) or not self._templates.reads(self._template, name):
                raise RowError(
                    self.place,
                    f"an argument {name!r} that the template does not read",
                    f"chat_template_kwargs.{name} changes nothing: the chat template reads no such variable",
                )

    def _check_fields(self) -> None:
        """Each field beside role and content changes the rendering, or is counted as unread.

        Raises:
            RowError: a field that would be lost.
        """
        if self.conversation.tools and self._same_without_tools():
            raise RowError(
                self.place,
                "tools that the template leaves out",
                "'tools' changes nothing: the chat template has no place for tools; "
                "use a template that has, or remove them",
            )
        for at, message in enumerate(self.conversation.messages):
            self._check_message(at, message)

    def _check_message(self, at: int, message: Message) -> None:
        if message.tool_calls:
            self._need(at, "tool_calls", "tool calls")
        if message.name is not None and message.role in ("tool", "function"):
            if not self._matters(at, "name"):
                self._notes.unread["name"] += 1
        elif message.name is not None:
            self._need(at, "name", "names of those who speak")
        if message.reasoning_content is not None and not message.is_assistant:
            self._need(at, "reasoning_content", "thoughts")
        # Connects a result with its call.  Most templates do not print it, and nothing is lost by that.
        if message.tool_call_id is not None and not self._matters(at, "tool_call_id"):
            self._notes.unread["tool_call_id"] += 1
        for name in message.other:
            if not (name in self._template and self._matters(at, name)):
                self._notes.unread[name] += 1

    def _check_reasoning(self, turn: int, answered: str) -> None:
        if self.conversation.messages[turn].reasoning_content is not None:
            self._need(turn, "reasoning_content", "thoughts", answered)

    def _need(self, at: int, name: str, what: str, text: str | None = None) -> None:
        if not self._matters(at, name, text):
            raise RowError(
                self.place,
                f"{name} that the template leaves out",
                f"messages[{at}].{name} changes nothing: the chat template has no place for {what}; "
                "use a template that has (--chat-template), or remove the field",
            )

    def _matters(self, at: int, name: str, text: str | None = None) -> bool:
        """Whether the rendering up to a message is another without one of its fields."""
        messages = self._messages[: at + 1]
        names = _reasoning_names(self._template) if name == "reasoning_content" else (name,)
        bare = {key: value for key, value in messages[at].items() if key not in names}
        try:
            with_it = text if text is not None else self._render(messages)[0]
            return self._render([*messages[:at], bare])[0] != with_it
        except RowError:
            # The template refuses the conversation cut here or without the field: judge by the whole.
            try:
                changed = [*self._messages[:at], bare, *self._messages[at + 1 :]]
                return self._render(changed)[0] != self.whole
            except RowError:
                return True

    def _same_without_tools(self) -> bool:
        try:
            text = self._render(self._messages, tools=False)[0]
        except RowError:
            return False
        return text == self.whole


def _written(message: Message, template: str, parts: bool, as_json: bool) -> dict[str, Any]:
    made: dict[str, Any] = {**message.other, "role": message.role}
    if parts:
        made["content"] = _parts_of(message)
    else:
        made["content"] = _text_of(message)
    if message.reasoning_content is not None:
        made |= dict.fromkeys(_reasoning_names(template), message.reasoning_content)
    if message.tool_calls:
        made["tool_calls"] = [
            _call(call.model_dump(exclude_none=True), as_json) for call in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if getattr(message, name) is not None:
            made[name] = getattr(message, name)
    return made


def _call(call: dict[str, Any], as_json: bool) -> dict[str, Any]:
    if as_json:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return call | {"function": function | {"arguments": text}}
    return call


def _text_of(message: Message) -> str:
    """Its text; several parts on lines of their own, as vLLM 0.32 joins them (SGLang: by spaces)."""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content if isinstance(part, TextPart))


def _parts_of(message: Message) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"type": "text", "text": message.content}] if message.content else []
    return [
        {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
        for part in message.content
    ]


def _reasoning_names(template: str) -> tuple[str, ...]:
    """Under which names a template looks for thoughts: gpt-oss reads ``thinking``."""
    names = tuple(
        name for name in ("thinking", "reasoning") if f".{name}" in template or f"'{name}'" in template
    )
    return ("reasoning_content", *names)


def _marked(content: Any, mark: str) -> Any:
    """A content whose last text ends with ``mark``; None where it has no text."""
    if isinstance(content, str):
        return content + mark if content.strip() else None
    texts = [at for at, part in enumerate(content) if part["type"] == "text" and part["text"].strip()]
    if not texts:
        return None
    part = content[texts[-1]]
    return [*content[: texts[-1]], part | {"text": part["text"] + mark}, *content[texts[-1] + 1 :]]


def _has_python_list(messages: list[dict[str, Any]], text: str) -> bool:
    """Whether a list of parts was printed as Python prints it."""
    return any(
        not isinstance(message["content"], str) and message["content"] and str(message["content"]) in text
        for message in messages
    )


def _common(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
