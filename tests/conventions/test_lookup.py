"""Which convention applies: by library, key, family and version; and by plugins that replace one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from textwrap import dedent

import pytest

from capture_hooks.conventions import BUILTIN, Conventions, convention_for, meanings
from capture_hooks.conventions.lookup import in_force
from capture_hooks.errors import ConventionError, PluginError
from capture_hooks.plugins import GROUP, build_registry

#: A library of two keys and two versions, with a family that lost its own rule.
ACME = """
    from functools import partial

    from capture_hooks import hookimpl
    from capture_hooks.conventions.rules import Vllm

    acme = partial(
        Vllm, library="acme", rank="read", read_on="2026-11-30", source="acme/loop.py:1", limits="None."
    )

    @hookimpl
    def capture_hooks_conventions():
        return [
            acme(name="acme.old", versions="1.0 to 1.9", key="layers"),
            acme(name="acme.old_odd", versions="1.0 to 1.9", key="layers", families=("odd",)),
            acme(name="acme.new", versions="2.0 to 2.4", key="layers"),
            acme(name="acme.blocks", versions="2.0 to 2.4", key="blocks", primary=False),
        ]
"""

REPLACING = """
    from capture_hooks import hookimpl
    from dataclasses import replace
    from capture_hooks.conventions import BUILTIN

    changes = dict(library="{library}", key="{key}", families={families})

    @hookimpl
    def capture_hooks_conventions():
        return [replace(BUILTIN["vllm"], name="{name}", overrides="{old}", rank="read", **changes)]
"""

Install = Callable[..., Conventions]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution on the path; the conventions of all that were put there, beside the core's own."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(distribution: str, source: str) -> Conventions:
        module = f"lookup_test_{tmp_path.name}_{distribution}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(dedent(source))
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{distribution} = {module}\n")
        found = metadata.entry_points(group=GROUP)
        mine = [e for e in found if e.dist is not None and Path(str(e.dist.locate_file(""))) == tmp_path]
        return build_registry(mine, environ={}).conventions

    return add


def vllm(field: str) -> str:
    return str(getattr(BUILTIN["vllm"], field))


def replacing(name: str = "acme.vllm", old: str = "vllm", **changes: str) -> str:
    fields = {"library": "vllm", "key": vllm("key"), "families": "()", **changes}
    return REPLACING.format(name=name, old=old, **fields)


@pytest.mark.parametrize(
    ("family", "key", "version", "expected"),
    [
        ("llama", None, None, "acme.new"),
        ("llama", None, "1.5", "acme.old"),
        ("odd", None, "1.5", "acme.old_odd"),
        ("odd", None, None, "acme.new"),
        ("odd", "layers", "2.4.1", "acme.new"),
        ("llama", "blocks", None, "acme.blocks"),
    ],
)
def test_the_key_the_version_and_the_family_decide(
    install: Install, family: str, key: str | None, version: str | None, expected: str
) -> None:
    known = install("acme", ACME)
    assert convention_for("acme", family, key, version, known).name == expected


def test_a_refusal_lists_what_there_is(install: Install) -> None:
    known = install("acme", ACME)
    with pytest.raises(ConventionError, match=r"no library 'acne' is known .*did you mean 'acme'\?"):
        convention_for("acne", "llama", known=known)
    with pytest.raises(
        ConventionError,
        match=r"no key of acme 'layer' is known \(there are: blocks, layers\); did you mean 'layers'\?",
    ):
        convention_for("acme", "llama", key="layer", known=known)
    with pytest.raises(
        ConventionError, match=r"acme's blocks mean in version 1\.5 was not established .*2\.0 to 2\.4"
    ):
        convention_for("acme", "llama", key="blocks", version="1.5", known=known)
    with pytest.raises(ConventionError, match=r"'newest' is no version"):
        convention_for("acme", "llama", version="newest", known=known)


def test_readings_ask_every_library_once_and_by_its_primary_key(install: Install) -> None:
    known = install("acme", ACME)
    found = {one.convention.library: one for one in meanings([2, 18, 33], "llama", 36, known=known)}
    assert found["acme"].convention.name == "acme.new"
    assert set(found) >= {"acme", "sglang", "vllm", "transformers", "tensorrt_llm", "eagle"}
    only = meanings([2, 18, 33], "llama", 36, key="blocks", known=known)
    assert [one.convention.name for one in only] == ["acme.blocks"]
    assert meanings([2], "llama", 36, key="layers", version="7", known=known) == ()
    nonsense = meanings(["2", True], "llama", 36, known=known)  # type: ignore[list-item]  # that is the point
    assert all(one.points is None and one.refusal for one in nonsense)


def test_a_plugin_may_replace_a_convention(install: Install) -> None:
    known = install("acme", replacing())
    assert convention_for("vllm", "llama", known=known).name == "acme.vllm"
    assert known["vllm"].name == "vllm", "by its own name it is still there"
    assert "vllm" not in {found.name for found in in_force(known)}
    assert convention_for("vllm", "deepseek_v3", known=known).name != "acme.vllm"


def test_the_command_line_says_what_is_replaced(install: Install, tmp_path: Path) -> None:
    install("acme", replacing())
    program = "import sys; from capture_hooks.cli import main; sys.argv[1:] = ['plugins'{}]; main()"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "CAPTURE_HOOKS_PLUGINS": "acme"}

    def ask(more: str) -> str:
        command = [sys.executable, "-c", program.format(more)]
        return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout

    assert "conventions: acme.vllm (replaces vllm)" in ask("")
    assert json.loads(ask(", '--json'"))["overrides"] == {"acme.vllm": "vllm"}


def test_two_may_not_replace_one(install: Install) -> None:
    install("acme", replacing())
    known = install("zeta", replacing(name="zeta.vllm"))
    with pytest.raises(ConventionError, match=r"'acme\.vllm' and 'zeta\.vllm' both replace the convention"):
        convention_for("vllm", "llama", known=known)


def test_one_may_not_replace_what_is_not_there_or_is_about_something_else(install: Install) -> None:
    known = install("acme", replacing(old="vlllm"))
    with pytest.raises(
        ConventionError,
        match=r"'acme\.vllm' is there to replace another, but no convention 'vlllm' is known.*mean 'vllm'",
    ):
        in_force(known)


def test_one_may_not_replace_another_librarys(install: Install) -> None:
    known = install("acme", replacing(library="acme"))
    with pytest.raises(ConventionError, match=r"replaces 'vllm', which is about something else \(vllm,"):
        in_force(known)


def test_one_name_stays_an_error(install: Install) -> None:
    with pytest.raises(PluginError, match="two conventions named 'vllm'"):
        install("acme", replacing(name="vllm", old="vllm"))
