"""The tables of docs/conventions.md, asked of the conventions; run as a program, it writes them there."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from capture_hooks import Point
from capture_hooks.conventions import Convention
from capture_hooks.errors import ConventionError
from capture_hooks.plugins import build_registry

PAGE = Path(__file__).parents[2] / "docs" / "conventions.md"
BEGIN, END = "<!-- tables: python tests/docs/conventions_tables.py -->", "<!-- end of tables -->"
#: Depth of the model that is asked about, and two ids for what takes exactly three.
N, FILLERS = 36, (7, 11)
TITLES = {
    "angelslim": "AngelSlim",
    "dflash": "z-lab/dflash",
    "eagle": "SafeAILab/EAGLE",
    "llama_cpp": "llama.cpp",
    "modelopt": "ModelOpt",
    "nemo_automodel": "NeMo Automodel",
    "sglang": "SGLang",
    "specforge": "SpecForge",
    "speculators": "speculators",
    "tensorrt_llm": "TensorRT-LLM",
    "torchspec": "TorchSpec",
    "vllm": "vLLM",
}


def tables() -> str:
    """All of them, with their headings."""
    installed = build_registry(entry_points=())
    return "\n".join([*_conventions(list(installed.conventions.values())), *_readers(installed.readers)])


def _conventions(known: list[Convention]) -> Iterator[str]:
    for library in sorted({c.library for c in known}, key=lambda name: TITLES.get(name, name).lower()):
        mine = [c for c in known if c.library == library]
        for key in sorted({c.key for c in mine}, key=lambda key: (not _primary(mine, key), key)):
            name, comma, backend = key.partition(", ")
            shown = f"`{name}`{comma}{backend}" if " " not in name else key
            yield f"### {TITLES.get(library, library)}: {shown}\n"
            yield "| convention | versions | families | id k is | 0 | n-1 | n | -1 | no list | order | rank |"
            yield "|---|---|---|---|---|---|---|---|---|---|---|"
            for convention in (c for c in mine if c.key == key):
                yield f"| {' | '.join(_row(convention))} |"
            yield ""


def _primary(among: list[Convention], key: str) -> bool:
    return any(c.primary for c in among if c.key == key)


def _row(convention: Convention) -> Iterator[str]:
    yield f"`{convention.name}`"
    yield convention.versions
    families = convention.families
    yield ", ".join(families[:3]) + (f", … ({len(families)})" if len(families) > 3 else "") or "every other"
    yield _rule(convention)
    for number in (0, N - 1, N, -1):
        yield _state(convention, [number], number)
    yield _default(convention)
    yield convention.order + (f", {convention.count}" if convention.count is not None else "")
    yield f"{convention.rank} {convention.read_on}"


def _rule(convention: Convention) -> str:
    """The state of an id in the middle, alone, after a first 1, and beside n."""
    alone = _state(convention, [17], 17)
    rule = alone
    for ids, where in (([1, 17], "after a first 1"), ([17, N], "beside n")):
        other = _state(convention, ids, 17)
        if alone != "–" and other not in ("–", alone) and not other.startswith("("):
            rule += f"; {other} {where}"
    return rule


def _state(convention: Convention, ids: list[int], number: int) -> str:
    """What one id of a list is; in brackets where that is an accident; "–" where it is nothing."""
    asked = ids if convention.count is None else sorted([*ids, *FILLERS][: convention.count])
    place = asked.index(number)
    points = _or_none(convention.to_points, asked)
    if points is not None:
        return _spelled(points[place])
    captured = _or_none(convention.captured, asked)
    if captured is None or len(captured.points) != len(asked) or convention.name == "eagle":
        return "–"
    return f"({_spelled(captured.points[place])})"


def _spelled(point: Point) -> str:
    """By boundary, so that one state has one name here, however a library counts."""
    if point.module is not None:
        return "what layer k adds"
    site = point.resolve(N)
    if site.norm:
        return "final_norm"
    names = {0: "embed", 1: "post.0", 17: "pre.k", 18: "post.k", N - 1: "pre.(n-1)", N: "post.(n-1)"}
    return names.get(site.boundary, f"boundary {site.boundary}")


def _default(convention: Convention) -> str:
    found = _or_none(lambda _, n: convention.default(n), [])
    if found is None:
        return "refused"
    modules = [re.findall(r"layers\.(\d+)\.", point.module or "") for point in found.points]
    if all(modules):
        return (
            f"what layers {', '.join(number for numbers in modules for number in numbers)} add, if n is {N}"
        )
    boundaries = [point.resolve(N).boundary for point in found.points]
    if boundaries == [2, N // 2, N - 3]:
        return "EAGLE's"
    if boundaries == [3, N // 2 + 1, N - 2]:
        return "EAGLE's, one deeper"
    return ", ".join(str(point) for point in found.points)


def _or_none(question: Callable[[Sequence[int], int], Any], ids: list[int]) -> Any:
    try:
        return question(ids, N)
    except ConventionError:
        return None


def _readers(readers: Any) -> Iterator[str]:
    yield "### Readers\n"
    yield "| reader | library | versions | how it gets to the ids | rank |"
    yield "|---|---|---|---|---|"
    for reader in readers.values():
        what = reader.about
        library, rank = TITLES.get(reader.library, reader.library), f"{reader.rank} {reader.read_on}"
        yield f"| `{reader.name}` | {library} | {reader.versions} | {what} | {rank} |"
    yield ""


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n{END}{after}")
