"""SpecForge's offline features: ``**/*.ckpt`` or ``*.ckpt.gz``, a ``torch.save`` of a dict for each sequence.

====================  =============  =====================================================
key                   shape
====================  =============  =====================================================
``input_ids``         [T] int64
``loss_mask``         [T] int64      1 for the assistant's tokens
``hidden_state``      [1, T, H]      the last hidden state, normed
``aux_hidden_state``  [1, T, 3*H]    the captured inputs
====================  =============  =====================================================
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import IO, cast

from ...errors import StoreError
from ...io import files_within
from .. import pickles
from .contract import DumpMeaning, DumpPlan, Facts, Rows, Source
from .files import Copies, FileSource, marks, numbered, save_dict, saved, states, tensor_in, token_ids

MEANING = DumpMeaning(
    library="SpecForge",
    versions="0.2.0",
    last="normed",
    about_last="its trainer applies lm_head to it directly (modeling/target/target_head.py:100)",
    mask_lag=2,
    about_mask=(
        "marks are those of the chat template (data/preprocessing.py:100); the trainer shifts ids and "
        "target left but not the mask (modeling/target/target_head.py:103), whose last mark its reader "
        "clears (algorithms/eagle3/data.py:21)"
    ),
    wants="normed",
)

_KEYS = ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state")


class _Source(FileSource):
    def _read(self, path: Path) -> Rows:
        content = pickles.load(path)
        self._known(path, content, _KEYS)
        if "hidden_states" in content and "aux_hidden_state" not in content:
            raise StoreError(f"{path} is a DFlash feature file of SpecForge: it has no last hidden state")
        ids = token_ids(path, tensor_in(path, content, "input_ids"))
        length = len(ids)
        inputs = states(
            path, "aux_hidden_state", tensor_in(path, content, "aux_hidden_state"), (1, length, None)
        )
        last = states(path, "hidden_state", tensor_in(path, content, "hidden_state"), (1, length, None))
        mask = marks(path, tensor_in(path, content, "loss_mask"), length)
        return Rows(str(path), ids, mask, inputs[0], last[0])


class SpecForge:
    """Reads both forms; writes the one that its name says."""

    meaning = MEANING
    pickles = True
    says_points = False
    resumes = False

    def __init__(self, *, compressed: bool = False) -> None:
        self.name = "specforge-gz" if compressed else "specforge"
        self._compressed = compressed

    def recognises(self, directory: Path) -> bool:
        files = numbered([*files_within(directory, ".ckpt", ".ckpt.gz")])
        return bool(files) and (files[0].suffix == ".gz") == self._compressed

    def open(self, directory: Path) -> Source:
        return _Source(directory, _files(directory))

    def write(self, directory: Path, rows: Source, plan: DumpPlan) -> None:
        check_three(rows.facts)
        copies = Copies()
        for index in range(len(rows)):
            one = rows.rows(index)
            assert one.loss_mask is not None
            ids, last, inputs = copies.of(one.token_ids, one.last, one.inputs)
            content = {
                "input_ids": ids,
                "loss_mask": one.loss_mask.long(),
                "hidden_state": last[None],
                "aux_hidden_state": inputs[None],
            }
            path = directory / f"data_{index:08d}.ckpt"
            if not self._compressed:
                with saved(path) as file:
                    save_dict(content, file)
                continue
            # Level 1: mantissas hardly compress.  A time stamp would make every run another file.
            with saved(Path(f"{path}.gz")) as file, gzip.GzipFile("", "wb", 1, file, mtime=0) as squeezed:
                save_dict(content, cast(IO[bytes], squeezed))


def check_three(facts: Facts) -> None:
    """SpecForge's draft takes three states (its ``fc`` is [H, 3*H]).

    Raises:
        StoreError: there are more or fewer.
    """
    if facts.slots != 3:
        raise StoreError(
            "SpecForge 0.2.0 trains on exactly 3 states of the stream; this dump has inputs of "
            f"{facts.width} columns, that is {facts.width / facts.hidden:g} times the hidden size"
        )


def _files(directory: Path) -> list[Path]:
    return numbered([*directory.rglob("*.ckpt"), *directory.rglob("*.ckpt.gz")])
