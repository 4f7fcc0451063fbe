"""The files of speculators up to 0.5: ``**/*.pt``, one ``torch.save`` of a dict for each sequence.

Version 1 (written and read by 0.3 to 0.5): ``input_ids`` [T] int64, ``loss_mask`` [T] int64 and
``hidden_states``, a list of [T, H]: the captured inputs and, behind them, the last hidden state.
Version 0 (read by 0.3): ``input_ids``, ``loss_mask``, ``hidden_state`` [T, 3*H] and ``target`` [T, H].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import StoreError
from ...store import pickles
from .contract import Meaning, Plan, Rows, Source
from .files import FileSource, marks, numbered, states, tensor_in, token_ids
from .saving import Copies, save_dict, saved

_MASK = (
    "marks are the assistant's tokens; readers shift them with the last hidden state (0.3.0 "
    "train/data.py:39, models/eagle3/data.py:8 since)"
)
V1 = Meaning(
    library="speculators",
    versions="0.3.0 to 0.5.0",
    last="unnormed",
    about_last=(
        "the generator takes it before the norm (0.3.0 data_generation/custom_worker.py:46) and the "
        "trainer norms it (0.4.0 models/eagle3/core.py:402); 0.3.0's trainer forgot to "
        "(models/eagle3/core.py:328)"
    ),
    mask_lag=1,
    about_mask=_MASK,
    wants="unnormed",
)
V0 = Meaning(
    library="speculators",
    versions="0.3.0",
    last="normed",
    about_last="the trainer applies lm_head to 'target' directly (0.3.0 models/eagle3/core.py:328)",
    mask_lag=1,
    about_mask=_MASK,
    wants="normed",
)


class _V1Source(FileSource):
    def _read(self, path: Path) -> Rows:
        content = pickles.load(path)
        self._known(path, content, ("input_ids", "loss_mask", "hidden_states"))
        ids, mask = _tokens(path, content)
        layers = content.get("hidden_states")
        if not isinstance(layers, list | tuple) or len(layers) < 2:
            raise StoreError(
                f"{path}: 'hidden_states' is a list of two or more [T, H] tensors in version 1, not a "
                f"{type(layers).__name__}"
            )
        hidden = layers[-1].shape[-1] if isinstance(layers[-1], Tensor) and layers[-1].ndim else None
        for layer in layers:
            if not isinstance(layer, Tensor) or layer.dtype != layers[-1].dtype:
                raise StoreError(f"{path}: 'hidden_states' is a list of tensors of one dtype")
            states(path, "a layer of hidden_states", layer, (len(ids), hidden))
        return Rows(str(path), ids, mask, torch.cat(layers[:-1], dim=1), layers[-1].contiguous())


class _V0Source(FileSource):
    def _read(self, path: Path) -> Rows:
        content = pickles.load(path)
        self._known(path, content, ("input_ids", "loss_mask", "hidden_state", "target"))
        ids, mask = _tokens(path, content)
        inputs = states(path, "hidden_state", tensor_in(path, content, "hidden_state"), (len(ids), None))
        last = states(path, "target", tensor_in(path, content, "target"), (len(ids), None))
        return Rows(str(path), ids, mask, inputs, last)


class SpeculatorsFiles:
    """One of the two versions."""

    pickles = True
    says_points = False
    resumes = False

    def __init__(self, version: int) -> None:
        self.version = version
        self.name = f"speculators-v{version}"
        self.meaning = V1 if version == 1 else V0

    def recognises(self, directory: Path) -> bool:
        files = _files(directory)
        if not files:
            return False
        keys = pickles.strings_in(files[0])
        if self.version == 0:
            return {"input_ids", "loss_mask", "hidden_state", "target"} <= keys
        return {"input_ids", "loss_mask", "hidden_states"} <= keys and "aux_hidden_states" not in keys

    def open(self, directory: Path) -> Source:
        files = _files(directory)
        return _V1Source(directory, files) if self.version == 1 else _V0Source(directory, files)

    def write(self, directory: Path, rows: Source, plan: Plan) -> None:
        if rows.facts.slots is None:
            raise StoreError(
                f"speculators' files hold states of one width; inputs of {rows.facts.width} columns are no "
                f"multiple of {rows.facts.hidden}"
            )
        copies = Copies()
        for index in range(len(rows)):
            one = rows.rows(index)
            assert one.loss_mask is not None
            inputs = torch.split(one.inputs, rows.facts.hidden, dim=1) if self.version == 1 else [one.inputs]
            ids, *layers = copies.of(one.token_ids, *inputs, one.last)
            content: dict[str, Any] = {"input_ids": ids, "loss_mask": one.loss_mask.long()}
            if self.version == 1:
                content["hidden_states"] = layers
            else:
                content["hidden_state"], content["target"] = layers
            with saved(directory / f"data_{index}.pt") as file:
                save_dict(content, file)


def _tokens(path: Path, content: dict[str, Any]) -> tuple[Tensor, Tensor]:
    ids = token_ids(path, tensor_in(path, content, "input_ids"))
    return ids, marks(path, tensor_in(path, content, "loss_mask"), len(ids))


def _files(directory: Path) -> list[Path]:
    return numbered([*directory.rglob("*.pt")])
