"""What is refused before vLLM is started: cheap to see now, minutes later otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from capture_hooks.engines.reports import verify_of
from capture_hooks.errors import EngineError
from capture_hooks.heads import HeadDescription, inspect_head
from capture_hooks.heads.files import read_config
from capture_hooks.plugins import registry

from .command import plain

#: The entry point by which vLLM finds the plugin.
_GROUP: Final = "vllm.general_plugins"
_PLUGIN: Final = "capture_hooks"


def check_head(head: Path, model: Path, environment: Mapping[str, str]) -> HeadDescription:
    """The head, which vLLM feeds and computes as it was trained.

    Ids that contradict the section are refused here, by name: vLLM would read them.

    Raises:
        HeadError: no head, a damaged one, one whose section this version cannot read or contradicts its ids.
        EngineError: a head without a capture section, or one that excludes vLLM; a setting with another
            value than it takes.
    """
    verify_of(environment)
    if "capture" not in read_config(head):
        raise EngineError(
            f"{head} has no capture section: nothing says what it was trained on, so there is nothing to "
            f"prove; train or save it with capture-hooks, or serve it unproven: {plain(head, model)}"
        )
    described = inspect_head(head, conventions=registry().conventions)
    statement = next((s for s in described.engines if s.engine == "vllm"), None)
    if statement is None:
        raise EngineError(f"the capture section of {head} does not speak for vLLM; save the head again")
    if not statement.right:
        raise EngineError(f"vLLM cannot serve {head}: {'; '.join(statement.excluded)}")
    return described


def check_plugin_loads(environment: Mapping[str, str]) -> None:
    """VLLM will find the plugin, and is not told to leave it out.

    Raises:
        EngineError: it would run without it.
    """
    if not any(point.name == _PLUGIN for point in metadata.entry_points(group=_GROUP)):
        raise EngineError(
            f"no installed distribution declares {_PLUGIN} in the entry-point group {_GROUP}, so vLLM "
            "would not load the plugin: install capture-hooks-vllm again"
        )
    if "VLLM_PLUGINS" in environment and _PLUGIN not in environment["VLLM_PLUGINS"].split(","):
        raise EngineError(
            f"VLLM_PLUGINS is {environment['VLLM_PLUGINS']!r}, which leaves {_PLUGIN} out: vLLM would run "
            f"without any check; add {_PLUGIN} to it, or unset it"
        )
