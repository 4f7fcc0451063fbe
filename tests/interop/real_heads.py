"""A tiny target, and heads that other libraries' own trainers fit to its answers; made once, in ``build``."""

import contextlib
import hashlib
import inspect
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import peer
import torch

from capture_hooks import CaptureSpec
from capture_hooks.testing import tiny

BUILD = peer.ROOT / "build" / "real-heads"
#: None of these is among the layers that any engine takes by default (pre.2, pre.4, pre.5 of 8).
SPEC = CaptureSpec.parse("post.0, post.2, post.5")
LAYERS, VOCAB, DRAFT_VOCAB = 8, 512, 256
PROMPTS, ANSWER = 12, 64  # and ANSWER tokens to each prompt
STAMP = "made-from"  # the file that says from which sources a folder was made
DRAFT = 3  # tokens drafted a round, and steps of training-time test


@dataclass(frozen=True, slots=True)
class Recipe:
    """One head by one trainer.

    Attributes:
        library: its environment, ``.venv-LIBRARY``, and worker, ``train_LIBRARY.py``.
        ids: `SPEC` in that library's own numbers.
        flags: further settings that the worker hands to its library.
    """

    name: str
    library: str
    ids: tuple[int, ...]
    flags: dict
    steps: int
    learning_rate: float = 2e-3


RECIPES = {
    recipe.name: recipe
    for recipe in (
        # Without its normed residual, which SGLang cannot do; every other flag is the trainer's default.
        Recipe("speculators", "speculators", (1, 3, 6), {"norm_before_residual": False}, 150),
        Recipe("speculators-default", "speculators", (1, 3, 6), {}, 150),
        Recipe("specforge", "specforge", (0, 2, 5), {}, 90),
        # The default, written out: to SpecForge the norm before lm_head, to the servers what is fed back.
        Recipe("specforge-norm-output", "specforge", (0, 2, 5), {"norm_output": True}, 90),
        Recipe("modelopt", "modelopt", (0, 2, 5), {}, 60, 8e-3),
    )
}


def target() -> Path:
    """A Llama whose greedy answers hardly repeat themselves, its tokenizer, and prompts with their answers.

    The weights are a random model's, with attention, branches and output sharpened until what comes next
    depends on the context.  Kept are the prompts whose answers rounding decides least: ``talks.jsonl`` has
    their ``prompt_ids`` and ``answer_ids``, ``prompts.jsonl`` the former, and not of the last.
    """
    home = BUILD / "target"
    stamp = _digest(*map(inspect.getsource, (target, _talks, _tokenizer)))
    if _made(home, stamp):
        return home
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
    talks = _talks(model)
    with _whole(home, stamp) as folder:
        model.save_pretrained(folder, max_shard_size="1MB")  # SpecForge reads a target by its index alone
        _tokenizer().save_pretrained(folder)
        (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
        prompts = "".join(json.dumps({"prompt_ids": talk["prompt_ids"]}) + "\n" for talk in talks[:PROMPTS])
        (folder / "prompts.jsonl").write_text(prompts)
    return home


def head(name: str) -> Path:
    """The checkpoint that the library exported, trained if it is not there; skips without its environment."""
    recipe = RECIPES[name]
    worker = peer.WORKERS / f"train_{recipe.library}.py"
    peer.interpreter(recipe.library)
    home, data = BUILD / name, dump(recipe.library)
    settings = {
        "target": str(target()),
        "talks": str(target() / "talks.jsonl"),
        "data": str(data),
        "ids": list(recipe.ids),
        "flags": recipe.flags,
        "steps": recipe.steps,
        "learning_rate": recipe.learning_rate,
        "draft": DRAFT,
        "draft_vocab": DRAFT_VOCAB,
    }
    stamp = _digest(worker.read_text(), json.dumps(settings), (target() / STAMP).read_text())
    if not _made(home, stamp):
        with _whole(home, stamp, empty=False) as folder:
            words = folder.with_name(folder.name + ".json")
            words.write_text(json.dumps(settings | {"out": str(folder)}))
            print(peer.run(recipe.library, worker.stem, str(words)))
            words.unlink()
    return home


def dump(library: str) -> Path:
    """The states of the talks in that library's own format."""
    home = BUILD / "dumps"
    stamp = _digest((target() / STAMP).read_text(), str(SPEC))
    if not _made(home, stamp):
        with _whole(home, stamp) as folder:
            _dumps(folder)
    return home / library


def _dumps(folder: Path) -> None:
    import datasets
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target()).eval()
    raw = {}
    model.model.layers[-1].register_forward_hook(lambda m, i, o: raw.__setitem__("x", o))
    rows = []
    (folder / "speculators" / "hidden_states").mkdir(parents=True)
    (folder / "specforge").mkdir(parents=True)
    for i, line in enumerate((target() / "talks.jsonl").read_text().splitlines()):
        talk = json.loads(line)
        ids = torch.tensor(talk["prompt_ids"] + talk["answer_ids"])
        mask = [0] * len(talk["prompt_ids"]) + [1] * len(talk["answer_ids"])
        with torch.no_grad():
            hs = model.model(ids[None], output_hidden_states=True).hidden_states
        states = [hs[k][0] for k in (1, 3, 6)]
        save_file(
            {"hidden_states": torch.stack([*states, raw["x"][0]], 1).contiguous(), "token_ids": ids},
            folder / "speculators" / "hidden_states" / f"hs_{i}.safetensors",
        )
        rows.append({"input_ids": ids.tolist(), "loss_mask": mask, "seq_len": len(ids)})
        torch.save(
            {
                "input_ids": ids,
                "loss_mask": torch.tensor(mask),
                "hidden_state": hs[-1].clone(),
                "aux_hidden_state": torch.cat(states, -1)[None].clone(),
            },
            folder / "specforge" / f"data_{i}.ckpt",
        )
    datasets.Dataset.from_list(rows).with_format("torch").save_to_disk(folder / "speculators")


def _talks(model) -> list[dict]:
    """`PROMPTS` and one, the surest of 256 random prompts whose answers hold no end of turn."""
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
    made = tiny.tokenizer()
    return made.train_new_from_iterator([(peer.ROOT / "LICENSE").read_text()], VOCAB)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _made(home: Path, stamp: str) -> bool:
    return (home / STAMP).is_file() and (home / STAMP).read_text() == stamp


@contextlib.contextmanager
def _whole(home: Path, stamp: str, empty: bool = True):
    """A folder that takes the place of ``home`` when the block has ended well."""
    folder = home.with_name(home.name + ".unfinished")
    shutil.rmtree(folder, ignore_errors=True)
    if empty:
        folder.mkdir(parents=True)
    yield folder
    (folder / STAMP).write_text(stamp)
    shutil.rmtree(home, ignore_errors=True)
    folder.rename(home)
