"""A converted head, run by the destination library's own class, gives the source's logits.

The source is a head of ours, every weight random, on random states; each library's class is shown the same
states.  ``.venv-*`` come from ``make peers``.
"""

import itertools

import peer
import pytest
import torch
from safetensors.torch import load_file, save_file

from capture_hooks.capture import find_anatomy
from capture_hooks.heads import make_witness, readout_of, save_head
from capture_hooks.heads.formats import Target, convert_head
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny

LAYERS, ROWS = 8, 12
SEQUENCES = [[(7 * i * i + 3 * i + s) % 250 for i in range(20)] for s in range(4)]
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e4}
#: A head's inputs, settings, draft vocabulary, and the libraries whose class can compute it.
HEADS = {
    "plain": ("post.1, post.3, post.5", {}, 40, ("eagle", "modelopt", "speculators")),
    "shuffled": ("post.5, post.1, post.3", {}, 40, ("eagle", "modelopt", "speculators")),
    "grouped": ("post.1, post.3, post.5", {"heads": 4, "kv_heads": 2, "head_dim": 10}, 40,
                ("eagle", "modelopt", "speculators")),
    "whole": ("post.1, post.3, post.5", {}, None, ("eagle", "modelopt", "speculators")),
    "scaled": ("post.1, post.3, post.5", {"rope": LINEAR}, 40, ("eagle", "modelopt", "speculators")),
    "two": ("post.1, post.4", {}, 40, ("modelopt", "speculators")),
    "deep": ("post.1, post.3, post.5", {"layers": 2}, 40, ("modelopt", "speculators")),
    "each": ("post.5, post.1, post.3", {"fc_norm": True}, 40, ("eagle", "speculators")),
    "all": ("post.5, post.1, post.3", {"norm_before_fc": True}, 40, ("speculators",)),
    "residual": ("post.1, post.3, post.5", {"norm_before_residual": True}, 40, ("speculators",)),
    "output": ("post.1, post.3, post.5", {"norm_output": True}, 40, ("speculators",)),
    "embedding": ("post.1, post.3, post.5", {"train_embedding": True}, 40, ("eagle", "speculators")),
}  # fmt: skip
ENVIRONMENT = {"eagle": "specforge", "modelopt": "modelopt", "speculators": "speculators"}
WRITTEN_FOR = {"eagle": "sglang", "modelopt": "modelopt", "speculators": None, "capture-hooks": None}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    model = tiny.llama(num_hidden_layers=LAYERS)
    place = tmp_path_factory.mktemp("target")
    model.save_pretrained(place)
    return model, Target.of_config(model.config, str(place))


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


def logits(head, states, ids):
    with torch.no_grad():
        return head.logits(head.extend(head.new_cache(ROWS), states, ids, 0))


@pytest.fixture(scope="module")
def converted(target, tmp_path_factory):
    """Every head in every layout by every way there, and what ours computes."""
    model, about = target
    root = tmp_path_factory.mktemp("heads")
    generator = torch.Generator().manual_seed(5)
    table = find_anatomy(model).embedding.weight.detach()
    wanted, jobs = {}, {}
    for name, (text, settings, draft, layouts) in HEADS.items():
        spec = CaptureSpec.parse(text)
        head = make_head(model, spec, draft, settings)
        states = torch.randn(ROWS, len(spec) * table.shape[1], generator=generator)
        ids = torch.randint(len(table), (ROWS,), generator=generator)
        wanted[name] = logits(head, states, ids)
        source = root / f"{name}-ours"
        save_head(head, source, model=model, witness=make_witness(model, spec, SEQUENCES))
        # The file's order is by depth; so is a server's.
        depth = sorted(range(len(spec)), key=lambda i: spec.inputs[i].layer)
        packed = torch.cat([states.chunk(len(spec), -1)[i] for i in depth], -1)
        shown = root / f"{name}.safetensors"
        save_file({"states": packed, "next_ids": ids, "embedding": table.clone()}, shown)
        for layout in layouts:
            place = root / f"{name}-{layout}"
            convert_head(source, place, to=layout, target=about)
            jobs.setdefault(layout, {})[name, "capture-hooks"] = (place, shown)
        for first, second in itertools.permutations(layouts, 2):
            place = root / f"{name}-{first}-{second}"
            convert_head(
                root / f"{name}-{first}", place, to=second, target=about, written_for=WRITTEN_FOR[first]
            )
            jobs[second][name, first] = (place, shown)
    return wanted, jobs, root


@pytest.mark.parametrize("layout", ENVIRONMENT)
def test_the_librarys_own_class_gives_the_sources_logits(converted, layout):
    wanted, jobs, root = converted
    out = {key: root / f"{layout}-{'-'.join(key)}.out" for key in jobs[layout]}
    words = [str(w) for key, (place, shown) in jobs[layout].items() for w in (place, shown, out[key])]
    peer.run(ENVIRONMENT[layout], f"forward_{ENVIRONMENT[layout]}", *words)
    for (name, source), file in out.items():
        found, ours = load_file(file)["logits"], wanted[name]
        error = float((found - ours).abs().max() / ours.abs().max())
        assert error <= 1e-5, f"{name} from {source}: {error:.2g}"


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
    wanted, errors = logits(head, states, ids), {}
    for once in ("", "1"):
        monkeypatch.setenv("ONCE", once)
        out = tmp_path / f"out{once}"
        peer.run(
            "modelopt",
            "forward_modelopt",
            str(tmp_path / "modelopt"),
            str(tmp_path / "s.safetensors"),
            str(out),
        )
        found = load_file(out)["logits"]
        errors[once] = float((found - wanted).abs().max() / wanted.abs().max())
    assert errors["1"] <= 1e-5
    assert errors[""] > 1e-2
