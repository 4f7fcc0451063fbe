"""speculators' data since 0.5: a directory that `datasets` saved, a file of states for each row.

==========================================  =========================================================
``dataset_info.json``, ``state.json``, …    columns ``input_ids``, ``loss_mask`` (1 for the assistant's
                                            tokens) and ``seq_len``
``hidden_states/hs_<row>.safetensors``      ``hidden_states`` [T, K+1, H], the last hidden state as the
                                            last of them, and ``token_ids`` [T] int64
``token_freq.pt``                           how often each token is to be learnt, for the draft vocabulary
==========================================  =========================================================
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

from ...errors import StoreError
from .contract import Meaning, Plan, Rows, Source
from .files import FileSource, marks, token_ids
from .saving import save_dict, saved
from .tensor_files import tensor_names
from .vllm import EXTRACTED, extracted, write_extracted

MEANING = Meaning(
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


class _Source(FileSource):
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
        files = [_states(directory, row) for row in range(len(self._rows))]
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
    """Both directions."""

    name = "speculators"
    meaning = MEANING
    pickles = False
    says_points = False
    resumes = False

    def recognises(self, directory: Path) -> bool:
        return (directory / "dataset_info.json").is_file() and (directory / "hidden_states").is_dir()

    def open(self, directory: Path) -> Source:
        return _Source(directory)

    def write(self, directory: Path, rows: Source, plan: Plan) -> None:
        datasets = _datasets()
        (directory / "hidden_states").mkdir()
        counts: Counter[int] = Counter()

        def records() -> Iterator[dict[str, Any]]:
            for index in range(len(rows)):
                one = rows.rows(index)
                assert one.loss_mask is not None
                write_extracted(_states(directory, index), one, rows.facts)
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


def _states(directory: Path, row: int) -> Path:
    return directory / "hidden_states" / f"hs_{row}.safetensors"


def _datasets() -> ModuleType:
    try:
        return import_module("datasets")
    except ImportError:
        raise StoreError(
            "speculators' data needs the datasets library: pip install 'capture-hooks[train]'"
        ) from None
