"""SGLang's scheduler, built again and again: one import, one fork for each case.

    python scheduler_server.py

Reads one case a line (JSON) from standard input: ``arguments`` of SGLang's ``ServerArgs``, ``environment``
to set, ``sequences`` to run.  Answers on one line: the ranks' ``reports``, the ``error`` that stopped the
scheduler if one did, and ``stored``, what reached the draft head for each sequence, as file names.
"""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from cpu_settings import CPU, SETTINGS


def main() -> None:
    for name, value in CPU.items():
        os.environ.setdefault(name, value)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints as it likes
    import sglang.srt.managers.scheduler  # noqa: F401  # what takes long, before any fork

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            child = os.fork()
            if child == 0:
                # Nothing of the child may run the parent's clean-up.
                try:
                    result.write_text(json.dumps(run(json.loads(line), Path(folder))))
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            answer = result.read_text() if result.exists() else json.dumps({"error": "the process died"})
        print(answer, file=answers, flush=True)


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    reports = folder / "reports"
    reports.mkdir()
    os.environ |= {"CAPTURE_HOOKS_HANDSHAKE": str(reports), **case.get("environment", {})}
    answer: dict[str, Any] = {}
    try:
        scheduler = build(case["arguments"])
        answer["stored"] = stored(scheduler, case.get("sequences", []), case.get("out"))
        answer["hooks"] = sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks)
            for m in scheduler.tp_worker.model_runner.model.modules()
        )
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
        answer["traceback"] = traceback.format_exc()
    answer["reports"] = [json.loads(path.read_text()) for path in sorted(reports.glob("*.json"))]
    return answer


def build(arguments: dict[str, Any]) -> Any:
    """As ``run_scheduler_process`` does, without its event loop (SGLang 0.5.23)."""
    from sglang.srt.managers.scheduler import Scheduler, SpawnRanks, publish, spawn_world_rank
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    settings = ServerArgs(**{**SETTINGS, **arguments})
    ports = PortArgs.init_new(settings)
    world = spawn_world_rank(settings, tp_rank=0, pp_rank=0)
    publish(settings, role="scheduler", ranks=SpawnRanks(world_rank=world, dp_rank=None, gpu_id=0))
    return Scheduler(settings, ports)


def stored(scheduler: Any, sequences: list[list[int]], out: str | None) -> list[dict[str, str]]:
    """What is stored for each sequence: extended whole, in chunks, and verified as a chain of drafts."""
    if not sequences:
        return []
    import torch
    from capture_hooks_sglang.serving.passes import CachedSequence
    from safetensors.torch import save_file

    found = {}
    worker = scheduler.tp_worker
    for number, tokens in enumerate(sequences):
        length = len(tokens)
        whole = CachedSequence(worker, tokens)
        found[f"extend.{number}"] = whole.extend(length)
        if not scheduler.spec_algorithm.is_none():
            found[f"verify.{number}"] = torch.cat([whole.verify(1, 3), whole.verify(4, length - 4)])
        whole.free()
        parts = CachedSequence(worker, tokens)
        found[f"chunked.{number}"] = torch.cat([parts.extend(2), parts.extend(3), parts.extend(length)])
        parts.free()
    save_file({name: states.contiguous() for name, states in found.items()}, out)
    return sorted(found)


if __name__ == "__main__":
    main()
