"""Another library in an environment of its own, asked questions over a pipe.

A worker (``tests/interop/workers/NAME.py``) runs in that library's interpreter, imports nothing of ours, and
serves functions by name; `Peer` starts it once, and each call is one line of JSON there and one back.  So
Hypothesis, here, can ask thousands of questions of the library's own code, there.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORKERS = Path(__file__).parent / "workers"


class PeerError(Exception):
    """The library raised; ``kind`` is the exception's class name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class Peer:
    """One running worker.

    Args:
        environment: name of the virtual environment, ``.venv-NAME``; skips the test if it is not installed.
        worker: file in ``workers``, without ``.py``; the environment's name if it is the same.
        settings: further environment variables.
    """

    def __init__(self, environment: str, worker: str | None = None, **settings: str) -> None:
        python = interpreter(environment)
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            **settings,
        }
        self.process = subprocess.Popen(
            [str(python), str(WORKERS / f"{worker or environment}.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            text=True,
        )

    def __call__(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """What the worker's function returns.

        Raises:
            PeerError: it raised.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([function, args, kwargs]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(*answer["error"])
        return answer["value"]

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait(30)


def interpreter(environment: str) -> Path:
    """The python of ``.venv-NAME`` (``make peers``, ``make sglang``); skips the test where there is none."""
    home = ROOT / f".venv-{environment}"
    if not (home / ".installed").exists():
        pytest.skip(f"no environment {home.name}: make {home.name}/.installed")
    return home / "bin" / "python"


def run(environment: str, worker: str, *words: str, timeout: float = 600) -> str:
    """Run a worker file as a program of that environment, for what is too long for a line; its output."""
    done = subprocess.run(
        [str(interpreter(environment)), str(WORKERS / f"{worker}.py"), *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"},
    )
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-8000:], file=sys.stderr)
        raise RuntimeError(f"{worker} in .venv-{environment} ended with {done.returncode}")
    return done.stdout
