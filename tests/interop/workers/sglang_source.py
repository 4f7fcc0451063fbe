"""SGLang's own setters and capture loops, of any version, executed from its source files.

No version but the installed one can be imported beside today's transformers, and in the installed one some
models need kernels of a GPU.  Source can always be read: a setter is a few lines about a list, and what a
loop captures is decided by tests such as ``i in self.layers_to_capture``.  Here those very lines are compiled
and run, on objects that hold what they ask for: a config, a list of layers, a pipeline of one rank.
"""

import ast
import importlib.util
import os
import sys
from functools import cache
from types import SimpleNamespace

import torch
from _serve import serve
from _sglang_chains import CHAINS, chain
from _sglang_files import RANK, SETTERS, ancestry, compiled, folder, loose, method, module, versions

BATCH = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False))


def built(sglang, family, n):
    """Objects with the setters of each class, from the served model to the one that holds ``n`` layers."""
    objects = []
    for attribute, name, cls in chain(family):
        setters = {s: compiled(sglang, name, cls, s) for s in SETTERS}
        kind = type(cls, (), {s: f for s, f in setters.items() if f is not None})
        made = kind()
        config = SimpleNamespace(num_hidden_layers=n, num_loops=1)
        config.text_config = config
        made.config, made.pp_group, made.capture_aux_hidden_states = config, RANK, False
        if objects:
            setattr(objects[-1], attribute, made)
        objects.append(made)
    inner = objects[-1]
    inner.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(n))
    for layer_id, layer in enumerate(inner.layers):
        layer.layer_id, layer._is_layer_to_capture, layer.mlp_ar_fusable = layer_id, False, False
    inner.layers_to_capture, inner.dspark_layers_to_capture = [], None
    inner.start_layer, inner.end_layer, inner.carries_bank_slices = 0, n, False
    inner.dflash_capture, inner._dflash_layers_to_capture = False, set()
    return objects


def is_capture(test):
    lists = ("layers_to_capture", "captures")
    return "_is_layer_to_capture" in ast.unparse(test) or any(
        isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.In)
        and ast.unparse(node.comparators[0]).endswith(lists)
        for node in ast.walk(test)
    )


def is_layer_call(node):
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    indexed = called.startswith("self.layers[") and called.endswith("]")
    return indexed or called in ("layer", "layer.forward")


def looks(statements, inside=False):
    """Every test that decides a capture: (where, test, the value kept), in source order.

    ``where`` is *before* the loop over layers, on *entering* a layer, after *leaving* one, or at the *end*.
    """
    found, place = [], "entering" if inside else "before"
    for statement in statements:
        if isinstance(statement, ast.For) and any(is_layer_call(node) for node in ast.walk(statement)):
            found += looks(statement.body, inside=True)
            place = "end"
            continue
        if isinstance(statement, ast.With | ast.If | ast.Try) and any(
            isinstance(node, ast.For) or is_layer_call(node) for node in ast.walk(statement)
        ):
            branches = [statement.body, getattr(statement, "orelse", [])]
            inner = [look for branch in branches for look in looks(branch, inside)]
            found += inner
            place = "leaving" if inside else "end"
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.If) and is_capture(node.test):
                kept = [c.args[0] for c in ast.walk(node) if is_append(c)]
                found += [(place, node.test, value) for value in kept]
            elif isinstance(node, ast.IfExp) and is_capture(node.test):
                found.append((place, node.test, None))
        if inside and any(is_layer_call(node) for node in ast.walk(statement)):
            place = "leaving"
    return found


def is_append(node):
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "append"
        and "aux_hidden_states" in ast.unparse(node.func.value)
    )


@cache
def capture_tests(sglang, name, cls):
    """`looks` of a model's forward, compiled; the value kept only where it is made of the stream alone."""
    found = []
    for place, test, kept in looks(method(sglang, name, cls, "forward").body):
        used = {node.id for node in ast.walk(kept) if isinstance(node, ast.Name)} if kept else {"nothing"}
        plain = used <= {"hidden_states", "residual"}
        found.append((place, expression(test), expression(kept) if plain else None))
    if not found:
        raise LookupError(f"no capture in {cls}.forward of {sglang}")
    return found


def expression(node):
    return compile(ast.fix_missing_locations(ast.Expression(node)), "loop", "eval")


def visit(sglang, family, objects, n):
    """Boundaries that the model's forward captures, in its order."""
    _, name, cls = chain(family)[-1]
    inner, seen = objects[-1], []
    tests = capture_tests(sglang, name, cls)
    here = {"self": inner, "num_layers": n, "capture_aux": True, "hidden_states": torch.ones(2, 3)}
    here |= {"aux_hidden_states": [], "forward_batch": BATCH}

    def look(places, boundary, layer, residual):
        hits = set()
        for place, test, kept in tests:
            names = {**here, "i": layer, "layer_idx": layer, "layer_id": layer, "logical_id": layer}
            names["layer"] = inner.layers[layer] if layer < n else None
            if place in places and eval(test, {}, names):
                if kept is not None:
                    eval(kept, {}, {"hidden_states": 1.0, "residual": residual})
                hits.add(boundary)
        seen.extend(hits)

    look(("before",), 0, 0, None)
    for i in range(n):
        look(("entering",), i, i, None if i == 0 else 1.0)
        look(("leaving",), i + 1, i, 1.0)
    look(("end",), n, n, 1.0)
    return seen


@cache
def packer(sglang):
    path = folder(sglang) / "layers" / "aux_hidden_states.py"
    spec = importlib.util.spec_from_file_location(f"aux_{sglang}", path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded.AuxHiddenStatePacker


def pack(sglang, family, objects, seen):
    """The check of the packed buffer, where the model has one and something was captured."""
    _, name, cls = chain(family)[-1]
    if seen and packs(sglang, name, cls):
        packed = packer(sglang)(len(objects[-1].layers_to_capture))
        for boundary in seen:
            packed.append(torch.full((2, 3), float(boundary)))
        packed.finalize()


@cache
def packs(sglang, name, cls):
    return "AuxHiddenStatePacker(" in ast.unparse(method(sglang, name, cls, "forward"))


def unpack(sglang, family, objects, seen):
    """What the outer forward does with the pair, or with the bare tensor where nothing was captured."""
    if seen:
        return
    for made, (_, name, cls) in zip(objects[:-1], chain(family), strict=False):
        for forward in (s for c in ancestry(sglang, name, cls) for s in c.body if is_forward(s)):
            for node in ast.walk(forward):
                if isinstance(node, ast.If) and any(is_unpacking(s) for s in node.body):
                    body = ast.fix_missing_locations(ast.Module([node], []))
                    names = {"self": made, "hidden_states": torch.zeros(5, 3)}
                    exec(compile(body, f"{name}.py", "exec"), names)
                    return
    raise LookupError(f"no pair is unpacked in {family} of {sglang}")


def is_forward(statement):
    return isinstance(statement, ast.FunctionDef) and statement.name == "forward"


def is_unpacking(statement):
    return ast.unparse(statement) in (
        "hidden_states, aux_hidden_states = hidden_states",
        "(hidden_states, aux_hidden_states) = hidden_states",
    )


def families():
    """Those whose classes are known here, each with the served class and its file."""
    return {family: list(chain(family)[0][1:]) for family in CHAINS}


def setter(sglang, family, name):
    """Whether the served class of this version has that setter; None where there is no such class."""
    _, file, cls = chain(family)[0]
    if not ancestry(sglang, file, cls):
        return None
    return compiled(sglang, file, cls, name) is not None


def capture(sglang, family, ids, n, name="set_eagle3_layers_to_capture"):
    """Boundaries that come out after ``name(ids)``; empty where nothing did and the forward goes on."""
    return set_and_capture(sglang, family, checked(sglang, ids, n) if "dflash" in name else ids, n, name)


def set_and_capture(sglang, family, ids, n, name="set_dflash_layers_to_capture"):
    """As `capture`, for ids as they reach the setter."""
    objects = built(sglang, family, n)
    getattr(objects[0], name)(ids)
    seen = visit(sglang, family, objects, n)
    pack(sglang, family, objects, seen)
    unpack(sglang, family, objects, seen)
    return seen


def checked(sglang, ids, n, draft_layers=3):
    """What reaches a DFlash setter: that version's reading of a config with these ids."""
    config = {"num_hidden_layers": draft_layers, "dflash_config": {"target_layer_ids": ids}}
    read = loose(sglang, "speculative/dflash_utils.py")["parse_dflash_draft_config"](draft_hf_config=config)
    return read.resolve_target_layer_ids(target_num_layers=n)


def read_draft(sglang, config, family, n):
    """Ids that reach the setter for a DFlash draft's config, by that version's reading."""
    read = loose(sglang, "speculative/dflash_utils.py")["parse_dflash_draft_config"](draft_hf_config=config)
    ids = read.resolve_target_layer_ids(target_num_layers=n, draft_num_layers=read.require_num_layers())
    components = "model_executor/model_runner_components/spec_aux_hidden_state.py"
    move = loose(sglang, components).get("_map_muse_target_layer_ids") if has(sglang, components) else None
    if move is None:
        return ids
    target, draft = SimpleNamespace(model_type=family), SimpleNamespace(architectures=config["architectures"])
    return move(target_hf_config=target, draft_hf_config=draft, layer_ids=ids)


def has(sglang, file):
    return (folder(sglang) / file).exists()


def served(sglang, name):
    """Every architecture that this version serves and that has that setter, with the file it is in."""
    found = {}
    for path in sorted((folder(sglang) / "models").glob("*.py")):
        for cls in module(sglang, path.stem).served:
            if method(sglang, path.stem, cls, name) is not None:
                found[cls] = path.stem
    return found


def graphs_take_default(sglang):
    """Whether something outside the models calls the setter without ids."""
    calls = (
        node
        for path in (folder(sglang) / "model_executor").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8-sig")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("set_eagle3_layers_to_capture")
    )
    return any(not call.args and not call.keywords for call in calls)


if __name__ == "__main__":
    serve(
        versions, families, setter, capture, set_and_capture, checked, read_draft, served, graphs_take_default
    )
    os._exit(0)  # freeing so many syntax trees one by one takes half a minute
