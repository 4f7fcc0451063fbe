"""Prompts to decode, from the same files that training reads, with or without their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import DataError
from ..store.data.chat import ChatEncoder, messages_of
from ..store.data.records import read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMS = (
    "a record has 'prompt_ids' (and 'answer_ids'), or 'input_ids' and 'loss_mask', or 'messages', or "
    "'conversations', or 'prompt', or 'text' (looked for in this order)"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and, where the data has one, a conversation that answers it.

    Attributes:
        token_ids: [N] the prompt.
        answered: [T] token ids of prompt and answer, or None.
        loss_mask: [T] bool, the answer's tokens in ``answered``, or None.
        source: where it came from.
    """

    token_ids: Tensor
    answered: Tensor | None = None
    loss_mask: Tensor | None = None
    source: str = ""


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a conversation up to the point where the assistant is to answer.

    Raises:
        DataError: for a tokenizer without a chat template.
    """
    template = ChatEncoder(tokenizer).template
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def read_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    vocab_size: int | None = None,
    limit: int | None = None,
) -> list[Prompt]:
    """Read a file of prompts.

    A conversation is asked again at its last assistant turn; one that ends with the user is a prompt
    without an answer, as is a ``prompt`` (a user's message) or a plain ``text`` (taken as it is).

    Args:
        path: .jsonl, .json, .txt (each also .gz), or a directory that `datasets` saved.
        tokenizer: needed unless every record holds token ids.
        vocab_size: the target's; ids outside it are an error.
        limit: read only the first so many records.

    Raises:
        DataError: for data that cannot be used; names file and line.
    """
    prompts = [_prompt(place, fields, tokenizer) for place, fields in islice(read_records(Path(path)), limit)]
    if not prompts:
        raise DataError(f"{path} is an empty data set: it holds no record")
    for prompt in prompts:
        if not len(prompt.token_ids):
            raise DataError(f"{prompt.source}: the prompt is empty")
        ids = prompt.token_ids if prompt.answered is None else prompt.answered
        if vocab_size is not None and int(ids.max()) >= vocab_size:
            raise DataError(
                f"{prompt.source}: token id {int(ids.max())} is outside the model's vocabulary of "
                f"{vocab_size}; the data was made for another model or tokenizer"
            )
    return prompts


def _prompt(place: str, fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> Prompt:
    fields = {name: value for name, value in fields.items() if value is not None}
    if "prompt_ids" in fields:
        ids, answer = (_ids(place, fields.get(name, []), name) for name in ("prompt_ids", "answer_ids"))
        return _split(place, ids + answer, [False] * len(ids) + [True] * len(answer))
    if {"input_ids", "loss_mask"} <= fields.keys():
        ids = _ids(place, fields["input_ids"], "input_ids")
        mask = fields["loss_mask"]
        if not isinstance(mask, list) or len(mask) != len(ids) or any(bit not in (0, 1) for bit in mask):
            raise DataError(f"{place}: 'loss_mask' is a list of 0 and 1, one for each of 'input_ids'")
        return _split(place, ids, [bool(bit) for bit in mask])
    if tokenizer is None:
        raise DataError(f"{place}: text needs a tokenizer, and none was given; give one, or give token ids")
    for name in ("messages", "conversations"):
        if name in fields:
            messages = messages_of(place, fields[name])
            if messages[-1]["role"] == "assistant":
                return _split(place, *ChatEncoder(tokenizer).encode(place, messages, fields.get("tools")))
            return Prompt(torch.tensor(chat_prompt(tokenizer, messages)), source=place)
    for name in ("prompt", "text"):
        if name in fields:
            text = fields[name]
            if not isinstance(text, str):
                raise DataError(f"{place}: {name!r} is a string, not {str(text)[:40]!r}")
            if name == "prompt":
                ids = chat_prompt(tokenizer, [{"role": "user", "content": text}])
            else:
                ids = list(tokenizer(text, verbose=False)["input_ids"])
            return Prompt(torch.tensor(ids, dtype=torch.long), source=place)
    raise DataError(f"{place}: nothing to read in a record of {sorted(fields)}; {_FORMS}")


def _split(place: str, ids: list[int], mask: list[bool]) -> Prompt:
    """The prompt is everything before the last run of tokens to learn."""
    end = len(mask)
    while end and not mask[end - 1]:
        end -= 1
    start = end
    while start and mask[start - 1]:
        start -= 1
    tokens = torch.tensor(ids, dtype=torch.long)
    if end == 0:
        return Prompt(tokens, source=place)
    return Prompt(tokens[:start], tokens, torch.tensor(mask), place)


def _ids(place: str, value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or any(type(token) is not int or token < 0 for token in value):
        raise DataError(f"{place}: {name!r} is a list of token ids, not {str(value)[:40]!r}")
    return value
