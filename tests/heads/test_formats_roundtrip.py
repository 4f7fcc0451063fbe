"""Every layout to every other and back: the same bits, the same meaning."""

import dataclasses
import itertools
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from capture_hooks.capture import find_anatomy
from capture_hooks.conventions import BUILTIN
from capture_hooks.errors import HeadError
from capture_hooks.heads import load_head
from capture_hooks.interop.heads import FORMATS, TargetShape, convert_head, open_head
from capture_hooks.interop.heads.draft import Draft, by_depth, reordered
from capture_hooks.interop.heads.ours import write_ours
from capture_hooks.interop.heads.settle import settle
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec, Point

LAYERS, HIDDEN = 8, 32
WRITE = {one.name: one.write for one in FORMATS}
LAYOUTS = ("capture-hooks", *WRITE)
#: By which convention each layout's ids are read back.
WRITTEN_FOR = {"eagle": "sglang", "modelopt": "modelopt", "speculators": None, "capture-hooks": None}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def drafts(draw, vocabulary, target):
    """A head in the neutral form, with random bits everywhere."""
    schema = registry().heads["eagle3"].schema
    boundaries = draw(st.lists(st.integers(1, LAYERS - 1), min_size=1, max_size=4, unique=True))
    many = len(boundaries) > 1
    spec = CaptureSpec(tuple(Point.post(k - 1) for k in boundaries))
    before = draw(st.sampled_from(["none", "all", "each"])) if many else "none"
    computes = {
        "norm_before_residual": draw(st.booleans()),
        "norm_before_fc": before == "all",
        "fc_norm": before == "each",
        "norm_output": draw(st.booleans()),
        "norm_before_lm_head": True,
    }
    kv_heads, groups = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    size = draw(st.one_of(st.just(vocabulary), st.integers(1, vocabulary - 1)))
    fields = {
        "hidden_size": HIDDEN,
        "intermediate_size": draw(st.sampled_from([8, 24])),
        "num_hidden_layers": draw(st.sampled_from([1, 1, 3])),
        "num_attention_heads": kv_heads * groups,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([4, 10])),
        "hidden_act": "silu",
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "max_position_embeddings": 512,
        "vocab_size": vocabulary,
        "attention_bias": False,
        "mlp_bias": False,
        "model_type": "llama",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "rope_parameters": draw(
            st.sampled_from(
                [
                    {"rope_type": "default", "rope_theta": 10000.0},
                    {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
                ]
            )
        ),
        "draft_vocab_size": size,
        "target_hidden_size": HIDDEN,
    }
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(DTYPES))
    tensors = {}
    for name, shape in schema.shapes({**fields, **computes}, len(spec)).items():
        tensors[name] = torch.randn(shape, generator=generator).to(dtype)
    # Nothing ties a head's tensors to one type: norms are often kept in float32.
    if draw(st.booleans()):
        tensors |= {name: t.float() for name, t in tensors.items() if "norm" in name}
    if not many:
        tensors["fc.weight"] = torch.eye(HIDDEN, dtype=dtype)
    if draw(st.booleans()):
        del tensors["embed_tokens.weight"]
    del tensors["d2t"]
    if size < vocabulary:
        ids = torch.randperm(vocabulary, generator=generator)[:size].sort().values
        # Zeros alone are the first tokens, or a map that was never written: only a t2d could tell.
        if int(ids[-1]) == size - 1:
            ids[-1] = vocabulary - 1
        tensors["d2t"] = ids - torch.arange(size)
    return Draft("eagle3", schema, spec, target, computes, fields, {}, {}, {}, tensors, False, (), (), {})


@pytest.fixture(scope="module")
def about(target):
    return TargetShape.of_anatomy(find_anatomy(target))


def write(draft, layout, place, model):
    if layout == "capture-hooks":
        write_ours(draft, model, None, place, {}, False, BUILTIN)
        return
    written = WRITE[layout](draft, False, BUILTIN)
    assert written.losses == ()
    place.mkdir()
    save_file({name: tensor.clone() for name, tensor in written.tensors.items()}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(written.config))


def bits(place):
    found = load_file(place / "model.safetensors")
    return {
        name: (t.dtype, tuple(t.shape), t.contiguous().view(torch.uint8).tolist())
        for name, t in found.items()
    }


def read(place, layout, target):
    return settle(open_head(place), target, WRITTEN_FOR[layout])


def meaning(draft):
    """What a head computes and eats, without what only one layout says."""
    states = draft.spec.resolve(LAYERS).inputs
    return states, draft.computes, {k: v for k, v in draft.fields.items() if k not in TOKENS}


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(LAYOUTS, 2)])
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_there_and_back_gives_the_same_bits_and_the_same_meaning(first, second, target, about, data):
    draft = by_depth(data.draw(drafts(about.vocab_size, about)))
    with tempfile.TemporaryDirectory() as folder:
        start, there, back = (Path(folder) / name for name in ("start", "there", "back"))
        write(draft, first, start, target)
        options = {"target": about, "model": target}
        convert_head(start, there, to=second, written_for=WRITTEN_FOR[first], **options)
        convert_head(there, back, to=first, written_for=WRITTEN_FOR[second], **options)
        assert bits(back) == bits(start)
        assert meaning(read(back, first, about)) == meaning(read(start, first, about)) == meaning(draft)
        assert meaning(read(there, second, about)) == meaning(draft)


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_inputs_in_any_order_reach_every_layout_by_depth(target, about, data):
    """The user says the order of ``fc``'s columns; the file has them by depth, and its ids say so."""
    draft = by_depth(data.draw(drafts(about.vocab_size, about)))
    order = data.draw(st.permutations(range(len(draft.points))))
    shuffled = reordered(draft, order)
    layout = data.draw(st.sampled_from([*WRITE]))
    with tempfile.TemporaryDirectory() as folder:
        start, there = Path(folder) / "start", Path(folder) / "there"
        write(dataclasses.replace(shuffled, spec=draft.spec), "eagle", start, target)
        config = json.loads((start / "config.json").read_text())
        for holder in (config, config["eagle_config"]):
            del holder["eagle_aux_hidden_state_layer_ids"]
        del config["capture_hooks_conversion"]
        (start / "config.json").write_text(json.dumps(config))
        done = convert_head(start, there, to=layout, target=about, spec=shuffled.spec)
        assert done.spec == draft.spec
        assert done.moved == (list(order) != sorted(order))
        found = read(there, layout, about)
        assert found.spec.resolve(LAYERS) == draft.spec.resolve(LAYERS)
        for name, tensor in draft.tensors.items():
            assert torch.equal(found.tensors[name], tensor), name


@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_a_head_moved_to_ours_computes_what_it_is_told(target, about, data):
    """Loading it checks order, ids, map, fingerprint and witness."""
    draft = by_depth(data.draw(drafts(about.vocab_size, about)))
    with tempfile.TemporaryDirectory() as folder:
        start, there = Path(folder) / "start", Path(folder) / "there"
        write(draft, "speculators", start, target)
        convert_head(start, there, to="capture-hooks", model=target)
        head = load_head(there, target, formats=FORMATS)
        assert head.spec.resolve(LAYERS) == draft.spec.resolve(LAYERS)
        assert len(head.draft_token_ids) == draft.fields["draft_vocab_size"]


def test_our_layout_to_itself_is_nothing_to_do(target, about, make_head, witness_of, tmp_path):
    from capture_hooks.heads import save_head

    spec = CaptureSpec.parse("post.1, post.3, post.5")
    save_head(make_head(target, spec), tmp_path / "a", model=target, witness=witness_of(target, spec))
    with pytest.raises(HeadError, match="has that layout already"):
        convert_head(tmp_path / "a", tmp_path / "b", to="capture-hooks", model=target)
    with pytest.raises(HeadError, match="is the source itself"):
        convert_head(tmp_path / "a", tmp_path / "a", to="eagle")
    with pytest.raises(HeadError, match="no layout of heads is called 'gguf'"):
        convert_head(tmp_path / "a", tmp_path / "b", to="gguf")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(HeadError, match="loop"):
        convert_head(tmp_path / "a", tmp_path / "loop", to="eagle")
    assert not (tmp_path / "b").exists()
