"""Fetch the source of older SGLang versions into ``build/sglang``, for `test_sglang_ids`.

    python tests/interop/sglang_versions.py

Those at which a rule changed, the first and the last of each; a few files of each wheel, 90 MB together.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build" / "sglang"
VERSIONS = (
    *("0.5.9", "0.5.10.post1", "0.5.11", "0.5.12.post1", "0.5.13.post1", "0.5.14", "0.5.16", "0.5.17"),
    *("0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22"),
)
FOLDERS = ("models/", "model_executor/", "speculative/", "layers/aux_hidden_states.py")


def fetch(version: str) -> None:
    """Unpack what the tests read of one wheel; nothing if it is there."""
    home = BUILD / version
    if (home / "sglang").is_dir():
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", folder, f"sglang=={version}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if name.endswith(".py")]
            wanted = [n for n in names if n.startswith(tuple(f"sglang/srt/{part}" for part in FOLDERS))]
            packed.extractall(home.with_suffix(home.suffix + ".part"), wanted)
    home.with_suffix(home.suffix + ".part").rename(home)


if __name__ == "__main__":
    BUILD.mkdir(parents=True, exist_ok=True)
    for version in VERSIONS:
        fetch(version)
        print(version)
