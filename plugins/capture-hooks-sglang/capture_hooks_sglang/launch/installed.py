"""The SGLang that is installed: there at all, of a version that was tested, or fit by what it defines.

Read from its source with `ast`: importing it takes seconds, and its scheduler runs elsewhere anyway.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from capture_hooks.errors import EngineError

#: First and last version that the plugin was tested with.
TESTED: Final = ("0.5.22", "0.5.23")


@dataclass(frozen=True, slots=True)
class Feature:
    """Something of SGLang's that the plugin wraps, calls or sets.

    Attributes:
        file: below the package.
        name: qualified, within that file.
        arguments: what a function is called with, and all it may need; None for what is no function, or
            one whose parameters are passed through.
    """

    file: str
    name: str
    arguments: tuple[str, ...] | None = None

    def lacking(self, package: Path) -> str | None:
        """Why it is not there as needed, as a clause; None where it is."""
        path = package / self.file
        try:
            node = _find(ast.parse(path.read_text(encoding="utf-8")), self.name.split("."))
        except (OSError, SyntaxError):
            return f"{self.file} is not there"
        if node is None:
            return f"{self.file} defines no {self.name}"
        if self.arguments is None:
            return None
        if not isinstance(node, ast.FunctionDef):
            return f"{self.name} of {self.file} is no function"
        parameters, required = _parameters(node)
        if unknown := [name for name in self.arguments if name not in parameters]:
            return f"{self.name} of {self.file} takes no {', '.join(unknown)}"
        if needed := [name for name in required if name not in self.arguments]:
            return f"{self.name} of {self.file} needs {', '.join(needed)}"
        return None


_BATCH: Final = ("reqs", "req_to_token_pool", "token_to_kv_pool_allocator", "tree_cache", "model_config")
FEATURES: Final = (
    Feature("srt/plugins/hook_registry.py", "HookRegistry.register", ("cls", "target", "hook", "hook_type")),
    Feature("srt/plugins/hook_registry.py", "HookType.AROUND"),
    Feature("srt/plugins/hook_registry.py", "HookType.AFTER"),
    Feature("srt/model_executor/model_runner.py", "ModelRunner.init_attention_backends", ("self",)),
    Feature("srt/managers/scheduler.py", "Scheduler.__init__"),
    Feature("srt/managers/scheduler.py", "Scheduler.abort_request", ("self", "recv_req")),
    Feature(
        "srt/layers/logits_processor.py",
        "LogitsProcessor._get_logits",
        ("self", "hidden_states", "lm_head", "logits_metadata", "use_logits_buffer"),
    ),
    Feature(
        "srt/model_executor/model_runner_components/spec_aux_hidden_state.py",
        "SpecAuxHiddenStateConfig.eagle_use_aux_hidden_state",
    ),
    Feature("srt/runtime_context.py", "get_spec", ()),
    Feature("srt/runtime_context.py", "get_parallel", ()),
    Feature(
        "srt/layers/logits_processor.py",
        "LogitsProcessor.forward",
        (
            *("self", "input_ids", "hidden_states", "lm_head", "logits_metadata"),
            *("aux_hidden_states", "hidden_states_before_norm"),
        ),
    ),
    Feature(
        "srt/managers/schedule_batch.py",
        "ScheduleBatch.init_new",
        ("cls", *_BATCH, "enable_overlap", "spec_algorithm"),
    ),
    Feature("srt/managers/schedule_batch.py", "ScheduleBatch.prepare_for_extend", ("self",)),
    Feature("srt/managers/schedule_batch.py", "Req.extend_end"),
    Feature("srt/managers/schedule_batch.py", "Req.prefix_len"),
    Feature(
        "srt/managers/tp_worker.py",
        "TpModelWorker.forward_batch_generation",
        ("self", "batch", "forward_batch", "is_verify", "capture_hidden_mode"),
    ),
    Feature("srt/speculative/eagle_utils.py", "default_tree_mask_mode", ()),
    Feature(
        "srt/speculative/eagle_utils.py",
        "eagle_prepare_for_verify",
        ("verify_input", "req_to_token_pool", "batch", "target_worker"),
    ),
)


def check_installed() -> str | None:
    """Look at the SGLang of this environment; a warning, or None.

    Raises:
        EngineError: there is none, or one outside the tested versions that lacks what the plugin needs.
    """
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        raise EngineError(
            f"SGLang is not installed for {sys.executable}; serve with the environment that has it "
            "(capture-hooks and capture-hooks-sglang are installed beside it)"
        )
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    return judge(version, Path(found.origin).parent)


def judge(version: str, package: Path) -> str | None:
    """A warning about this version, or None where it was tested.

    Raises:
        EngineError: it was not, and lacks what the plugin needs.
    """
    if tested(version):
        return None
    lacking = [why for feature in FEATURES if (why := feature.lacking(package)) is not None]
    outside = f"SGLang {version} is outside the versions that were tested ({TESTED[0]} to {TESTED[1]})"
    if lacking:
        raise EngineError(
            f"{outside}, and lacks what the plugin needs: {'; '.join(lacking)}; install one of those "
            "versions, or another capture-hooks-sglang"
        )
    return f"{outside}; it defines what the plugin needs, and the witness is what decides"


def tested(version: str) -> bool:
    """Whether a version lies in the tested range (``.postN`` counts as its release)."""
    release = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if release is None or re.search(r"(a|b|rc|dev)\d*", version[release.end() :]):
        return False
    low, high = (tuple(map(int, bound.split("."))) for bound in TESTED)
    return low <= tuple(map(int, release.groups())) <= high


def _find(node: ast.AST, names: list[str]) -> ast.AST | None:
    """The definition of a dotted name in a module or class body, or the first value of an instance's."""
    for child in getattr(node, "body", ()):
        if names[0] in _defined(child):
            return child if len(names) == 1 else _find(child, names[1:])
    initializer = _find(node, ["__init__"]) if names[0] != "__init__" else None
    if len(names) == 1 and isinstance(initializer, ast.FunctionDef):
        return next((line for line in initializer.body if f"self.{names[0]}" in _assigned(line)), None)
    return None


def _defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return _assigned(node)


def _assigned(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return [ast.unparse(t) for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    return []


def _parameters(node: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """All parameters by name, and those without a default."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    free = positional[: len(positional) - len(given.defaults)]
    keyword = [a for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    return [a.arg for a in (*positional, *given.kwonlyargs)], [a.arg for a in (*free, *keyword)]
