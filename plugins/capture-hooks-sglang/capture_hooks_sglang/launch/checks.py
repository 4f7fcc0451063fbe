"""What is refused before a server is started: cheap to see now, minutes later otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from capture_hooks.conventions import engine_ids
from capture_hooks.errors import ConventionError, EngineError
from capture_hooks.heads.config import CaptureSection
from capture_hooks.heads.engines import SGLANG_KEY, between_layers
from capture_hooks.heads.files import read_config
from capture_hooks.plugins import registry

from ..serving.asked import Asked, what_is_asked
from .command import plain

#: The entry point by which SGLang finds the plugin.
_GROUP: Final = "sglang.srt.plugins"
_PLUGIN: Final = "capture_hooks"


def check_head(head: Path, model: Path, environment: Mapping[str, str]) -> Asked:
    """What the server will be asked to capture.

    Raises:
        HeadError: no head, a damaged one, or one whose section this version cannot read.
        SpecError: ``CAPTURE_HOOKS_SPEC`` is no spec, or names a layer that the target has not.
        EngineError: a head without a capture section; one that SGLang's draft worker would compute otherwise
            than it was trained; a setting with another value than it takes.
    """
    if "capture" not in read_config(head):
        raise EngineError(
            f"{head} has no capture section: nothing says what it was trained on, so there is nothing to "
            f"prove; train or save it with capture-hooks, or serve it unproven: {plain(head, model)}"
        )
    asked = what_is_asked(environment, str(head))
    assert asked is not None
    assert asked.head is not None
    assert asked.head.section is not None
    if own := _own_arithmetic(asked.head.section):
        raise EngineError(
            f"SGLang's draft worker would not compute what {head} was trained to: {'; '.join(own)}; "
            "no wiring changes that"
        )
    asked.spec.absolute(asked.head.section.target.n_layers)
    return asked


def check_plugin_loads(environment: Mapping[str, str]) -> None:
    """SGLang will find the plugin, and is not told to leave it out.

    Raises:
        EngineError: it would serve without it.
    """
    if not any(point.name == _PLUGIN for point in metadata.entry_points(group=_GROUP)):
        raise EngineError(
            f"no installed distribution declares {_PLUGIN} in the entry-point group {_GROUP}, so SGLang "
            "would not load the plugin: install capture-hooks-sglang again"
        )
    allowed = [name.strip() for name in environment.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and _PLUGIN not in allowed:
        raise EngineError(
            f"SGLANG_PLUGINS is {environment['SGLANG_PLUGINS']!r}, which leaves {_PLUGIN} out: SGLang would "
            f"serve the head without any check; add {_PLUGIN} to it, or unset it"
        )


def _own_arithmetic(section: CaptureSection) -> list[str]:
    """Why SGLang's draft worker cannot compute this head, without what only ids cannot say.

    The section lists both kinds of reasons; those about ids are composed anew here, to tell them apart.
    """
    target = section.target
    spec = section.capture_spec
    points = [spec.inputs[i] for i in section.order]
    try:
        known = registry().conventions
        told = engine_ids("sglang", points, target.n_layers, target.model_type, SGLANG_KEY, known)
        ids = told.excluded
    except ConventionError:
        ids = None
    said_by_ids = (ids, between_layers("sglang", target.model_type))
    reasons = [why for s in section.engines if s.engine == "sglang" for why in s.excluded]
    return [why for why in reasons if why not in said_by_ids]
