"""Asking SGLang's own source what it captures, and comparing the answer with a convention's."""

from collections.abc import Sequence

from hypothesis import strategies as st
from peer import Peer, PeerError

from capture_hooks import Point
from capture_hooks.conventions import Convention, convention_for
from capture_hooks.conventions.rules import Never
from capture_hooks.errors import ConventionError

EAGLE3, DFLASH, DSPARK = (f"set_{name}_layers_to_capture" for name in ("eagle3", "dflash", "dspark"))
#: How SGLang fails, and the word in our refusal.
FAILURES = {
    "IndexError": ("IndexError",),
    "TypeError": ("TypeError",),
    "ValueError": ("ValueError", "fails to unpack"),
    "RuntimeError": ("RuntimeError",),
    "AssertionError": ("RuntimeError",),  # what it was up to 0.5.19
}
depths = st.integers(1, 9)
#: Mostly plausible lists, and everything else as well.
id_lists = st.one_of(
    st.sets(st.integers(0, 9), min_size=1, max_size=4).map(sorted),
    st.lists(st.integers(-3, 11), min_size=1, max_size=4),
)


def boundaries(points: Sequence[Point], n: int) -> list[int]:
    """Gemma3's outputs of norms stand for the boundaries at which its loop took them."""
    return [
        int(point.module.split(".")[-2]) + 1 if point.module else point.resolve(n).boundary
        for point in points
    ]


def of(family: str, version: str, key: str | None = None) -> Convention:
    return convention_for("sglang", family, key, version)


def agree(sglang: Peer, ours: Convention, version: str, family: str, ids, n: int, name: str) -> None:
    """What SGLang captures, or how it fails, is what we say."""
    case = f"{ours.name} for {family} in {version}: {ids} of {n} layers"
    theirs, failure = asked(lambda: sglang("capture", version, family, ids, n, name), PeerError)
    captured, refusal = asked(
        lambda: ours.default(n) if ids is None else ours.captured(ids, n), ConventionError
    )
    assert (failure is None) == (refusal is None), (
        f"{case}: {failure or theirs}, we say {refusal or captured}"
    )
    if failure:
        why = FAILURES[failure.kind]
        assert isinstance(ours, Never) or any(word in str(refusal) for word in why), f"{case}: {failure}"
    elif not theirs:
        assert captured.points == (Point("final_norm"),), case
        assert captured.quirks, case
    else:
        assert boundaries(captured.points, n) == theirs, case
        if ids is not None and not captured.quirks:
            assert len(theirs) == len(ids), f"{case}: a column was dropped silently"
            assert ours.to_points(ids, n) == captured.points, case


def asked(question, refusal):
    """The answer, or the refusal."""
    try:
        return question(), None
    except refusal as error:
        return None, error


def has_rule(convention: Convention) -> bool:
    return not isinstance(convention, Never) or convention.has_setter


def with_dflash(versions: list[str]) -> list[str]:
    return [version for version in versions if not version.startswith(("0.5.9", "0.5.10"))]
