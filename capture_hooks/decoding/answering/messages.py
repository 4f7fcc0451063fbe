"""Answers as messages, and conversations as rows: what the reader makes of them again is what was written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ...store.data import Row, RowEncoder, RowError
from ...store.data.wire import Conversation, ImagePart, Message
from ..contract import Generated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: How what is learnt from an answer compares with what the target wrote, best first.
FITS: Final = ("exact", "without its end", "other end", "other tokens", "other text")
#: gpt-oss writes its thoughts and its answer into channels (harmony format).
_CHANNELS: Final = re.compile(
    r"(?:<\|channel\|>analysis<\|message\|>(?P<thought>.*?)<\|end\|><\|start\|>assistant)?"
    r"<\|channel\|>final<\|message\|>(?P<answer>.*)",
    re.DOTALL,
)
#: Tokens of a prompt that are decoded with an answer: some tokenizers drop a space at the beginning.
_BEFORE: Final = 8


class Answers:
    """Turns what a target wrote into messages.

    Args:
        encoder: the reader's, for the last turn of a conversation.
        tokenizer: the target's; None where rows hold token ids alone.
    """

    def __init__(self, encoder: RowEncoder, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._encoder, self._tokenizer = encoder, tokenizer

    def prompt(self, row: Row) -> tuple[int, ...]:
        """What a server is sent to have a row answered that does not end with an answer.

        Raises:
            RowError: the row cannot be used.
        """
        (prompt,) = self._encoder.prompts(row)
        return tuple(prompt.ids)

    def message(
        self, row: Row, prompt: Sequence[int], answer: Generated
    ) -> tuple[dict[str, Any] | None, str]:
        """The message that the reader takes for this answer, as nearly as there is one, and its fit.

        None where the template shows no form of it.

        Args:
            row: the conversation that was answered.
            prompt: its token ids.
            answer: what the target wrote.
        """
        ids = answer.token_ids
        text = self._text(prompt, ids[:-1] if answer.ended else ids)
        best: tuple[int, dict[str, Any]] | None = None
        for message in _forms(text):
            fields = {**row.fields, "messages": [*row.fields["messages"], message]}
            try:
                (read,) = self._encoder.sequences(Row(row.place, fields))
            except RowError:
                continue
            assert read.mask is not None
            learnt = [token for token, counts in zip(read.ids, read.mask, strict=True) if counts]
            fit = FITS.index(self._fit(learnt, answer) if read.ids[: len(prompt)] == [*prompt] else FITS[-1])
            if best is None or fit < best[0]:
                best = fit, message
            if fit == 0:
                break
        return (None, "") if best is None else (best[1], FITS[best[0]])

    def _fit(self, learnt: list[int], answer: Generated) -> str:
        written = list(answer.token_ids)
        if learnt == written:
            return "exact"
        if not answer.ended and learnt[: len(written)] == written:
            return "without its end"
        body = written[:-1] if answer.ended else written
        if learnt[: len(body)] == body and len(learnt) <= len(body) + 1:
            return "other end"
        return "other tokens" if self._decoded(learnt) == self._decoded(written) else "other text"

    def _text(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        before = list(prompt[-_BEFORE:])
        head, whole = self._decoded(before), self._decoded([*before, *ids])
        return whole[len(head) :] if whole.startswith(head) else self._decoded(ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        text: Any = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)


def _forms(text: str) -> Iterator[dict[str, Any]]:
    """Messages that may stand for an answer; thoughts by themselves first, as servers hand them on."""
    before, closed, after = text.partition("</think>")
    if closed:
        thought = before.strip().removeprefix("<think>").strip("\n")
        yield {"role": "assistant", "content": after.lstrip("\n"), "reasoning_content": thought}
    if (found := _CHANNELS.fullmatch(text)) is not None:
        thoughts = {} if found["thought"] is None else {"reasoning_content": found["thought"]}
        yield {"role": "assistant", "content": found["answer"], **thoughts}
    yield {"role": "assistant", "content": text}
    if "<think>" not in text:  # the prompt may have opened the thought
        yield {"role": "assistant", "content": "<think>\n" + text}


def message_fields(message: Message) -> dict[str, Any]:
    """A message as a row holds it."""
    content: Any = message.content
    if not isinstance(content, str):
        content = [
            {"type": "image", "image": part.image}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": part.text}
            for part in content
        ]
    made: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning_content is not None:
        made["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        made["tool_calls"] = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": "function",
                "function": call.function.model_dump(),
            }
            for call in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if getattr(message, name) is not None:
            made[name] = getattr(message, name)
    return made | message.other | ({} if message.learn else {"weight": 0})


def conversation_fields(conversation: Conversation, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a row holds beside its messages.

    Args:
        conversation: of the row.
        arguments: of the chat template, beside the row's own.
    """
    made: dict[str, Any] = {}
    if conversation.tools:
        made["tools"] = list(conversation.tools)
    if arguments := {**arguments, **conversation.template_arguments}:
        made["chat_template_kwargs"] = dict(arguments)
    return made
