"""What one writer is known to get wrong, found by its marks in the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ....conventions.facts import cite
from ....conventions.readers import NESTED
from ...heads import RawHead
from ..report import Finding, Row
from ..subject import Subject

#: Fields that ModelOpt's exporter alone writes (``export/plugins/hf_spec_configs.py:49-58``).
MODELOPT_MARKS: Final = frozenset(
    {"use_input_layernorm_in_first_layer", "next_layer_regular", "use_mtp_layernorm"}
)


def check(subject: Subject, rows: Sequence[Row]) -> Iterator[Finding]:
    """ModelOpt's two: ids that its own vLLM dump reads otherwise, and an input norm too many in training."""
    if subject.head is None or not by_modelopt(subject.head):
        return
    yield from _unshifted(subject)
    yield from _two_norms(subject.head)


def by_modelopt(head: RawHead) -> bool:
    """Whether a file bears the marks of ModelOpt's exporter."""
    eagle = head.config.get("eagle_config")
    return head.layout == "modelopt" and isinstance(eagle, Mapping) and bool(MODELOPT_MARKS & set(eagle))


def modelopt_version(head: RawHead) -> str | None:
    """The exporter's version where the file has it: in a quantised head's ``quantization_config``."""
    quantised = head.config.get("quantization_config")
    producer = quantised.get("producer") if isinstance(quantised, Mapping) else None
    if not isinstance(producer, Mapping) or producer.get("name") != "modelopt":
        return None
    version = producer.get("version")
    return version if isinstance(version, str) else None


def _unshifted(subject: Subject) -> Iterator[Finding]:
    if NESTED not in subject.ids:
        return
    said = subject.trained.points is not None
    yield Finding(
        check="writers.modelopt_ids",
        severity="note" if said else "warning",
        engines=("vllm",),
        what="ModelOpt exports its ids unshifted: id k is the output of layer k",
        why="vLLM means the input of layer k by the same integer: its first runner reads this key and "
        "captures every state one layer earlier, its second does not read it and captures its default "
        "layers. And a head trained on states that ModelOpt's own vLLM dump script wrote was trained on "
        "inputs, not outputs",
        do="find out how its states were made (--written-for); for vLLM write the top-level "
        "eagle_aux_hidden_state_layer_ids too, each id one more",
        source=f"{cite('modelopt', 'modelopt/torch/speculative/plugins/hf_eagle.py:58-63,402-406')}; "
        f"{cite('vllm', 'v1/worker/gpu_model_runner.py:5268-5285')}",
    )


def _two_norms(head: RawHead) -> Iterator[Finding]:
    version = modelopt_version(head)
    if version is not None and _older(version):
        return
    yield Finding(
        check="writers.modelopt_norms",
        severity="warning",
        engines=("sglang", "vllm"),
        what="ModelOpt 0.41 and later norm the target's states twice in training"
        + ("" if version is None else f"; this file is by {version}"),
        why="its first layer is a stock one whose input_layernorm, the embedding's norm, has run on the "
        "states before hidden_norm is applied; every server computes hidden_norm(h) alone. The two are "
        "equal only while input_layernorm's weights are all alike"
        + ("" if version is not None else ". The file does not say its version"),
        do="measure acceptance; training on for a little in a trainer that computes what servers do removes "
        "it",
        source=cite("modelopt", "modelopt/torch/speculative/plugins/modeling_eagle.py:66-80,114-128"),
    )


def _older(version: str) -> bool:
    """Whether a version is before 0.41; one that cannot be read is not."""
    parts = version.split(".")
    numbers = [int(part) for part in parts[:2] if part.isdecimal()]
    return len(numbers) == 2 and numbers < [0, 41]
