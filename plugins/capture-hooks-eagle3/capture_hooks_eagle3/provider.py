"""The provider of the ``eagle3`` head: makes fresh heads, and restores saved ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from capture_hooks.capture.anatomy import Anatomy
from capture_hooks.capture.weights import table
from capture_hooks.errors import BindError, HeadError
from capture_hooks.heads.contract import TargetReadout
from capture_hooks.heads.vocabulary import check_vocabulary
from capture_hooks.spec import CaptureSpec

from .checkpoint import load_tensors, read_config
from .config import Eagle3Config
from .head import Eagle3Head
from .schema import SCHEMA
from .start import start_from_target


class Eagle3Provider:
    """Makes and loads `Eagle3Head`."""

    name = "eagle3"
    config_type: type = Eagle3Config
    schema = SCHEMA

    def create(
        self,
        config: Eagle3Config,
        spec: CaptureSpec,
        anatomy: Anatomy,
        readout: TargetReadout,
        draft_token_ids: Tensor,
    ) -> Eagle3Head:
        """A fresh head: random weights (torch's global generator), then the start that ``config`` describes.

        Raises:
            HeadError: for settings that contradict the target or each other.
        """
        rows = _embedding_table(anatomy)
        head = Eagle3Head(config.filled(anatomy), spec, anatomy.n_layers, rows, readout, draft_token_ids)
        start_from_target(head, config, anatomy, readout)
        return head

    def restore(
        self,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        spec: CaptureSpec,
        order: Sequence[int],
        anatomy: Anatomy,
        readout: TargetReadout,
    ) -> Eagle3Head:
        """The head that `Eagle3Head.export` wrote, in the file's precision, or another library's raw head.

        Raises:
            HeadError: for missing, misshapen or contradictory tensors and fields.
        """
        settings = read_config(config)
        rows = _embedding_table(anatomy)
        if (found := config.get("hidden_size")) != rows.shape[1]:
            raise HeadError(f"eagle3: config.json has hidden_size = {found}; the target's is {rows.shape[1]}")
        size, vocabulary = int(config["draft_vocab_size"]), readout.weight.shape[0]
        ids = check_vocabulary(tensors, size, vocabulary, "eagle3")
        if "embed_tokens.weight" in tensors and not settings.train_embedding:
            settings = _with_own_embedding(settings, tensors["embed_tokens.weight"], rows)
        head = Eagle3Head(settings, spec, anatomy.n_layers, rows, readout, ids)
        head.to(next((t.dtype for t in tensors.values() if t.is_floating_point()), head.dtype))
        load_tensors(head, tensors, order)
        head.fc_learnt = 0
        return head


def _with_own_embedding(settings: Eagle3Config, own: Tensor, rows: Tensor) -> Eagle3Config:
    """A file that carries an embedding: the target's own again is ignored, another one is kept."""
    if own.shape != rows.shape:
        raise HeadError(
            f"eagle3: embed_tokens.weight is {list(own.shape)} in the file; "
            f"the target's embedding is {list(rows.shape)}"
        )
    same = torch.equal(own.to(rows.device, rows.dtype), rows)
    return settings if same else replace(settings, train_embedding=True)


def _embedding_table(anatomy: Anatomy) -> Tensor:
    try:
        weight = table(anatomy.embedding)
    except BindError as error:
        raise HeadError(f"eagle3: a head shares the target's embedding: {error}") from None
    if weight.shape[1] != anatomy.hidden_size:
        raise HeadError(
            f"eagle3: the target's embedding is {weight.shape[1]} wide and its stream {anatomy.hidden_size}; "
            "an EAGLE-3 head needs them equal"
        )
    return weight
