"""vLLM's extracted hidden states: one safetensors file for each request, beside its ``.lock``.

==================  ==========  ==============================================================
tensor              shape
==================  ==========  ==============================================================
``hidden_states``   [T, L, H]   the L states in the order in which vLLM concatenates them
``token_ids``       [T] int64
==================  ==========  ==============================================================

The last of the L states is taken for the last hidden state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ...errors import StoreError
from ...store.manifest import MANIFEST
from ...store.shard import TensorStream, write_columns
from .contract import DumpMeaning, DumpPlan, Facts, Rows, Source
from .files import FileSource, numbered, read_tensors, saved, states, tensor_names, token_ids

MEANING = DumpMeaning(
    library="vLLM",
    versions="0.32.0 to 0.33.0",
    last=None,
    about_last=(
        "the files are any states that the server was asked for; the end of the stream (id n) comes "
        "un-normed (distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py)"
    ),
    mask_lag=None,
    about_mask="its files have no loss mask",
    wants="unnormed",
)

EXTRACTED: Final = ("token_ids", "hidden_states")


class _Source(FileSource):
    def _read(self, path: Path) -> Rows:
        self._known(path, sorted(tensor_names(path)), EXTRACTED)
        return extracted(path)


class VLLM:
    """Reads and writes vLLM's files.  Locks are written for vLLM's reader, but not waited for."""

    name = "vllm"
    meaning = MEANING
    pickles = False
    says_points = False
    resumes = False

    def recognises(self, directory: Path) -> bool:
        files = _files(directory)
        return (
            bool(files)
            and not (directory / MANIFEST).exists()
            and {"hidden_states", "token_ids"} <= tensor_names(files[0])
        )

    def open(self, directory: Path) -> Source:
        return _Source(directory, _files(directory))

    def write(self, directory: Path, rows: Source, plan: DumpPlan) -> None:
        for index in range(len(rows)):
            path = directory / f"{index:08d}.safetensors"
            write_extracted(path, rows.rows(index), rows.facts)
            with saved(Path(f"{path}.lock")):
                pass


def extracted(path: Path) -> Rows:
    """A file of extracted states.

    Raises:
        StoreError: it is damaged or malformed.
    """
    ids, hidden = read_tensors(path, EXTRACTED)
    ids = token_ids(path, ids)
    hidden = states(path, "hidden_states", hidden, (len(ids), None, None))
    if hidden.shape[1] < 2:
        raise StoreError(
            f"{path} holds one state a token: a head's inputs and a last hidden state are two or more"
        )
    return Rows(str(path), ids, None, hidden[:, :-1].flatten(1), hidden[:, -1])


def write_extracted(path: Path, rows: Rows, facts: Facts) -> None:
    """A file of extracted states, the last hidden state as the last of them.

    Raises:
        StoreError: the inputs are of another width than the last hidden state, or the system refused.
    """
    if facts.slots is None:
        raise StoreError(
            f"inputs of {facts.width} columns are no multiple of {facts.hidden}: states of one width are "
            "wanted"
        )
    hidden = (rows.inputs.view(-1, facts.slots, facts.hidden), rows.last[:, None])
    with saved(path) as file, TensorStream(file) as stream:
        write_columns(stream, {"token_ids": [rows.token_ids], "hidden_states": [hidden]})


def _files(directory: Path) -> list[Path]:
    return numbered([*directory.glob("*.safetensors")])
