"""What it costs to begin: modules imported and CPU seconds of binding a spec and of the first commands.

    python benchmarks/start.py [--rounds 7]

Each measurement is a process of its own, and rounds are interleaved.  Seconds are CPU time of that process
from before the first import of ours to the end; for ``bind``, transformers and the model are there before.
"""

import argparse
import statistics
import subprocess
import sys
from typing import NamedTuple

MODEL = """
import transformers
config = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=64, num_attention_heads=2, num_hidden_layers=4, vocab_size=64
)
model = transformers.LlamaForCausalLM(config)
"""
COMMAND = """
from capture_hooks.cli import main
sys.argv[1:] = {words}
try:
    main()
except SystemExit:
    pass
"""
EXPLAIN = "explain --ids 2,30,58 --family deepseek_v2 --layers 61"
CASES = {
    "bind": (MODEL, "from capture_hooks import bind\nbind(model, 'post.1, post.2')"),
    "capture-hooks --help": ("", COMMAND.format(words=["--help"])),
    f"capture-hooks {EXPLAIN}": ("", COMMAND.format(words=EXPLAIN.split())),
}


class Start(NamedTuple):
    ours: int
    all: int
    seconds: float


def measure(before: str, code: str) -> Start:
    program = f"""
import sys, time
{before}
there, begun = set(sys.modules), time.process_time()
{code}
seconds, new = time.process_time() - begun, set(sys.modules) - there
ours = [name for name in new if name.startswith("capture_hooks")]
print(len(ours), len(new), seconds, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    ours, every, seconds = done.stderr.splitlines()[-1].split()
    return Start(int(ours), int(every), float(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    found = [{name: measure(*case) for name, case in CASES.items()} for _ in range(rounds)]
    print(f"{'ours':>5} {'modules':>8} {'CPU s':>7} {'least':>7}")
    for name in CASES:
        seconds = [one[name].seconds for one in found]
        ours, every, _ = found[0][name]
        print(f"{ours:5} {every:8} {statistics.median(seconds):7.3f} {min(seconds):7.3f}  {name}")


if __name__ == "__main__":
    main()
