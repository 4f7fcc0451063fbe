"""speculators' data.  Since 0.5: a directory that `datasets` saved, a file of states for each row.

==========================================  =========================================================
``dataset_info.json``, ``state.json``, …    columns ``input_ids``, ``loss_mask`` (1 for the assistant's
                                            tokens) and ``seq_len``
``hidden_states/hs_<row>.safetensors``      ``hidden_states`` [T, K+1, H], the last hidden state as the
                                            last of them, and ``token_ids`` [T] int64
``token_freq.pt``                           how often each token is to be learnt, for the draft vocabulary
==========================================  =========================================================

Up to 0.5: ``**/*.pt``, one ``torch.save`` of a dict for each sequence.
Version 1 (written and read by 0.3 to 0.5): ``input_ids`` [T] int64, ``loss_mask`` [T] int64 and
``hidden_states``, a list of [T, H]: the captured inputs and, behind them, the last hidden state.
Version 0 (read by 0.3): ``input_ids``, ``loss_mask``, ``hidden_state`` [T, 3*H] and ``target`` [T, H].
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...errors import StoreError
from ...io import files_within
from .. import pickles
from .contract import DumpMeaning, DumpPlan, Rows, Source
from .files import (
    Copies,
    FileSource,
    marks,
    numbered,
    save_dict,
    saved,
    states,
    tensor_in,
    tensor_names,
    token_ids,
)
from .vllm import EXTRACTED, extracted, write_extracted

MEANING = DumpMeaning(
    library="speculators",
    versions="0.9.0",
    last="unnormed",
    about_last="its trainer applies verifier_norm to it (models/eagle3/core.py:252)",
    mask_lag=1,
    about_mask=(
        "marks are the assistant's tokens (data_generation/preprocessing.py:316); the trainer shifts them "
        "with the last hidden state (models/eagle3/data.py:37)"
    ),
    wants="unnormed",
)


class _RowsSource(FileSource):
    def __init__(self, directory: Path) -> None:
        try:
            found: Any = _datasets().load_from_disk(str(directory))
            self._rows = found.select_columns(["input_ids", "loss_mask"]).with_format("torch")
        except StoreError:
            raise
        except Exception as error:  # whatever a malformed directory makes datasets and Arrow raise
            raise StoreError(
                f"{directory} cannot be read as speculators' data, a datasets directory with columns "
                f"input_ids and loss_mask: {(str(error) or type(error).__name__).splitlines()[0]}"
            ) from None
        files = [_states_file(directory, row) for row in range(len(self._rows))]
        if absent := [path.name for path in files if not path.exists()]:
            raise StoreError(
                f"{directory} has {len(files)} rows but no states for {len(absent)} of them, the first "
                f"hidden_states/{absent[0]}; finish the dump, or select the rows that have states"
            )
        super().__init__(directory, files)

    def rows(self, index: int) -> Rows:
        found, row = super().rows(index), self._rows[index]
        place = self.directory / f"row {index}"
        ids = token_ids(place, row["input_ids"])
        if not torch.equal(ids, found.token_ids):
            raise StoreError(
                f"{found.place} holds other tokens than row {index} of {self.directory}: they are of two "
                "data sets"
            )
        return dataclasses.replace(found, loss_mask=marks(place, row["loss_mask"], len(ids)))

    def _read(self, path: Path) -> Rows:
        self._known(path, sorted(tensor_names(path)), EXTRACTED)
        return extracted(path)


class Speculators:
    """Reads and writes the layout since 0.5."""

    name = "speculators"
    meaning = MEANING
    pickles = False
    says_points = False
    resumes = False

    def recognises(self, directory: Path) -> bool:
        return (directory / "dataset_info.json").is_file() and (directory / "hidden_states").is_dir()

    def open(self, directory: Path) -> Source:
        return _RowsSource(directory)

    def write(self, directory: Path, rows: Source, plan: DumpPlan) -> None:
        datasets = _datasets()
        (directory / "hidden_states").mkdir()
        counts: Counter[int] = Counter()

        def records() -> Iterator[dict[str, Any]]:
            for index in range(len(rows)):
                one = rows.rows(index)
                assert one.loss_mask is not None
                write_extracted(_states_file(directory, index), one, rows.facts)
                counts.update(one.token_ids[one.loss_mask].tolist())
                mask = one.loss_mask.long().numpy()
                yield {"input_ids": one.token_ids.numpy(), "loss_mask": mask, "seq_len": len(mask)}

        _save_rows(datasets, directory, records())
        with saved(directory / "token_freq.pt") as file:
            save_dict(dict(counts), file)


def _save_rows(datasets: ModuleType, directory: Path, records: Iterator[dict[str, Any]]) -> None:
    """``Dataset.save_to_disk``, from a stream of rows: they go through a file, not through memory."""
    from datasets.arrow_writer import ArrowWriter

    integers = datasets.Sequence(datasets.Value("int64"))
    features = datasets.Features(input_ids=integers, loss_mask=integers, seq_len=datasets.Value("int64"))
    spool = directory / "hidden_states" / "rows.arrow"  # beside what is saved, which may not replace it
    with ArrowWriter(features=features, path=str(spool)) as writer:
        for record in records:
            writer.write(record)
        writer.finalize()
    rows = datasets.Dataset.from_file(str(spool)).with_format("torch")
    rows._fingerprint = "capture-hooks"  # else a random one: the same dump would be another file each time
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        rows.save_to_disk(str(directory))
    finally:
        if shown:
            datasets.enable_progress_bars()
    spool.unlink()


def _states_file(directory: Path, row: int) -> Path:
    return directory / "hidden_states" / f"hs_{row}.safetensors"


def _datasets() -> ModuleType:
    try:
        return import_module("datasets")
    except ImportError:
        raise StoreError(
            "speculators' data needs the datasets library: pip install 'capture-hooks[train]'"
        ) from None


_MASK = (
    "marks are the assistant's tokens; readers shift them with the last hidden state (0.3.0 "
    "train/data.py:39, models/eagle3/data.py:8 since)"
)
V1 = DumpMeaning(
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
V0 = DumpMeaning(
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
        ids, mask = _ids_and_marks(path, content)
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
        ids, mask = _ids_and_marks(path, content)
        inputs = states(path, "hidden_state", tensor_in(path, content, "hidden_state"), (len(ids), None))
        last = states(path, "target", tensor_in(path, content, "target"), (len(ids), None))
        return Rows(str(path), ids, mask, inputs, last)


class SpeculatorsFiles:
    """Reads and writes one of the two older layouts, a ``.pt`` for each sequence."""

    pickles = True
    says_points = False
    resumes = False

    def __init__(self, version: int) -> None:
        self.version = version
        self.name = f"speculators-v{version}"
        self.meaning = V1 if version == 1 else V0

    def recognises(self, directory: Path) -> bool:
        files = numbered([*files_within(directory, ".pt")])
        if not files:
            return False
        keys = pickles.strings_in(files[0])
        if self.version == 0:
            return {"input_ids", "loss_mask", "hidden_state", "target"} <= keys
        return {"input_ids", "loss_mask", "hidden_states"} <= keys and "aux_hidden_states" not in keys

    def open(self, directory: Path) -> Source:
        files = _files(directory)
        return _V1Source(directory, files) if self.version == 1 else _V0Source(directory, files)

    def write(self, directory: Path, rows: Source, plan: DumpPlan) -> None:
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


def _ids_and_marks(path: Path, content: dict[str, Any]) -> tuple[Tensor, Tensor]:
    ids = token_ids(path, tensor_in(path, content, "input_ids"))
    return ids, marks(path, tensor_in(path, content, "loss_mask"), len(ids))


def _files(directory: Path) -> list[Path]:
    return numbered([*directory.rglob("*.pt")])
