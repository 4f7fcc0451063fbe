"""SGLang's source files, of any version: classes, their ancestors and their methods, compiled one by one.

Versions are those under ``build/sglang`` (``make sglang-versions``) and the installed one.
"""

import ast
import contextlib
import copy
import importlib.util
import sys
import typing
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from numbers import Integral
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).parents[3]
INSTALLED = version("sglang")
SETTERS = ("set_eagle3_layers_to_capture", "set_dflash_layers_to_capture", "set_dspark_layers_to_capture")
METHODS = (*SETTERS, "forward")
RANK = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1)
NAMES = {**vars(typing), "get_pp_group": lambda: RANK, "get_parallel": lambda: SimpleNamespace(pp_group=RANK)}


def folder(sglang):
    if sglang == INSTALLED:
        return Path(importlib.util.find_spec("sglang").origin).parent / "srt"
    return ROOT / "build" / "sglang" / sglang / "sglang" / "srt"


@cache
def module(sglang, name):
    """Classes, imports and served classes of one file of ``models``; None where there is no such file."""
    path = folder(sglang) / "models" / f"{name}.py"
    if not path.exists():
        return None
    tree = ast.parse(path.read_text("utf-8-sig"))
    served = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
            value = node.value
            served += [ast.unparse(e) for e in getattr(value, "elts", [value])]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):  # 18 versions of 200 files: nothing else is kept
            node.body = [s for s in node.body if isinstance(s, ast.FunctionDef) and s.name in METHODS]
    return SimpleNamespace(
        classes={node.name: node for node in tree.body if isinstance(node, ast.ClassDef)},
        imported={
            alias.asname or alias.name: (node.module.rsplit(".", 1)[1], alias.name)
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt.models.")
            for alias in node.names
        },
        served=served,
    )


@cache
def ancestry(sglang, name, cls):
    """The class and its ancestors in ``models``, in the order in which methods are looked for."""
    found = module(sglang, name)
    if found is None:
        return ()
    if cls not in found.classes:
        return ancestry(sglang, *found.imported[cls]) if cls in found.imported else ()
    node = found.classes[cls]
    return (node, *(a for base in node.bases for a in ancestry(sglang, name, ast.unparse(base))))


@cache
def method(sglang, name, cls, wanted):
    for node in ancestry(sglang, name, cls):
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == wanted:
                return statement
    return None


@cache
def compiled(sglang, name, cls, wanted):
    """That method as a function of its own; None where the class has none."""
    source = method(sglang, name, cls, wanted)
    if source is None:
        return None
    source = copy.deepcopy(source)
    source.decorator_list, source.returns = [], None
    for argument in source.args.args:
        argument.annotation = None
    names = dict(NAMES)
    exec(compile(ast.fix_missing_locations(ast.Module([source], [])), f"{name}.py", "exec"), names)
    return names[wanted]


@cache
def loose(sglang, file):
    """The functions and classes of a file, without what it imports: enough to read a config."""
    loaded = ModuleType(f"{sglang}/{file}")
    sys.modules[loaded.__name__] = loaded  # where a dataclass looks for its annotations
    names = vars(loaded)
    names |= {**NAMES, "dataclass": dataclass, "Integral": Integral}
    for node in ast.parse((folder(sglang) / file).read_text("utf-8-sig")).body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            body = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), node], [])
            with contextlib.suppress(NameError):  # a constant or a decorator from elsewhere
                exec(compile(ast.fix_missing_locations(body), file, "exec"), names)
    return names


def versions():
    """Those there are, the oldest first."""
    kept = ROOT / "build" / "sglang"
    others = [path.name for path in kept.glob("*") if (path / "sglang" / "srt").is_dir()]
    return [*sorted(others, key=lambda v: [int(p) for p in v.split(".")[:3]]), INSTALLED]
