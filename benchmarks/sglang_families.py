"""Causal language models of SGLang, shrunk, against the Hugging Face model that holds the same weights.

    python benchmarks/sglang_families.py [FAMILY ...] [--write]

Run it with the interpreter of an environment that has SGLang, capture-hooks, capture-hooks-transformers and
capture-hooks-sglang.  Each family runs in a process of its own: two prompts as one packed batch in
float32, all points of the stream captured in both libraries.  The table shows the largest difference at each
kind of point, relative to the largest entry of that point in the Hugging Face model.  ``--write`` keeps it in
docs/sglang-families.md.  The exit code is 1 when a captured point differs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

KINDS = ("embed", "pre.k", "post.k", "boundary n", "final_norm", "logits")
CONTROL = "neighbours"  # the two nearest boundaries of the reference: what a shift by one layer would show
TOLERANCE = 1e-4  # float32 through a few layers, with other orders of summation
SECONDS = 240  # for one family
DOCUMENT = Path(__file__).parents[1] / "docs" / "sglang-families.md"
PROMPTS = ((5, 9, 20, 33, 77, 101, 60), (7, 3, 90, 41, 12))

# SGLang sizes its kernels for real models: what the common rule makes too small for it.
_MLA = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,  # of the rotated part
    "num_key_value_heads": 4,
}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "rope_theta": 10000.0,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **_MLA,
        **_ONE_GROUP,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "rope_scaling": _YARN,
    },
    "deepseek_v3": {**_MLA, **_ONE_GROUP, "q_lora_rank": 16, "rope_scaling": _YARN},
    "gpt_oss": {"head_dim": 16},
    # SGLang gives these families as many key heads as query heads.
    "olmo": {"num_key_value_heads": 4},
    "olmoe": {"num_key_value_heads": 4},
    "phi": {"num_key_value_heads": 4},
}
#: SGLang computes GELU itself where the config asks for its tanh approximation (models/gemma.py, 0.5.23): so
#: does the reference.
EXACT_GELU = {"gemma"}
#: What SGLang keeps in bfloat16 whatever the model's dtype is (models/gpt_oss.py, models/granite.py and
#: layers/activation.py of 0.5.23).
BFLOAT16: dict[str, tuple[str, ...]] = {
    "apertus": ("alpha_p", "alpha_n", "beta", "eps"),
    **dict.fromkeys(("gpt_oss", "granite_swa", "granitemoe_swa"), ("sinks",)),
}
#: What SGLang reads from config.json and transformers does not write.
WRITTEN: dict[str, dict[str, Any]] = {
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax"},
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
#: Families whose attention SGLang's plain torch backend does not have (MLA, sinks).
AMX = {
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "longcat_flash", "minicpm3"),
    *("gpt_oss", "granite_swa", "granitemoe_swa"),
}


def build(family: str, folder: str) -> Any:
    """A small random model of that family, saved in ``folder``; returned for reference."""
    import families
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from capture_hooks.testing import tiny

    torch.manual_seed(0)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]]
    given = {**families.SPECIAL.get(family, {}), **SPECIAL.get(family, {})}
    model = model_class._from_config(families.shrink(model_class.config_class, given))
    tiny.randomise(model)
    model.eval()
    for module in model.modules():
        if family in EXACT_GELU and hasattr(module, "act_fn"):
            module.act_fn = torch.nn.GELU()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(BFLOAT16.get(family, ())):
            tensor.data = tensor.data.bfloat16()
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    path = Path(folder, "config.json")
    config = json.loads(path.read_text())
    config.update(WRITTEN.get(family, {}))
    path.write_text(json.dumps(config))
    return model


def backend(family: str) -> str:
    """SGLang's attention backend for it on a CPU."""
    return "intel_amx" if family in AMX else "torch_native"


def points(n_layers: int) -> dict[str, list[str]]:
    """Points of the stream by kind."""
    return {
        "embed": ["embed"],
        "pre.k": [f"pre.{k}" for k in range(n_layers)],
        "post.k": [f"post.{k}" for k in range(n_layers - 1)],
        "boundary n": [f"post.{n_layers - 1}"],
        "final_norm": ["final_norm"],
    }


def captured(model: Any, anatomy: Any, run: Any) -> tuple[dict[str, list[Any]], Any]:
    """States of every point by name, one tensor per request; and what ``run`` returned."""
    from capture_hooks import bind

    n = anatomy.n_layers
    entering = "embed, " + ", ".join(f"pre.{k}" for k in range(1, n))
    leaving = ", ".join(f"post.{k}" for k in range(n))
    has_norm = anatomy.final_norm is not None
    found: dict[str, list[Any]] = {}
    with (
        bind(model, entering, anatomy=anatomy) as before,
        bind(model, leaving, target=has_norm, anatomy=anatomy) as after,
    ):
        output = run()
    for session in (before, after):
        requests = [session.states.sequence(r) for r in range(session.states.requests)]
        for point in session.states.columns:
            found[point] = [states[point] for states in requests]
        if session.states.has_target:
            found["final_norm"] = [states.target for states in requests]
    found["pre.0"] = found["embed"]
    return found, output


def examine(family: str) -> dict[str, Any]:
    """One row of the table."""
    import torch

    from capture_hooks.capture import find_anatomy
    from capture_hooks.errors import CaptureHooksError

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            reference = build(family, folder)
            theirs_anatomy = find_anatomy(reference)
            with torch.no_grad():
                runs = [
                    captured(reference, theirs_anatomy, lambda p=p: reference(torch.tensor([p])).logits)
                    for p in PROMPTS
                ]
        except Exception as error:
            return {"verdict": "not built", "detail": _first_line(error)}
        theirs = {point: [run[0][point][0] for run in runs] for point in runs[0][0]}
        logits = torch.stack([run[1][0, -1] for run in runs])
        try:
            from capture_hooks_sglang.in_process import InProcess

            engine = InProcess(folder, backend(family), context_length=64)
        except BaseException as error:
            return {"verdict": "not loaded", "detail": _first_line(error)}
        try:
            anatomy = find_anatomy(engine.model)
        except CaptureHooksError as error:
            return {"verdict": "refused", "detail": str(error)}
        try:
            states, (_, ours, _) = captured(
                engine.model, anatomy, lambda: engine.extend(engine.requests(PROMPTS))
            )
        except CaptureHooksError as error:
            return {"verdict": "refused", "detail": str(error)}
        except Exception as error:
            return {"verdict": "not run", "detail": _first_line(error)}
    row: dict[str, Any] = {
        kind: max(_difference(states[p], theirs[p]) for p in names if p in states)
        for kind, names in points(anatomy.n_layers).items()
        if any(p in states for p in names)
    }
    ends = ["embed", *(f"post.{k}" for k in range(anatomy.n_layers))]
    row[CONTROL] = min(_difference(theirs[a], theirs[b]) for a, b in itertools.pairwise(ends))
    row["logits"] = _difference([ours[:, : logits.shape[1]]], [logits])
    worst = max(row[kind] for kind in KINDS[:-1] if kind in row)
    mult, cap = anatomy.logit_scale, anatomy.logit_softcap
    readout = f", scale {mult:.4g}" * (mult != 1) + f", soft cap {cap}" * (cap is not None)
    return {
        **row,
        "verdict": _verdict(worst, row["logits"], row[CONTROL]),
        "layout": anatomy.layout,
        "detail": f"{type(engine.model).__name__}: {anatomy.n_layers} x {anatomy.layer_names[0]}, "
        f"{anatomy.final_norm_name}{readout}" + (f"; {anatomy.readout_gap}" if anatomy.readout_gap else ""),
    }


def _verdict(worst: float, logits: float, control: float) -> str:
    """``blunt``: a state of the wrong layer would be too near to be told from the right one."""
    if worst > TOLERANCE:
        return "DIFFERS"
    if control < 100 * TOLERANCE:
        return "blunt"
    return "ok" if logits <= TOLERANCE else "LOGITS"


def _difference(ours: list[Any], theirs: list[Any]) -> float:
    pairs = list(zip(ours, theirs, strict=True))
    assert all(a.shape == b.shape for a, b in pairs), [(a.shape, b.shape) for a, b in pairs]
    size = max(float(b.double().abs().max()) for _, b in pairs)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs) / size


def _first_line(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    lines = str(error).strip().splitlines()
    place = f"{Path(where.filename).name}:{where.lineno}"
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''} ({place})"


def registered() -> list[str]:
    """Model types of transformers whose class SGLang has too."""
    from sglang.srt.models.registry import ModelRegistry
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = set(ModelRegistry.get_supported_archs())
    return sorted(kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in known)


def in_own_process(family: str) -> dict[str, Any]:
    """`examine` in a process that may hang or die."""
    command = [sys.executable, __file__, "--one", family]
    cpu = {"SGLANG_USE_CPU_ENGINE": "1", "SGL_KERNEL_CPU_ATTENTION": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment = {**cpu, **os.environ}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"verdict": "not run", "detail": f"no end after {SECONDS} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return dict(json.loads(line))
    tail = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"verdict": "not run", "detail": f"exit code {done.returncode}: {tail[:200]}"}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The document's text."""
    version = importlib.metadata.version
    measured = {f: r for f, r in rows.items() if "layout" in r}
    others = {f: r for f, r in rows.items() if "layout" not in r}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print("# SGLang's models against Hugging Face's\n")
        print(
            f"SGLang {version('sglang')}, transformers {version('transformers')}, torch {version('torch')}, "
            "float32 on a CPU, tiny random models, two prompts packed in one batch. Each cell is the largest "
            "difference relative to the largest entry of that point; *neighbours* is the same distance "
            "between the two nearest boundaries of the reference, which a capture shifted by one layer "
            "would show. LOGITS: the captured points agree and SGLang's own logits do not (it leaves out "
            "the bias of lm_head).\n\n"
            "Made by `python benchmarks/sglang_families.py --write`.\n"
        )
        print(
            f"| family | layout | {' | '.join((*KINDS, CONTROL))} | |\n|---|---|{'---|' * (len(KINDS) + 2)}"
        )
        for family, row in measured.items():
            cells = " | ".join(f"{row[kind]:.1e}" if kind in row else "–" for kind in (*KINDS, CONTROL))
            print(f"| {family} | {row['layout']} | {cells} | {row['verdict']} |")
        print("\n## Not in the table\n\n| family | | why |\n|---|---|---|")
        for family, row in others.items():
            detail = " ".join(row["detail"].split()).replace("|", "/")
            print(f"| {family} | {row['verdict']} | {detail} |")
    return out.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="model types of transformers (default: all SGLang has)")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {DOCUMENT.name}")
    parser.add_argument("--json", type=Path, help="rows kept there; those already in it are not run again")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("\n" + json.dumps(examine(options.one)), flush=True)
        return 0
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    rows: dict[str, dict[str, Any]] = {}
    for family in options.families or registered():
        rows[family] = row = kept.get(family) or in_own_process(family)
        cells = " ".join(f"{row[kind]:.1e}" if kind in row else "   -   " for kind in (*KINDS, CONTROL))
        detail = " ".join(row["detail"].split())[:220]
        print(f"{family:18} {row['verdict']:10} {row.get('layout', ''):6} {cells}  {detail}", flush=True)
        if options.json:
            options.json.write_text(json.dumps({**kept, **rows}, indent=1) + "\n")
    if options.write:
        DOCUMENT.write_text(table(rows))
    return int(any(row["verdict"] == "DIFFERS" for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
