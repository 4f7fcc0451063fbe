"""SGLang's own setters and capture loops, of any version, executed from its source files.

No version but the installed one can be imported beside today's transformers, and in the installed one some
models need kernels of a GPU.  Source can always be read: a setter is a few lines about a list, and what a loop
captures is decided by tests such as ``i in self.layers_to_capture``.  Here those very lines are compiled and
run, on objects that hold what they ask for: a config, a list of layers, a pipeline of one rank.

Versions are those under ``build/sglang`` (``make sglang-versions``) and the installed one.
"""

import ast
import copy
import importlib.util
import sys
import typing
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from _serve import serve

ROOT = Path(__file__).parents[3]
INSTALLED = version("sglang")
RANK = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1)
BATCH = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False))
NAMES = {**vars(typing), "get_pp_group": lambda: RANK, "get_parallel": lambda: SimpleNamespace(pp_group=RANK)}
SETTERS = ("set_eagle3_layers_to_capture", "set_dflash_layers_to_capture", "set_dspark_layers_to_capture")

#: For a family: attribute, module and class of each object from the served model to the one with the layers.
CHAINS = {
    "apertus": "apertus.ApertusForCausalLM model=apertus.ApertusModel",
    "bailing_moe": "bailing_moe.BailingMoEForCausalLM model=bailing_moe.BailingMoEModel",
    "bailing_hybrid": "bailing_moe_v3.BailingMoeV3ForCausalLM model=bailing_moe_v3.BailingMoELinearModel",
    "beam": "beam.BeamForCausalLM model=beam.BeamModel",
    "cosmos3_omni": "cosmos3.Cosmos3ForConditionalGeneration model=qwen3_vl.Qwen3LLMModel",
    "deepseek_v2": "deepseek_v2.DeepseekV2ForCausalLM model=deepseek_v2.DeepseekV2Model",
    "deepseek_v3": "deepseek_v2.DeepseekV3ForCausalLM model=deepseek_v2.DeepseekV2Model",
    "exaone_moe": "exaone_moe.ExaoneMoEForCausalLM model=exaone_moe.ExaoneMoEModel",
    "gemma3": "gemma3_mm.Gemma3ForConditionalGeneration "
    "language_model=gemma3_causal.Gemma3ForCausalLM model=gemma3_causal.Gemma3TextModel",
    "gemma3_text": "gemma3_causal.Gemma3ForCausalLM model=gemma3_causal.Gemma3TextModel",
    "gemma4": "gemma4_mm.Gemma4ForConditionalGeneration language_model=gemma4_causal.Gemma4TextModel",
    "gemma4_text": "gemma4_causal.Gemma4ForCausalLM model=gemma4_causal.Gemma4TextModel",
    "gemma4_unified": "gemma4_unified.Gemma4UnifiedForConditionalGeneration "
    "language_model=gemma4_causal.Gemma4TextModel",
    "glm4_moe": "glm4_moe.Glm4MoeForCausalLM model=glm4_moe.Glm4MoeModel",
    "glm4_moe_lite": "glm4_moe_lite.Glm4MoeLiteForCausalLM model=glm4_moe_lite.Glm4MoeLiteModel",
    "glm5_next": "glm5_next.Glm5NextForConditionalGeneration model=glm5_next.Glm5NextModel",
    "glm_moe_dsa": "glm4_moe.GlmMoeDsaForCausalLM model=deepseek_v2.DeepseekV2Model",
    "gpt_oss": "gpt_oss.GptOssForCausalLM model=gpt_oss.GptOssModel",
    "inkling_mm_model": "inkling.InklingForConditionalGeneration llm=inkling.InklingCausalLLM",
    "intern_s2_preview": "interns2preview.InternS2PreviewForConditionalGeneration "
    "model=qwen3_5.Qwen3_5MoeForCausalLM",
    "internlm3": "llama.InternLM3ForCausalLM model=llama.LlamaModel",
    "interns2_mobius": "interns2_mobius.InternS2MobiusForConditionalGeneration "
    "model=interns2_mobius.InternS2MobiusForCausalLM",
    "iquestcoder": "llama.IQuestCoderForCausalLM model=llama.LlamaModel",
    "kimi_k25": "kimi_k25.KimiK25ForConditionalGeneration "
    "language_model=deepseek_v2.DeepseekV3ForCausalLM model=deepseek_v2.DeepseekV2Model",
    "kimi_linear": "kimi_linear.KimiLinearForCausalLM model=kimi_linear.KimiLinearModel",
    "laguna": "laguna.LagunaForCausalLM model=laguna.LagunaModel",
    "lfm2": "lfm2.Lfm2ForCausalLM model=lfm2.Lfm2Model",
    "lfm2_moe": "lfm2_moe.Lfm2MoeForCausalLM model=lfm2_moe.Lfm2MoeModel",
    "lfm2_vl": "lfm2_vl.Lfm2VlForConditionalGeneration language_model=lfm2.Lfm2ForCausalLM model=lfm2.Lfm2Model",
    "llama": "llama.LlamaForCausalLM model=llama.LlamaModel",
    "llama4": "mllama4.Llama4ForConditionalGeneration "
    "language_model=llama4.Llama4ForCausalLM model=llama4.Llama4Model",
    "llama4_text": "llama4.Llama4ForCausalLM model=llama4.Llama4Model",
    "longcat_flash": "longcat_flash.LongcatFlashForCausalLM model=longcat_flash.LongcatFlashModel",
    "mellum": "mellum.MellumForCausalLM model=mellum.MellumModel",
    "mimo_v2_flash": "mimo_v2.MiMoV2FlashForCausalLM model=mimo_v2.MiMoV2Model",
    "minicpmv4_6": "minicpmv.MiniCPMV4_6 llm=qwen3_5.Qwen3_5ForCausalLM",
    "minimax_m2": "minimax_m2.MiniMaxM2ForCausalLM model=minimax_m2.MiniMaxM2Model",
    "minimax_m3": "minimax_m3.MiniMaxM3SparseForCausalLM model=minimax_m3.MiniMaxM3Model",
    "minimax_m3_vl": "minimax_m3_vl.MiniMaxM3SparseForConditionalGeneration model=minimax_m3.MiniMaxM3Model",
    "ministral3": "ministral3.Ministral3ForCausalLM model=llama.LlamaModel",
    "mistral": "mistral.MistralForCausalLM model=llama.LlamaModel",
    "muse_glimmer": "muse_glimmer.MuseGlimmerForCausalLM model=muse_glimmer.MuseGlimmerModel",
    "muse_spark": "muse_spark.MuseSparkTextForCausalLM "
    "model=muse_spark.MuseSparkModel language_model=muse_spark.MuseSpark1xModel",
    "nemotron_h": "nemotron_h.NemotronHForCausalLM model=nemotron_h.NemotronHModel",
    "phi3": "llama.Phi3ForCausalLM model=llama.LlamaModel",
    "qwen2": "qwen2.Qwen2ForCausalLM model=qwen2.Qwen2Model",
    "qwen2_5_vl": "qwen2_5_vl.Qwen2_5_VLForConditionalGeneration model=qwen2.Qwen2Model",
    "qwen2_moe": "qwen2_moe.Qwen2MoeForCausalLM model=qwen2_moe.Qwen2MoeModel",
    "qwen3": "qwen3.Qwen3ForCausalLM model=qwen3.Qwen3Model",
    "qwen3_5": "qwen3_5.Qwen3_5ForConditionalGeneration model=qwen3_5.Qwen3_5ForCausalLM",
    "qwen3_5_moe": "qwen3_5.Qwen3_5MoeForConditionalGeneration model=qwen3_5.Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text": "qwen3_5_text.Qwen3_5MoeForCausalLM model=qwen3_5.Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "qwen3_5_text.Qwen3_5ForCausalLM model=qwen3_5.Qwen3_5ForCausalLM",
    "qwen3_moe": "qwen3_moe.Qwen3MoeForCausalLM model=qwen3_moe.Qwen3MoeModel",
    "qwen3_next": "qwen3_next.Qwen3NextForCausalLM model=qwen3_next.Qwen3NextModel",
    "qwen3_vl": "qwen3_vl.Qwen3VLForConditionalGeneration model=qwen3_vl.Qwen3LLMModel",
    "qwen3_vl_moe": "qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration model=qwen3_vl_moe.Qwen3MoeLLMModel",
    "sarvam_moe": "sarvam_moe.SarvamMoEForCausalLM model=bailing_moe.BailingMoEModel",
}


def folder(sglang):
    if sglang == INSTALLED:
        return Path(importlib.util.find_spec("sglang").origin).parent / "srt"
    return ROOT / "build" / "sglang" / sglang / "sglang" / "srt"


@cache
def module(sglang, name):
    """Classes, imported classes and served classes of one file of ``models``; None where there is no such file."""
    path = folder(sglang) / "models" / f"{name}.py"
    if not path.exists():
        return None
    tree = ast.parse(path.read_text("utf-8-sig"))
    served = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
            value = node.value
            served += [ast.unparse(e) for e in getattr(value, "elts", [value])]
    return SimpleNamespace(
        classes={node.name: node for node in tree.body if isinstance(node, ast.ClassDef)},
        imported={
            alias.asname or alias.name: (node.module.rsplit(".", 1)[1], alias.name)
            for node in ast.walk(tree)
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


def chain(family):
    links = [link.rpartition("=") for link in CHAINS[family].split()]
    return [(attribute, *path.split(".")) for attribute, _, path in links]


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
    return called in ("layer", "layer.forward") or (
        called.startswith("self.layers[") and called.endswith("]")
    )


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


def evaluate(node, **names):
    return eval(
        compile(ast.fix_missing_locations(ast.Expression(node)), "loop", "eval"), {"getattr": getattr}, names
    )


def visit(sglang, family, objects, n):
    """Boundaries that the model's forward captures, in its order."""
    _, name, cls = chain(family)[-1]
    inner, seen = objects[-1], []
    tests = looks(method(sglang, name, cls, "forward").body)
    if not tests:
        raise LookupError(f"no capture in {cls}.forward of {sglang}")
    here = {"self": inner, "num_layers": n, "capture_aux": True, "hidden_states": torch.ones(2, 3)}
    here |= {"aux_hidden_states": [], "forward_batch": BATCH}

    def look(places, boundary, layer, residual):
        hits = set()
        for place, test, kept in tests:
            names = {**here, "i": layer, "layer_idx": layer, "layer_id": layer, "logical_id": layer}
            names["layer"] = inner.layers[layer] if layer < n else None
            if place in places and evaluate(test, **names):
                if kept is not None and {x.id for x in ast.walk(kept) if isinstance(x, ast.Name)} <= {
                    "hidden_states",
                    "residual",
                }:
                    evaluate(kept, hidden_states=1.0, residual=residual)
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
    if "AuxHiddenStatePacker(" in ast.unparse(method(sglang, name, cls, "forward")) and seen:
        packed = packer(sglang)(len(objects[-1].layers_to_capture))
        for boundary in seen:
            packed.append(torch.full((2, 3), float(boundary)))
        packed.finalize()


def unpack(sglang, family, objects, seen):
    """What the outer forward does with the pair, or with the bare tensor of a forward that captured nothing."""
    for made, (_, name, cls) in zip(objects[:-1], chain(family), strict=False):
        for forward in (s for c in ancestry(sglang, name, cls) for s in c.body if is_forward(s)):
            for node in ast.walk(forward):
                if isinstance(node, ast.If) and any(is_unpacking(s) for s in node.body):
                    body = ast.Module([ast.parse("aux_hidden_states = None").body[0], node], [])
                    bare = torch.zeros(5, 3)
                    names = {"self": made, "hidden_states": (bare, seen) if seen else bare}
                    exec(compile(ast.fix_missing_locations(body), f"{name}.py", "exec"), names)
                    return
    if not seen:
        raise LookupError(f"no pair is unpacked in {family} of {sglang}")


def is_forward(statement):
    return isinstance(statement, ast.FunctionDef) and statement.name == "forward"


def is_unpacking(statement):
    return ast.unparse(statement) in (
        "hidden_states, aux_hidden_states = hidden_states",
        "(hidden_states, aux_hidden_states) = hidden_states",
    )


def versions():
    kept = ROOT / "build" / "sglang"
    others = [path.name for path in kept.glob("*") if (path / "sglang" / "srt").is_dir()]
    return [*sorted(others, key=lambda v: [int(p) for p in v.split(".")[:3]]), INSTALLED]


def setter(sglang, family, name):
    """Where the served class of this version gets that setter from; None where it has none."""
    _, file, cls = chain(family)[0]
    return compiled(sglang, file, cls, name) is not None


def capture(sglang, family, ids, n, name="set_eagle3_layers_to_capture"):
    """Boundaries that come out after ``name(ids)``; empty where nothing did and the forward goes on all the same."""
    objects = built(sglang, family, n)
    getattr(objects[0], name)(ids)
    seen = visit(sglang, family, objects, n)
    pack(sglang, family, objects, seen)
    unpack(sglang, family, objects, seen)
    return seen


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
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("model.set_eagle3_layers_to_capture")
    )
    return any(not call.args and not call.keywords for call in calls)


if __name__ == "__main__":
    serve(versions, setter, capture, served, graphs_take_default)
