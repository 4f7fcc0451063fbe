"""A converted head, run by the destination library's own class, gives the source's logits.

The source is a head of ours, every weight random, on random states; each library's and
each engine's class is shown the same states.  ``.venv-*`` come from ``make peers`` and ``make sglang``.
"""

import peer
import pytest
import torch
from safetensors.torch import load_file, save_file

from capture_hooks.capture import find_anatomy
from capture_hooks.heads import make_witness, readout_of, save_head
from capture_hooks.interop.heads import TargetShape, convert_head
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny

LAYERS, ROWS = 8, 12
SEQUENCES = [[(7 * i * i + 3 * i + s) % 250 for i in range(20)] for s in range(4)]
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e4}
SERVERS = ("sglang", "vllm")
EVERYONE = ("specforge", "modelopt", "speculators", *SERVERS)
ASCENDING, SHUFFLED = "post.1, post.3, post.5", "post.5, post.1, post.3"
#: A head's inputs, settings, draft vocabulary, and the libraries whose class can compute it.
HEADS = {
    "plain": (ASCENDING, {}, 40, EVERYONE),
    "shuffled": (SHUFFLED, {}, 40, EVERYONE),
    "grouped": (ASCENDING, {"heads": 4, "kv_heads": 2, "head_dim": 32}, 40, EVERYONE),
    "whole": (ASCENDING, {}, None, EVERYONE),
    "scaled": (ASCENDING, {"rope": LINEAR}, 40, EVERYONE),
    "two": ("post.1, post.4", {}, 40, ("modelopt", "speculators", *SERVERS)),
    "deep": (ASCENDING, {"layers": 2}, 40, ("modelopt", "speculators", *SERVERS)),
    "each": (SHUFFLED, {"fc_norm": True}, 40, ("specforge", "speculators", *SERVERS)),
    "all": (SHUFFLED, {"norm_before_fc": True}, 40, ("speculators", *SERVERS)),
    "residual": (ASCENDING, {"norm_before_residual": True}, 40, ("speculators", "vllm")),
    "output": (ASCENDING, {"norm_output": True}, 40, ("speculators", *SERVERS)),
    "embedding": (ASCENDING, {"train_embedding": True}, 40, ("specforge", "speculators", "vllm")),
}
#: The layouts that each library reads.
READS = {
    "specforge": ("eagle",),
    "modelopt": ("modelopt",),
    "speculators": ("speculators",),
    "sglang": ("capture-hooks", "eagle", "modelopt"),
    "vllm": ("capture-hooks", "eagle", "modelopt", "speculators"),
}
#: The library whose ids each layout holds, where that must be said.
WRITTEN_FOR = {"capture-hooks": None, "eagle": "sglang", "modelopt": "modelopt", "speculators": None}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    # Heads of 32, the fewest in vLLM's CPU attention, and as many as the drafts have, for SGLang's one cache.
    model = tiny.llama(
        num_hidden_layers=LAYERS, hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32
    )
    place = tmp_path_factory.mktemp("target")
    model.save_pretrained(place)
    tiny.tokenizer().save_pretrained(place)  # SGLang looks for one
    return model, TargetShape.of_config(model.config, str(place))


def make_head(model, spec, draft, settings):
    provider, anatomy = registry().heads["eagle3"], find_anatomy(model)
    ids = torch.arange(anatomy.vocab_size)
    if draft is not None:
        ids = ids[torch.randperm(len(ids), generator=torch.manual_seed(3))[:draft]].sort().values
    head = provider.create(provider.config_type(**settings), spec, anatomy, readout_of(anatomy, spec), ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        tiny.randomise(head)
        # Equal gains, so that ModelOpt's second norm of the same states changes nothing (see below).
        head.decoder_layers[0].input_layernorm.weight.data.fill_(0.7)
    return head.eval()


def outputs(head, states, ids):
    """``logits`` [T, D] of one step, ``token_ids`` [D] of its columns, and what is ``fed_back`` [T, H]."""
    with torch.no_grad():
        hidden = head.extend(head.new_cache(ROWS), states, ids, 0)
        return {"logits": head.logits(hidden), "token_ids": head.draft_token_ids, "fed_back": hidden}


@pytest.fixture(scope="module")
def converted(target, tmp_path_factory):
    """What each head of ours computes, where its inputs lie, and its conversions by (head, layout, from)."""
    model, about = target
    root = tmp_path_factory.mktemp("heads")
    generator = torch.Generator().manual_seed(5)
    table = find_anatomy(model).embedding.weight.detach()
    wanted, shown, made = {}, {}, {}
    for name, (text, settings, draft, _) in HEADS.items():
        spec = CaptureSpec.parse(text)
        head = make_head(model, spec, draft, settings)
        states = torch.randn(ROWS, len(spec) * table.shape[1], generator=generator)
        ids = torch.randint(len(table), (ROWS,), generator=generator)
        wanted[name] = outputs(head, states, ids)
        # The file's order is by depth; so is a server's.
        depth = sorted(range(len(spec)), key=lambda i: spec.inputs[i].layer)
        packed = torch.cat([states.chunk(len(spec), -1)[i] for i in depth], -1)
        shown[name] = root / f"{name}.safetensors"
        save_file({"states": packed, "next_ids": ids, "embedding": table.clone()}, shown[name])
        source = {"capture-hooks": root / f"{name}-ours"}
        save_head(head, source["capture-hooks"], model=model, witness=make_witness(model, spec, SEQUENCES))
        for first in WRITTEN_FOR:  # ours first: the others are made from it
            for second in WRITTEN_FOR:
                if first == second:
                    continue
                made[name, second, first] = convert_head(
                    source[first],
                    root / f"{name}-{first}-{second}",
                    to=second,
                    target=about,
                    model=model if second == "capture-hooks" else None,
                    written_for=WRITTEN_FOR[first],
                )
                source.setdefault(second, root / f"{name}-{first}-{second}")
    return wanted, shown, made


@pytest.mark.parametrize("library", READS)
def test_the_librarys_own_class_gives_the_sources_logits(target, converted, tmp_path, library):
    wanted, shown, made = converted
    words, asked = [target[1].name], {}
    for (name, layout, source), conversion in made.items():
        if layout in READS[library] and library in HEADS[name][3]:
            out = asked[name, layout, source] = tmp_path / f"{name}-{source}-{layout}"
            words += [str(conversion.destination), str(shown[name]), str(out)]
    peer.run(library, f"forward_{library}", *words)
    for (name, layout, source), file in asked.items():
        case, ours, theirs = f"{name} from {source} in {layout}", wanted[name], load_file(file)
        assert set(theirs) == (set(ours) if library in SERVERS else {"logits"}), case
        if library in SERVERS:
            assert torch.equal(theirs.pop("token_ids"), ours["token_ids"]), case
        for key, found in theirs.items():
            error = float((found - ours[key]).abs().max() / ours[key].abs().max())
            assert error <= 1e-5, f"{case}, {key}: {error:.2g}"


@pytest.mark.parametrize("engine", SERVERS)
def test_a_conversion_says_where_an_engine_would_compute_something_else(converted, engine):
    for (name, layout, source), conversion in converted[2].items():
        if layout in READS[engine]:
            said = any(note.startswith(f"{engine} ") and ": excluded" in note for note in conversion.notes)
            assert said == (engine not in HEADS[name][3]), f"{name} from {source} in {layout}"


def test_modelopts_second_norm_is_said_and_is_the_only_difference(target, tmp_path, monkeypatch):
    """Its training norms layer 0's states with ``input_layernorm`` first; no server and no layout does."""
    model, about = target
    spec = CaptureSpec.parse("post.1, post.3, post.5")
    head = make_head(model, spec, 40, {})
    gain = head.decoder_layers[0].input_layernorm.weight.data
    gain.copy_(1 + 0.3 * torch.randn(len(gain), generator=torch.Generator().manual_seed(2)))
    table = find_anatomy(model).embedding.weight.detach()
    states, ids = torch.randn(ROWS, 3 * table.shape[1]), torch.randint(len(table), (ROWS,))
    save_head(head, tmp_path / "ours", model=model, witness=make_witness(model, spec, SEQUENCES))
    save_file({"states": states, "next_ids": ids, "embedding": table.clone()}, tmp_path / "s.safetensors")
    convert_head(tmp_path / "ours", tmp_path / "modelopt", to="modelopt", target=about)
    back = convert_head(
        tmp_path / "modelopt", tmp_path / "eagle", to="eagle", target=about, written_for="modelopt"
    )
    assert any("trains with hidden_norm(input_layernorm(h))" in note for note in back.notes)
    wanted, errors = outputs(head, states, ids)["logits"], {}
    for once in ("", "1"):
        monkeypatch.setenv("ONCE", once)
        out = tmp_path / f"out{once}"
        peer.run(
            "modelopt",
            "forward_modelopt",
            about.name,
            str(tmp_path / "modelopt"),
            str(tmp_path / "s.safetensors"),
            str(out),
        )
        found = load_file(out)["logits"]
        errors[once] = float((found - wanted).abs().max() / wanted.abs().max())
    assert errors["1"] <= 1e-5
    assert errors[""] > 1e-2
