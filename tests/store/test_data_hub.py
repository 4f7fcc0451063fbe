"""A data set's name on the hub, against a stand-in for the hub's HTTP interface."""

import json
import os
import subprocess
import sys

import hub
import pytest

ROWS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"hello {number}"}]}
    for number in range(3)
]
FILES = {
    "train.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "test.jsonl": (json.dumps(ROWS[1]) + "\n").encode(),
    "README.md": b"---\nlicense: cc0-1.0\n---\n",
}
READ = """
import sys
from capture_hooks.errors import DataError
from capture_hooks.store import read_examples
from capture_hooks.testing import tiny
try:
    examples = read_examples(sys.argv[1], tiny.tokenizer(), split=sys.argv[2] or None)
except DataError as error:
    sys.exit(f"error: {error}")
print([tiny.tokenizer().decode(example.token_ids[example.loss_mask]) for example in examples])
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    with hub.serving("someone/talks", FILES) as address:
        home = tmp_path_factory.mktemp("home")
        settings = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        environment = {key: value for key, value in os.environ.items() if "OFFLINE" not in key} | settings

        def run(name, split=""):
            command = [sys.executable, "-c", READ, name, split]
            return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=home)

        yield run


def test_a_name_is_loaded_by_its_split(read):
    found = read("someone/talks", "train")
    assert found.stdout == "['hello 0<|im_end|>', 'hello 1<|im_end|>', 'hello 2<|im_end|>']\n", found.stderr
    assert read("someone/talks", "test").stdout == "['hello 1<|im_end|>']\n"
    assert "several splits; choose one: test, train" in read("someone/talks").stderr


def test_a_name_that_is_not_there_is_one_line(read):
    found = read("someone/nothing", "train")
    assert found.returncode == 1
    assert found.stderr.startswith("error: someone/nothing is neither a file nor a directory, and cannot be")
    assert found.stderr.count("\n") == 1
