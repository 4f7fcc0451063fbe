"""How far back the draft's attention reaches, where the config limits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....conventions.facts import SERVERS, cite
from ..report import Finding, Row
from ..subject import Subject
from .complete import size_of
from .seen import seen

#: Trainers whose draft attends to all tokens, whatever the config says.
_UNLIMITED = ("specforge", "modelopt")


def check(subject: Subject, rows: Sequence[Row]) -> Iterator[Finding]:
    """``layer_types`` with ``sliding_attention``: vLLM's Llama draft follows it, SGLang's does not."""
    if subject.head is None:
        return
    for view in seen(subject):
        kinds, layers = view.config.get("layer_types"), size_of(view.config, "num_hidden_layers")
        if view.draft == "mla" or not isinstance(kinds, list) or not kinds:
            continue
        if view.engine in SERVERS and layers is not None and len(kinds) != layers:
            yield _miscounted(view.engine, len(kinds), layers)
        if "sliding_attention" not in kinds[:layers]:
            continue
        window, positions = (size_of(view.config, k) for k in ("sliding_window", "max_position_embeddings"))
        if window is not None and positions is not None and window >= positions:
            continue  # no sequence is longer than it reaches
        everything = subject.trained.library in _UNLIMITED
        if view.engine == ("vllm" if everything else "sglang"):
            yield _window(view.engine, everything, view.config.get("sliding_window"))


def _miscounted(engine: str, given: int, layers: int) -> Finding:
    return Finding(
        check="attention.layer_types",
        severity="wrong",
        engines=(engine,),
        what=f"layer_types names {given} layer(s), and num_hidden_layers is {layers}",
        why="the config class of transformers 5, which this engine reads the file with, refuses it",
        do="name every draft layer once, or remove layer_types",
        source=cite(engine, "transformers 5.19.0: configuration_utils.py (validate_layer_type)"),
    )


def _window(engine: str, everything: bool, window: object) -> Finding:
    limits = f"layer_types has sliding_attention (sliding_window = {str(window)[:20]})"
    if everything:
        why = "vLLM's draft attends to the window alone, and this head's trainer attends to all tokens"
        do = "remove layer_types; the head was trained without a window"
    else:
        why = (
            "SGLang's draft attends to all tokens whatever layer_types says, and the file says that the head "
        )
        why += "was trained to attend to the window alone"
        do = "start SGLang with --speculative-draft-window-size as large as sliding_window"
    return Finding(
        check="attention.window",
        severity="wrong",
        engines=(engine,),
        what=limits,
        why=why,
        do=do,
        source=cite("vllm", "model_executor/models/llama.py:185-204")
        if everything
        else cite("sglang", "srt/models/llama_eagle3.py:288-299"),
    )
