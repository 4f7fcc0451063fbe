"""ModelOpt's offline dump: ``*.pt``, one ``torch.save`` of a dict for each conversation.

===========================  ===========  ====================================================
key                          shape
===========================  ===========  ====================================================
``input_ids``                [T] int64
``hidden_states``            [T, H]       the last hidden state
``hidden_states_prenorm``    bool         whether that is un-normed; often absent
``aux_hidden_states``        [T, K*H]     the captured inputs
``loss_mask``                [T] int64    1 for the assistant's tokens; absent without ``--answer-only-loss``
``conversation_id``          str
===========================  ===========  ====================================================
"""

from __future__ import annotations

from pathlib import Path

from ...errors import StoreError
from .. import pickles
from .contract import DumpMeaning, DumpPlan, NormState, Rows, Source
from .files import Copies, FileSource, marks, numbered, save_dict, saved, states, tensor_in, token_ids

MEANING = DumpMeaning(
    library="ModelOpt",
    versions="0.47.0",
    last=None,
    about_last=(
        "its Hugging Face and TensorRT-LLM dumps hold normed states, its vLLM dump un-normed ones, and a "
        "file that lacks 'hidden_states_prenorm' is read as normed whichever it is "
        "(torch/speculative/eagle/utils.py:161)"
    ),
    mask_lag=1,
    about_mask=(
        "marks are the tokenizer's assistant mask (torch/speculative/plugins/hf_streaming_dataset.py:153); "
        "the trainer takes them from position 1 on (torch/speculative/plugins/hf_eagle.py:819)"
    ),
    wants=None,
)
_BIT = "hidden_states_prenorm"
_KEYS = ("input_ids", "hidden_states", _BIT, "aux_hidden_states", "loss_mask", "conversation_id")


class _Source(FileSource):
    def _read(self, path: Path) -> Rows:
        content = pickles.load(path)
        self._known(path, content, _KEYS)
        ids = token_ids(path, tensor_in(path, content, "input_ids"))
        length = len(ids)
        inputs = states(
            path, "aux_hidden_states", tensor_in(path, content, "aux_hidden_states"), (length, None)
        )
        last = states(path, "hidden_states", tensor_in(path, content, "hidden_states"), (length, None))
        mask = marks(path, tensor_in(path, content, "loss_mask"), length) if "loss_mask" in content else None
        name, bit = content.get("conversation_id", path.stem), content.get(_BIT)
        if bit is not None and not isinstance(bit, bool):
            raise StoreError(f"{path}: {_BIT!r} is {bit!r}, not true or false")
        norm: NormState | None = None if bit is None else "unnormed" if bit else "normed"
        return Rows(str(path), ids, mask, inputs, last, str(name), norm)

    def _dropped(self) -> tuple[str, ...]:
        return ("conversation ids",)


class ModelOpt:
    """Reads and writes ModelOpt's files; those it writes always state whether the last state is normed."""

    name = "modelopt"
    meaning = MEANING
    pickles = True
    says_points = False
    resumes = False

    def recognises(self, directory: Path) -> bool:
        files = _files(directory)
        return bool(files) and {"input_ids", "hidden_states", "aux_hidden_states"} <= pickles.strings_in(
            files[0]
        )

    def open(self, directory: Path) -> Source:
        return _Source(directory, _files(directory))

    def write(self, directory: Path, rows: Source, plan: DumpPlan) -> None:
        copies = Copies()
        for index in range(len(rows)):
            one = rows.rows(index)
            assert one.loss_mask is not None
            ids, last, inputs = copies.of(one.token_ids, one.last, one.inputs)
            content = {
                "input_ids": ids,
                "hidden_states": last,
                "aux_hidden_states": inputs,
                "loss_mask": one.loss_mask.long(),
                "conversation_id": one.name or f"{index:08d}",
                _BIT: plan.last == "unnormed",
            }
            with saved(directory / f"{index:08d}.pt") as file:
                save_dict(content, file)


def _files(directory: Path) -> list[Path]:
    return numbered([*directory.glob("*.pt")])
