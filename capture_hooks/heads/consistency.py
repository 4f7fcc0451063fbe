"""A head's directory checked against itself: config, capture section, weights and witness.

Everything here works from the JSON and the safetensors headers; no weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..conventions import BUILTIN, Conventions
from ..errors import ConventionError, HeadError
from ..spec import CaptureSpec, Point
from .config import CaptureSection, check_order, depth_order, in_order, number
from .engines import EngineStatement, sglang_ids, vllm_ids
from .files import TensorInfo


def check_section(
    config: Mapping[str, Any],
    section: CaptureSection,
    where: str,
    ids: bool = True,
    conventions: Conventions = BUILTIN,
) -> None:
    """Check the capture section against itself and against the keys that other libraries read.

    Args:
        config: the head's config.
        section: its capture section.
        where: what to name in an error.
        ids: whether the layer ids that engines read belong to it.
        conventions: what ids may mean; statements by others are not checked against their ids.

    Raises:
        HeadError: naming both values.
    """
    spec = section.capture_spec
    check_order(spec, section.order, section.file_inputs, where)
    n_layers = section.target.n_layers
    ascending = depth_order(spec, n_layers)
    if tuple(section.order) != ascending:
        raise HeadError(
            f"{where}: capture.order is {section.order}, and ascending depth, "
            f"by which every server concatenates, is {list(ascending)}"
        )
    _equal(config, "num_aux_hidden_states", len(spec), f"capture.spec has {len(spec)} inputs", where)
    _equal(config, "vocab_size", section.target.vocab_size, "capture.target.vocab_size", where)
    _equal(config, "target_hidden_size", section.target.hidden_size, "capture.target.hidden_size", where)
    if config.get("tie_word_embeddings") is not False:
        raise HeadError(
            f"{where}: tie_word_embeddings is {config.get('tie_word_embeddings')!r}; it must be false, "
            "because SGLang would take the target's embedding for the draft's lm_head"
        )
    nested = config.get("eagle_config")
    nested_ids = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None
    top_ids = config.get("eagle_aux_hidden_state_layer_ids")
    for statement in section.engines if ids else ():
        if statement.engine == "sglang":
            _check_ids(statement, nested_ids, sglang_ids(statement), spec, section, where, conventions)
        elif statement.engine == "vllm":
            _check_ids(statement, top_ids, vllm_ids(statement), spec, section, where, conventions)


def check_shapes(
    config: Mapping[str, Any], infos: Mapping[str, TensorInfo], inputs_width: int, where: str
) -> None:
    """Check the shapes that tie the weights to the spec and to the vocabularies.

    Args:
        config: the head's config.
        infos: shapes of its weights.
        inputs_width: columns of all captured inputs together.
        where: what to name in an error.

    Raises:
        HeadError: naming both values.
    """
    draft, target = number(config, "draft_vocab_size", where), number(config, "vocab_size", where)
    hidden = number(config, "hidden_size", where)
    wanted = {
        "fc.weight": ((hidden, inputs_width), "hidden_size and the width of the captured inputs"),
        "lm_head.weight": ((draft, hidden), "draft_vocab_size and hidden_size"),
        "d2t": ((draft,), "draft_vocab_size"),
        "t2d": ((target,), "vocab_size"),
    }
    for name, (shape, source) in wanted.items():
        if name in infos and infos[name].shape != shape:
            raise HeadError(
                f"{where}: {name} has shape {list(infos[name].shape)}; {source} ask for {list(shape)}"
            )


def _equal(config: Mapping[str, Any], name: str, value: int, source: str, where: str) -> None:
    if (found := number(config, name, where)) != value:
        raise HeadError(f"{where}: {name} is {found}, and {source} says {value}")


def _check_ids(
    statement: EngineStatement,
    found: Any,
    wanted: Any,
    spec: CaptureSpec,
    section: CaptureSection,
    where: str,
    conventions: Conventions,
) -> None:
    """Check that what an engine will read is what the section says, and means the section's points."""
    points = in_order(spec, section.order)
    listed = ", ".join(str(point) for point in points)
    if found != wanted:
        raise HeadError(
            f"{where}: {statement.key} is {found!r}"
            f"{_meaning(statement, found, section.target.n_layers, conventions)}, "
            f"and the capture section says {wanted!r} ({listed})"
        )
    if statement.ids is None:
        return
    read = _points(statement, statement.ids, section.target.n_layers, conventions)
    if read is not None and not same_points(read, points, section.target.n_layers):
        raise HeadError(
            f"{where}: {statement.key} = {statement.ids} means {', '.join(map(str, read))} to "
            f"{statement.convention}, and the capture section says {listed}"
        )


def same_points(left: tuple[Point, ...], right: tuple[Point, ...], n_layers: int) -> bool:
    """Whether two orders of points name the same states in the same order."""
    return [p.resolve(n_layers) for p in left] == [p.resolve(n_layers) for p in right]


def _meaning(statement: EngineStatement, ids: Any, n_layers: int, conventions: Conventions) -> str:
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        return ""
    try:
        read = _points(statement, ids, n_layers, conventions)
    except ConventionError as error:
        return f" ({error})"
    return f" ({', '.join(map(str, read))})" if read else ""


def _points(
    statement: EngineStatement, ids: list[int], n_layers: int, conventions: Conventions
) -> tuple[Point, ...] | None:
    """The points that ids mean; None where the convention is not known."""
    if statement.convention is None or statement.convention not in conventions:
        return None
    return conventions[statement.convention].to_points(ids, n_layers)
