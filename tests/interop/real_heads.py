"""A tiny target, and heads that other libraries' own trainers fit to its answers; made once, in ``build``."""

import contextlib
import fcntl
import functools
import hashlib
import inspect
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import peer
import torch
from typer.testing import CliRunner

from capture_hooks import CaptureSpec
from capture_hooks.cli.app import build
from capture_hooks.testing import tiny

BUILD = peer.ROOT / "build" / "real-heads"
#: None of these is among the layers that an engine takes by default (pre.2, pre.4, pre.5 of 8).
SPEC = CaptureSpec.parse("post.0, post.2, post.5")
LAYERS, VOCAB, DRAFT_VOCAB = 8, 512, 256
PROMPTS, ANSWER = 12, 64  # and ANSWER tokens to each prompt
DRAFT = 3  # tokens drafted a round, and steps of training-time test
STAMP = "made-from"  # the file that says from which sources a folder was made


@dataclass(frozen=True, slots=True)
class Recipe:
    """One head by one trainer.

    Attributes:
        library: its environment, ``.venv-LIBRARY``, and worker, ``train_LIBRARY.py``.
        ids: `SPEC` in that library's own numbers.
        flags: further settings that the worker hands to its library.
        passes: over the data; enough for drafts to be right more often than not, too few to be always right.
    """

    library: str
    ids: tuple[int, ...]
    passes: int
    learning_rate: float
    flags: dict


RECIPES = {
    # Without its normed residual, which SGLang cannot do; every other flag is the trainer's default.
    "speculators": Recipe("speculators", (1, 3, 6), 60, 2e-3, {"norm_before_residual": False}),
    "speculators-default": Recipe("speculators", (1, 3, 6), 60, 2e-3, {}),
    "specforge": Recipe("specforge", (0, 2, 5), 90, 2e-3, {}),
    # The default, written out: to SpecForge the norm before lm_head, to the servers what is fed back.
    "specforge-norm-output": Recipe("specforge", (0, 2, 5), 90, 2e-3, {"norm_output": True}),
    "modelopt": Recipe("modelopt", (0, 2, 5), 60, 8e-3, {}),
}


def head(name: str) -> Path:
    """The checkpoint that the library exported, trained if it is not there; skips without its environment."""
    recipe = RECIPES[name]
    peer.interpreter(recipe.library)
    worker = peer.WORKERS / f"train_{recipe.library}.py"
    settings = {
        **asdict(recipe),
        "target": str(target()),
        "talks": str(target() / "talks.jsonl"),
        "data": str(dump(recipe.library)),
        "draft": DRAFT,
        "draft_vocab": DRAFT_VOCAB,
    }
    stamp = _digest(worker.read_text(), json.dumps(settings), (target() / STAMP).read_text())
    with _made(BUILD / name, stamp) as folder:
        if folder is not None:
            run_worker(recipe.library, worker.stem, settings | {"out": str(folder)}, folder)
    return BUILD / name


@functools.cache
def converted(name: str, written_for: str | None = None) -> Path:
    """That head as one of ours, by ``capture-hooks convert``; anew in each process.

    Args:
        name: of the recipe.
        written_for: who is said to have written it; the library that did, if None.
    """
    written_for = written_for or RECIPES[name].library
    home = BUILD / "converted" / f"{name}-by-{written_for}"
    words = ["--to", "capture-hooks", "--target", target(), "--written-for", written_for, "--overwrite"]
    capture_hooks("convert", head(name), home, *words, "--data", target() / "talks.jsonl")
    return home


def dump(library: str) -> Path:
    """The target's states over the talks in that library's format, by ``dump`` and ``convert``."""
    stamp = _digest((target() / STAMP).read_text(), str(SPEC))
    with _made(BUILD / "dumps", stamp) as folder:
        if folder is not None:
            # speculators wants the end of the stream before its norm; the others after it.
            spec = f"{SPEC} -> post.-1"
            words = ["--spec", spec, "--data", target() / "talks.jsonl", "--out", folder / "ours"]
            capture_hooks("dump", "--model", target(), *words)
            for to in ("speculators", "specforge", "modelopt"):
                capture_hooks("convert", folder / "ours", folder / to, "--to", to, "--target", target())
    return BUILD / "dumps" / library


def target() -> Path:
    """A Llama whose greedy answers hardly repeat themselves, its tokenizer, and prompts with their answers.

    The weights are a random model's, with attention, branches and output sharpened until what comes next
    depends on the context, rounded to bfloat16 as a published model's are.  Kept are the prompts whose
    answers rounding decides least: ``talks.jsonl`` has ``prompt_ids`` and ``answer_ids``, and one talk more
    than ``prompts.jsonl``.
    """
    with _made(BUILD / "target", _digest(*map(inspect.getsource, (target, _talks, _tokenizer)))) as folder:
        if folder is not None:
            model = tiny.llama(
                num_hidden_layers=LAYERS,
                hidden_size=128,
                intermediate_size=320,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                vocab_size=VOCAB,
                max_position_embeddings=512,
                tie_word_embeddings=False,
            )
            with torch.no_grad():
                model.model.embed_tokens.weight *= 14
                model.lm_head.weight *= 6
                for layer in model.model.layers:
                    for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                        part.weight *= 2.5
                    for part in (layer.self_attn.v_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
                        part.weight *= 2
                for parameter in model.parameters():
                    parameter.copy_(parameter.bfloat16())
            talks = _talks(model)
            model.save_pretrained(folder, max_shard_size="1MB")  # SpecForge reads a target by its index alone
            _tokenizer().save_pretrained(folder)
            prompts = [{"prompt_ids": talk["prompt_ids"]} for talk in talks[:PROMPTS]]
            for name, records in (("talks", talks), ("prompts", prompts)):
                lines = "".join(json.dumps(record) + "\n" for record in records)
                (folder / f"{name}.jsonl").write_text(lines)
    return BUILD / "target"


def talks() -> list[dict]:
    """``prompt_ids`` and ``answer_ids`` of the prompts that are decoded."""
    lines = (target() / "talks.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:PROMPTS]]


def _talks(model) -> list[dict]:
    """`PROMPTS` and one, the surest of 256 random prompts whose answers hold no special token."""
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, VOCAB, (256, 8), generator=draw)
    full = model.generate(prompts, max_new_tokens=ANSWER, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        best = model(full).logits.topk(2, -1).values[:, prompts.shape[1] - 1 : -1]
    margin = (best[..., 0] - best[..., 1]).amin(1)
    margin[(full[:, prompts.shape[1] :] < 3).any(1)] = 0
    found = []
    for i in margin.topk(PROMPTS + 1).indices.tolist():
        prompt, answer = full[i].split([prompts.shape[1], ANSWER])
        found.append({"prompt_ids": prompt.tolist(), "answer_ids": answer.tolist()})
    return found


def _tokenizer():
    """Bytes, as `tiny.tokenizer`, and merges until every id of the target has a text."""
    made = tiny.tokenizer().train_new_from_iterator([(peer.ROOT / "LICENSE").read_text()], VOCAB)
    made.chat_template = tiny.CHATML
    return made


def capture_hooks(*words) -> str:
    """The command's output."""
    line = [*map(str, words)]
    done = CliRunner().invoke(build(line), line)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.stdout


def run_worker(environment: str, worker: str, settings: dict, beside: Path) -> str:
    """`peer.run` with settings in a file next to ``beside``."""
    words = beside.with_name(beside.name + ".json")
    words.write_text(json.dumps(settings))
    try:
        return peer.run(environment, worker, str(words))
    finally:
        words.unlink()


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _made(home: Path, stamp: str):
    """None where ``home`` was made from the same; else a folder that takes its place if all goes well."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(home.with_name(home.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test files that run side by side want the same heads
        if (home / STAMP).is_file() and (home / STAMP).read_text() == stamp:
            yield None
            return
        folder = home.with_name(home.name + ".unfinished")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
        (folder / STAMP).write_text(stamp)
        shutil.rmtree(home, ignore_errors=True)
        folder.rename(home)
