"""What really running SGLang models capture, for any list of ids, is what our conventions say."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer import ROOT, Peer, PeerError, interpreter

from capture_hooks import Point
from capture_hooks.conventions import convention_for
from capture_hooks.errors import ConventionError

FAMILIES = ("deepseek_v2", "gemma3_text", "gpt_oss", "llama", "qwen3", "qwen3_moe")
BUILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import sglang_families
for family, folder in json.loads(sys.argv[2]):
    sglang_families.build(family, folder)
print(json.dumps([sglang_families.backend(family) for family, _ in json.loads(sys.argv[2])]))
"""


@pytest.fixture(scope="module", params=FAMILIES)
def running(request, tmp_path_factory) -> Iterator[tuple[str, Peer]]:
    """A tiny random model of the family, in SGLang and in transformers."""
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    done = subprocess.run(
        [interpreter("sglang"), "-c", BUILD, ROOT / "benchmarks", json.dumps([[family, str(folder)]])],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
    (backend,) = json.loads(done.stdout.splitlines()[-1])
    peer = Peer("sglang", "sglang_running", RUNNING_MODEL=str(folder), RUNNING_BACKEND=backend)
    yield family, peer
    peer.close()


def name(point: Point, n: int) -> str:
    if point.module:
        return f"m{point.module.split('.')[-2]}"
    return f"b{point.resolve(n).boundary}"


def asked(peer: Peer, ids) -> tuple[list[list] | None, PeerError | None]:
    try:
        return peer("capture", ids), None
    except PeerError as error:
        return None, error


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_running_model_captures_what_we_say(data, running) -> None:
    family, peer = running
    n = peer("layers")
    ids = data.draw(
        st.one_of(
            st.none(),
            st.sets(st.integers(0, n), min_size=1, max_size=3).map(sorted),
            st.lists(st.integers(-3, n + 1), min_size=1, max_size=4),
        )
    )
    ours = convention_for("sglang", family)
    found, failure = asked(peer, ids)
    try:
        captured = ours.default(n) if ids is None else ours.captured(ids, n)
    except ConventionError as error:
        refusal = str(error)
        assert failure is not None, f"{family} {ids}: captured {found}; {refusal}"
        return
    assert failure is None, f"{family} {ids}: {failure}; {captured}"
    assert [state for state, *_ in found] == [name(point, n) for point in captured.points], (ids, found)
    assert all(gap < next_best / 5 for _, gap, next_best in found), found
