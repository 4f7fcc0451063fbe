"""Rows whose answers are written again, one after the other: each answer stands in the prompts after it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...store.data.forms import Form, TokenIds
from ...store.data.records import Row, RowError
from ...store.data.wire import Conversation, Message
from ..contract import Generated, PromptRequest
from .journal import Record
from .messages import Answers, conversation_fields, message_fields

Unfinished = Literal["drop", "keep"]


@dataclass(frozen=True, slots=True)
class Asking:
    """Settings that all rows of a run share, and where their answers go.

    Attributes:
        seed: of the run.
        max_new_tokens: most tokens of an answer.
        context: most tokens of prompt and answer, None for any number.
        unfinished: whether a row ends before an answer that reached the limit, or holds it as it is.
        answers: reads and writes conversations.
        record: takes what is new, and how many answers of its row that settles.
        bad: takes the error of a row that cannot be used; raises it, or returns why it is left out.
    """

    seed: int
    max_new_tokens: int
    context: int | None
    unfinished: Unfinished
    answers: Answers
    record: Callable[[Record, int], None]
    bad: Callable[[RowError], str]

    def seed_of(self, row: int, turn: int) -> int:
        """The seed of one answer, the same whatever is answered beside it."""
        digest = hashlib.sha256(f"{self.seed}/{row}/{turn}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


@dataclass(slots=True)
class Left:
    """Assistant's turns that stay as they are, by why."""

    calls: int = 0
    unlearnt: int = 0
    openings: int = 0
    following: int = 0


class Answering:
    """One row.

    Args:
        number: of the row.
        row: as read.
        form: what it is.
        records: its answers so far.
    """

    def __init__(self, number: int, row: Row, form: Form, records: Sequence[Record]) -> None:
        self.number, self.row, self.form = number, row, form
        self.left = Left()
        self._records = list(records)
        self._taken = 0
        self._stopped = False
        self._asking: Asking | None = None

    @property
    def asked(self) -> int:
        """How many answers the row has."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """Whether all of them are known."""
        return len(self._records) == self.asked or any(record.ends_row for record in self._records)

    @property
    def remaining(self) -> int:
        """How many are not known."""
        return 0 if self.finished else self.asked - len(self._records)

    def begin(self, asking: Asking) -> Answering:
        """Set how this row is asked; call it before `asks`."""
        self._asking = asking
        return self

    def asks(self) -> PromptRequest | None:
        """The next prompt, or None; see `capture_hooks.decoding.contract.Dialogue`.

        Raises:
            RowError: the row cannot be used, and is not to be left out.
        """
        assert self._asking is not None
        if self._stopped or self._taken == self.asked:
            return None
        known = self._taken < len(self._records)
        if known and self._records[self._taken].cut == "too long":
            return None  # was never asked
        if known and self._records[self._taken].left_out:
            return None
        try:
            prompt = self._prompt()
        except RowError as error:
            reason = self._asking.bad(error)
            self._new(Record(self.number, self._taken, left_out=reason, place=error.place))
            return None
        limit = self._asking.max_new_tokens
        if self._asking.context is not None:
            limit = min(limit, self._asking.context - len(prompt))
        if limit < 1:
            self._new(Record(self.number, self._taken, cut="too long"))
            return None
        return PromptRequest(prompt, limit, self._asking.seed_of(self.number, self._taken), known)

    def takes(self, answer: Generated | None) -> int:
        """Take the answer to the last prompt (None where it is known); returns how many tokens were new."""
        if answer is None:
            self._apply(self._records[self._taken])
            return 0
        assert self._asking is not None
        if not answer.ended and self._asking.unfinished == "drop":
            record = Record(self.number, self._taken, len(answer.token_ids), cut="unfinished")
        else:
            record = self._made(answer)
        self._new(record)
        return len(answer.token_ids)

    def replay(self) -> list[Record]:
        """Take all answers that are known, and return them."""
        for record in self._records[self._taken :]:
            self._apply(record)
        return self._records

    def fields(self) -> dict[str, Any] | None:
        """The row with its new answers; None where nothing to learn is left of it."""
        raise NotImplementedError

    def _new(self, record: Record) -> None:
        assert self._asking is not None
        self._asking.record(record, self.asked - record.turn if record.ends_row else 1)
        self._records.append(record)
        self._apply(record)

    def _apply(self, record: Record) -> None:
        self._taken += 1
        if record.ends_row:
            self._stopped = True
        else:
            self._answer(record)

    def _carried(self) -> dict[str, Any]:
        """Columns of the row that are no part of the conversation; they are kept as they are."""
        return {name: value for name, value in self.row.fields.items() if name in self.form.unread}

    def _prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt for the next answer."""
        raise NotImplementedError

    def _made(self, answer: Generated) -> Record:
        """The record of an answer, as the journal keeps it."""
        raise NotImplementedError

    def _answer(self, record: Record) -> None:
        """Put an answer into the row."""
        raise NotImplementedError


class AnsweringConversation(Answering):
    """A conversation.  Turns with tool calls stay, and their results; one without a last answer gets it."""

    def __init__(
        self, number: int, row: Row, form: Form, records: Sequence[Record], arguments: Mapping[str, Any]
    ) -> None:
        super().__init__(number, row, form, records)
        assert isinstance(form.content, Conversation)
        self._conversation = form.content
        self._beside = conversation_fields(form.content, arguments)
        self._turns = self._asked_turns(form.content.messages)
        self._messages: list[dict[str, Any]] = []
        self._keep_up_to(0)

    @property
    def asked(self) -> int:
        return len(self._turns)

    def fields(self) -> dict[str, Any] | None:
        kept = list(self._messages)
        if self._stopped:
            while kept and kept[-1]["role"] != "assistant":
                kept.pop()
            if not any(m["role"] == "assistant" and m.get("weight") != 0 for m in kept[1:]):
                return None
        return {"messages": kept, **self._beside, **self._carried()}

    def old_answers(self) -> list[str]:
        """Texts of the answers that are written again."""
        messages = self._conversation.messages
        found = [messages[at] for at in self._turns if at < len(messages)]
        return [m.content if isinstance(m.content, str) else "" for m in found]

    def _asked_turns(self, messages: Sequence[Message]) -> list[int]:
        """Places of the messages that are written again; the one behind the last where that is no answer."""
        turns = []
        for at, message in enumerate(messages):
            if not message.is_assistant:
                continue
            if at == 0:
                self.left.openings += 1
            elif message.tool_calls:
                self.left.calls += 1
            elif not message.learn:
                self.left.unlearnt += 1
            elif messages[at - 1].is_assistant:
                self.left.following += 1
            else:
                turns.append(at)
        return turns if messages[-1].is_assistant else [*turns, len(messages)]

    def _keep_up_to(self, answered: int) -> None:
        """Messages behind the last answer that stay as they are, up to the next one."""
        messages = self._conversation.messages
        first = self._turns[answered - 1] + 1 if answered else 0
        last = self._turns[answered] if answered < len(self._turns) else len(messages)
        self._messages += [message_fields(message) for message in messages[first:last]]

    def _so_far(self) -> Row:
        return Row(self.row.place, {"messages": self._messages, **self._beside})

    def _prompt(self) -> tuple[int, ...]:
        assert self._asking is not None
        self._prompted = self._asking.answers.prompt(self._so_far())
        return self._prompted

    def _made(self, answer: Generated) -> Record:
        assert self._asking is not None
        message, fit = self._asking.answers.message(self._so_far(), self._prompted, answer)
        tokens = len(answer.token_ids)
        if message is None:
            return Record(self.number, self._taken, tokens, cut="unreadable")
        return Record(self.number, self._taken, tokens, message=message, fit=fit)

    def _answer(self, record: Record) -> None:
        assert record.message is not None
        self._messages.append(record.message)
        self._keep_up_to(self._taken)


class AnsweringIds(Answering):
    """Token ids: each run of them that is learnt is written again, and kept as the target wrote it."""

    def __init__(self, number: int, row: Row, form: Form, records: Sequence[Record]) -> None:
        super().__init__(number, row, form, records)
        assert isinstance(form.content, TokenIds)
        self._old = form.content.ids
        self._runs = _runs(form.content.mask, len(self._old))
        if self._runs and self._runs[0][0] == 0:
            self.left.openings += 1
            del self._runs[0]
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._keep_up_to(0)

    @property
    def asked(self) -> int:
        return len(self._runs)

    def fields(self) -> dict[str, Any] | None:
        if not self._runs:
            return {name: value for name, value in self.row.fields.items() if value is not None}
        if self._stopped and not any(self._mask):
            return None
        last = len(self._ids)
        while self._stopped and not self._mask[last - 1]:
            last -= 1
        if "prompt_ids" in self.row.fields:
            prompt = self._runs[0][0]
            ids = {"prompt_ids": self._ids[:prompt], "answer_ids": self._ids[prompt:last]}
        else:
            ids = {"input_ids": self._ids[:last], "loss_mask": self._mask[:last]}
        return {**ids, **self._carried()}

    def old_lengths(self) -> list[int]:
        """Tokens of the answers that are written again."""
        return [last - first for first, last in self._runs if last > first]

    def _keep_up_to(self, answered: int) -> None:
        first = self._runs[answered - 1][1] if answered else 0
        last = self._runs[answered][0] if answered < len(self._runs) else len(self._old)
        kept = self._old[first:last]
        if answered and kept and self._ids and kept[0] == self._ids[-1]:
            kept = kept[1:]  # the old answer's end stood behind its mask, the new one's is its own
        self._mask += [int(answered == 0 and at < self._opening) for at in range(len(kept))]
        self._ids += kept

    @property
    def _opening(self) -> int:
        """Tokens to learn at the beginning, before which nothing can be asked."""
        content = self.form.content
        assert isinstance(content, TokenIds)
        mask = content.mask or []
        return next((at for at, learnt in enumerate(mask) if not learnt), len(mask))

    def _prompt(self) -> tuple[int, ...]:
        assert self._asking is not None
        return self._asking.answers.prompt(Row(self.row.place, {"prompt_ids": list(self._ids)}))

    def _made(self, answer: Generated) -> Record:
        ids = list(answer.token_ids)
        return Record(self.number, self._taken, len(ids), ids=ids, fit="exact")

    def _answer(self, record: Record) -> None:
        assert record.ids is not None
        self._ids += record.ids
        self._mask += [1] * len(record.ids)
        self._keep_up_to(self._taken)


def answering(
    number: int, row: Row, form: Form, records: Sequence[Record], arguments: Mapping[str, Any]
) -> Answering:
    """A row with its answers so far.

    Raises:
        RowError: text alone, which nobody answers; or images.
    """
    if isinstance(form.content, Conversation):
        if form.content.images:
            raise RowError(row.place, "images", "there are images, and answers are written to text alone")
        return AnsweringConversation(number, row, form, records, arguments)
    if isinstance(form.content, TokenIds):
        return AnsweringIds(number, row, form, records)
    raise RowError(
        row.place,
        "text without a question",
        "'text' is taken as it is, so nothing in it is an answer; give conversations, a 'prompt' or "
        "'prompt_ids'",
    )


def _runs(mask: Sequence[bool] | None, length: int) -> list[tuple[int, int]]:
    """Where runs of tokens to learn begin and end; the place behind the last token where there is no mask."""
    if mask is None:
        return [(length, length)]
    edges = [at for at in range(length + 1) if (at < length and mask[at]) != (at > 0 and mask[at - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))
