"""What must hold of data before it is run, and of states before they are stored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..errors import DataError, StoreError
from .data import Example
from .manifest import Manifest
from .shard import ShardTensors
from .stream import all_finite

#: How configurations of transformers name such tokens: image_token_id, vision_start_token_id, ...
_MEDIA_TOKEN: Final = re.compile(r"(image|video|vision|frame|audio|boi|eoi|boa|eoa)(_\w+)?_token_(id|index)$")
_PLACEHOLDER: Final = re.compile(r"(image|video|audio)_token_(id|index)$")


def image_tokens(model: nn.Module, names: re.Pattern[str] = _MEDIA_TOKEN) -> frozenset[int]:
    """Ids of the tokens that stand for images, video or sound, or surround them, by the configuration."""
    config: Any = getattr(model, "config", None)
    fields: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    return frozenset(id_ for name, id_ in fields.items() if names.match(name) and type(id_) is int)


def check_examples(examples: Sequence[Example], vocab_size: int, context: int | None) -> None:
    """Whether a model can read the data.

    Raises:
        DataError: a sequence longer than its context, or a token outside its vocabulary.
    """
    for example in examples:
        if context is not None and len(example) > context:
            raise DataError(
                f"{example.source}: {len(example)} tokens, but the model's context ends at {context}; "
                "truncate or skip such sequences (--too-long)"
            )
        least, most = int(example.token_ids.min()), int(example.token_ids.max())
        if least < 0 or most >= vocab_size:
            raise DataError(
                f"{example.source}: token ids from {least} to {most} do not fit the model's vocabulary of "
                f"{vocab_size}; the data was made for another model or tokenizer"
            )


def check_placeholders(examples: Sequence[Example], model: nn.Module) -> None:
    """Whether no token stands for an image (or video, or sound) that is not there.

    Raises:
        DataError: one does; the model would read it as a word.
    """
    standing = torch.tensor(sorted(image_tokens(model, _PLACEHOLDER)), dtype=torch.int64)
    for example in examples if len(standing) else ():
        found = example.token_ids[torch.isin(example.token_ids, standing)]
        if example.media is None and len(found):
            raise DataError(
                f"{example.source}: token {int(found[0])} stands for an image, video or sound, and there is "
                "none; images are parts of a message ({'type': 'image', ...}), token ids cannot hold them"
            )


def check_text_alone(examples: Sequence[Example], what: str) -> None:
    """Whether no sequence has images, which ``what`` would not be sent.

    Raises:
        DataError: some have; names the first.
    """
    seen = [example for example in examples if example.media is not None]
    if seen:
        raise DataError(
            f"{seen[0].source}: {len(seen)} of {len(examples)} sequences have images, which are not sent to "
            f"{what}; run the target in this process (--engine embedded)"
        )


def check_finite(manifest: Manifest, shard: ShardTensors, examples: Sequence[Example], first: int) -> None:
    """Whether every state of a shard is a number.

    Args:
        manifest: of the dump.
        shard: its tensors, already in the dump's dtype.
        examples: its sequences.
        first: index of the first of them in the data.

    Raises:
        StoreError: naming the shallowest such point, the conversation and the position.
    """
    if all_finite(shard.states) and (shard.target is None or all_finite(shard.target)):
        return
    for point, states in _points(manifest, shard):
        if all_finite(states):
            continue
        finite = torch.isfinite(states)
        row, column = (~finite).nonzero()[0].tolist()
        within = int(torch.searchsorted(shard.starts, row, right=True)) - 1
        value = float(states[row, column])
        advice = "check the model's weights and dtype"
        if manifest.dtype == "float16" and value == value:
            advice = "float16 ends at 65504: dump in bfloat16 or float32 (--dtype)"
        raise StoreError(
            f"{point} is {value} in {manifest.dtype} in conversation {first + within} "
            f"({examples[within].source}) at position {row - int(shard.starts[within])}, "
            f"column {column}; {advice}"
        )


def _points(manifest: Manifest, shard: ShardTensors) -> list[tuple[str, Tensor]]:
    """Each point's states, the shallowest first: attention spreads a NaN over all rows of deeper ones."""
    spec = manifest.spec.resolve(manifest.n_layers, manifest.split_boundaries)
    inputs = zip(spec.inputs, manifest.spec.inputs, manifest.columns, strict=True)
    ordered = sorted(
        inputs, key=lambda item: manifest.n_layers if item[0].boundary is None else item[0].boundary
    )
    found = [(str(point), shard.states[:, first:last]) for _, point, (first, last) in ordered]
    if shard.target is not None:
        found.append((f"target {manifest.spec.target}", shard.target))
    return found
