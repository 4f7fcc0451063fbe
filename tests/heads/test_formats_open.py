"""Opening heads: every layout's files, and files that only look like a head's."""

import json
import os
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from capture_hooks.errors import HeadError
from capture_hooks.interop.heads import HeadFlags, open_head
from capture_hooks.interop.heads.header import LONGEST, read_header
from capture_hooks.testing import tiny

CONFIG = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4, "rope_theta": 1e4}
TENSORS = {
    "midlayer.hidden_norm.weight": torch.arange(4.0),
    "fc.weight": torch.arange(48.0).view(4, 12),
    "d2t": torch.arange(3),
}


@pytest.fixture
def head(tmp_path):
    """Writes a head's directory from a config and tensors."""

    def head(config=CONFIG, tensors=TENSORS, name="model.safetensors"):
        (tmp_path / "config.json").write_text(json.dumps(config))
        if tensors:
            save_file({key: tensor.clone() for key, tensor in tensors.items()}, tmp_path / name)
        return tmp_path

    return head


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "a.safetensors"]
)
def test_what_is_no_regular_file_is_never_opened(head, name, kind):
    place = head(tensors=TENSORS if name == "config.json" else {})
    (place / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place / name)
    else:
        (place / name).symlink_to("/dev/zero")
    with pytest.raises(HeadError, match=f"{name} is no regular file"):
        open_head(place)


def header(document, data=b"", length=None):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.parametrize("name", ["model.safetensors", "adapter.safetensors"])
def test_one_file_of_any_name(head, name):
    raw = open_head(head(name=name))
    assert raw.layout == "eagle"
    assert raw.tensors["fc.weight"].shape == (4, 12)
    assert raw.names["fc.weight"].file.name == name
    assert all(torch.equal(tensor, TENSORS[key]) for key, tensor in raw.read().items())


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize(("theirs", "layout"), [("midlayer.", "eagle"), ("layers.0.", "modelopt")])
def test_names_are_brought_to_one_form(head, prefix, theirs, layout):
    tensors = {prefix + name.replace("midlayer.", theirs): tensor for name, tensor in TENSORS.items()}
    tensors |= {f"{prefix}aux_norm_{place}.weight": torch.ones(4) for place in ("low", "mid", "high")}
    tensors[f"{prefix}layers.1.input_layernorm.weight"] = torch.ones(4)
    raw = open_head(head(tensors=tensors))
    assert raw.layout == layout
    norms = {f"fc_norm.{index}.weight" for index in range(3)}
    assert set(raw.tensors) == {*TENSORS, *norms, "layers.1.input_layernorm.weight"}
    assert raw.names["fc_norm.1.weight"].name == f"{prefix}aux_norm_mid.weight"


def test_a_whole_model_is_no_head(tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    with pytest.raises(HeadError, match="it is no EAGLE-3 head"):
        open_head(tmp_path)


def test_two_names_of_one_tensor_are_refused(head):
    tensors = {**TENSORS, "layers.0.hidden_norm.weight": torch.ones(4)}
    with pytest.raises(HeadError, match=r"two tensors of one name, midlayer\.hidden_norm\.weight"):
        open_head(head(tensors=tensors))


def test_fields_flags_and_ids_come_from_wherever_a_library_keeps_them(head):
    nested = {"hidden_size": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": nested,
        "draft_vocab_size": 3,
        "norm_before_residual": True,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4],
        "dflash_config": {"target_layer_ids": "1,2"},
        "target_layer_ids": None,
    }
    raw = open_head(head(config, {name.replace("midlayer.", "layers.0."): t for name, t in TENSORS.items()}))
    assert raw.layout == "speculators"
    assert raw.fields["hidden_size"] == 8
    assert raw.fields["draft_vocab_size"] == 3
    assert raw.flags == HeadFlags(norm_before_residual=True, norm_output=False)
    assert raw.ids == {"eagle_aux_hidden_state_layer_ids": [2, 4], "dflash_config.target_layer_ids": "1,2"}
    assert raw.problems == ()


def test_specforges_norm_output_is_left_open(head):
    raw = open_head(head({**CONFIG, "norm_output": False, "fc_norm": True}))
    assert raw.flags == HeadFlags(fc_norm=True)
    assert raw.fields["norm_output"] is False
    assert open_head(head({**CONFIG, "eagle_config": {"norm_output": True}})).flags.norm_output is True


def test_what_cannot_be_is_kept_and_named(head):
    config = {
        **CONFIG,
        "hidden_size": "4",
        "rms_norm_eps": [1e-5],
        "norm_before_fc": "yes",
        "fc_norm": True,
        "use_aux_norm": False,
        "rope_scaling": 3,
        "eagle_config": [1],
        "eagle_aux_hidden_state_layer_ids": "1, 2, 3",
    }
    raw = open_head(head(config))
    assert raw.ids == {"eagle_aux_hidden_state_layer_ids": "1, 2, 3"}
    found = "; ".join(raw.problems)
    for words in (
        "hidden_size is '4'",
        "rms_norm_eps is [1e-05]",
        "norm_before_fc is 'yes'",
        "fc_norm is true and use_aux_norm is false",
        "rope_scaling is 3",
        "eagle_config is [1]",
    ):
        assert words in found


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16])
def test_small_floats_keep_their_bits(head, dtype):
    small = torch.randn(4, 12).to(dtype)
    found = open_head(head(tensors={**TENSORS, "fc.weight": small})).read()["fc.weight"]
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), small.view(torch.uint8))


def test_a_nan_is_named(head):
    bad = torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)
    with pytest.raises(HeadError, match=r"norm\.weight holds 1 NaN or infinite values of 2"):
        open_head(head(tensors={**TENSORS, "norm.weight": bad})).read()


# -- sharded checkpoints


def sharded(place, weight_map=None):
    names = list(TENSORS)
    files = {name: f"model-0000{index % 2 + 1}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: TENSORS[n].clone() for n in names if files[n] == file}, place / file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map or files}))
    return files


def test_shards_are_read_by_their_index(head):
    place = head(tensors=None)
    files = sharded(place)
    raw = open_head(place)
    assert {name: stored.file.name for name, stored in raw.names.items()} == files
    assert all(torch.equal(tensor, TENSORS[key]) for key, tensor in raw.read().items())


def test_what_a_shard_lacks_is_named(head):
    place = head(tensors=None)
    files = sharded(place)
    shard = files["fc.weight"]
    sharded(place, {**files, "norm.weight": shard})
    with pytest.raises(HeadError, match=rf"says that norm\.weight lies in {shard}, which lacks it"):
        open_head(place)
    sharded(place, {name: file for name, file in files.items() if name != "d2t"})
    with pytest.raises(HeadError, match=r"holds d2t, which .* does not list there"):
        open_head(place)
    sharded(place, {**files, "norm.weight": "../other.safetensors"})
    with pytest.raises(HeadError, match="a shard is a safetensors file in the same directory"):
        open_head(place)
    sharded(place)
    (place / shard).unlink()
    with pytest.raises(HeadError, match=rf"names {shard}, which is missing"):
        open_head(place)
    (place / "model.safetensors.index.json").unlink()
    save_file({"a": torch.ones(1)}, place / "b.safetensors")
    with pytest.raises(HeadError, match=r"holds 2 safetensors files .* a shard's index was not copied"):
        open_head(place)


@pytest.mark.parametrize("text", ["[", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_a_bad_index_is_named(head, text):
    place = head(tensors=None)
    (place / "model.safetensors.index.json").write_text(text)
    with pytest.raises(HeadError, match=r"model\.safetensors\.index\.json (is not JSON|has no weight_map)"):
        open_head(place)


def test_pickles_are_refused_with_what_to_do(head):
    place = head(tensors=None)
    (place / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(
        HeadError, match=r"but pytorch_model\.bin; pickles are opened only on request \(--pickles\)"
    ):
        open_head(place)


# -- files that only look like a head's


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[" * 100_000, "is not JSON"),
        ('{"a": ' * 100_000, "is not JSON"),
        ("[]", "holds a JSON list; a head's config is an object"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON"),
        ("3", "holds a JSON int"),
        ('{"capture": 3}', "capture is 3; it must be an object"),
    ],
)
def test_configs_that_are_none(head, config, words):
    place = head()
    (place / "config.json").write_text(config)
    with pytest.raises(HeadError, match=words):
        open_head(place)


def test_a_config_of_megabytes_is_not_read(head):
    place = head()
    (place / "config.json").write_text('{"a": "' + "x" * (5 << 20) + '"}')
    with pytest.raises(HeadError, match=r"has \d+ bytes; a head's config stays under"):
        open_head(place)


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
TWICE = header(b'{"a": %s, "a": %s}' % ((json.dumps(ENTRY).encode(),) * 2), b"1234")
TRUNCATED = header({"a": {**ENTRY, "shape": [2], "data_offsets": [0, 8]}}, b"1234")
DAMAGED = {
    "empty": (b"", "too few for a safetensors file"),
    "bomb": (header({}, length=2**62), "declares a header of 4611686018427387904 bytes"),
    "longer than the file": (header({"a": ENTRY}, length=4096), "it is truncated, or no safetensors file"),
    "no json": (header(b"{{{{"), "is not JSON"),
    "not utf-8": (header(b'{"\xff": 1}'), "is not JSON"),
    "deep": (header(b"[" * 500_000), "is not JSON"),
    "a list": (header([]), "is a JSON list"),
    "twice": (TWICE, "names 'a' twice"),
    "no entry": (header({"a": 3}), "entry of 'a' is 3"),
    "no dtype": (header({"a": {**ENTRY, "dtype": "F33"}}, b"1234"), "dtype 'F33'"),
    "dtype of another type": (header({"a": {**ENTRY, "dtype": {}}}, b"1234"), "dtype '{}'"),
    "shape bomb": (header({"a": {**ENTRY, "shape": [2**62, 2**62]}}, b"1234"), "and has 4 bytes of data"),
    "negative": (header({"a": {**ENTRY, "shape": [-1]}}, b"1234"), "has the shape"),
    "float": (header({"a": {**ENTRY, "shape": [1.0]}}, b"1234"), "has the shape"),
    "bool": (header({"a": {**ENTRY, "shape": [True]}}, b"1234"), "has the shape"),
    "backwards": (header({"a": {**ENTRY, "data_offsets": [4, 0]}}, b"1234"), "-4 bytes of data"),
    "far": (header({"a": {**ENTRY, "data_offsets": [2**40, 2**40 + 4]}}, b"1234"), "begins at byte"),
    "overlap": (header({"a": ENTRY, "b": ENTRY}, b"1234"), "begins at byte 0, and byte 4 comes next"),
    "truncated": (TRUNCATED, "end at byte 8 of 4"),
    "more data": (header({"a": ENTRY}, b"12345"), "end at byte 4 of 5"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_headers_that_cannot_be(head, name):
    data, words = DAMAGED[name]
    place = head()
    (place / "model.safetensors").write_bytes(data)
    with pytest.raises(HeadError) as caught:
        open_head(place)
    assert words in str(caught.value)
    assert str(place / "model.safetensors") in str(caught.value)


def test_a_header_of_a_hundred_megabytes_is_not_read(head):
    """A sparse file: nothing of it is in memory before the refusal."""
    place = head()
    with (place / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 100 << 20))
        file.truncate((100 << 20) + 8)
    with pytest.raises(HeadError, match=rf"header of {100 << 20} bytes, and .* under {LONGEST}"):
        open_head(place)


@settings(deadline=None)
@given(data=st.data())
def test_reading_a_header_is_total(tmp_path_factory, data):
    """Whatever the bytes, there is an answer or a named refusal; what it accepts, safetensors accepts."""
    from safetensors import safe_open

    path = tmp_path_factory.mktemp("header") / "model.safetensors"
    good = {"midlayer.a": torch.ones(2, 3), "d2t": torch.arange(3)}
    save_file(good, path)
    text = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(text) - 1, 200)))
        text[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(text))))
    path.write_bytes(bytes(text[:cut]))
    try:
        found = read_header(path)
    except HeadError:
        return
    with safe_open(path, framework="pt") as file:
        assert {name: list(info.shape) for name, info in found.items()} == {
            name: file.get_slice(name).get_shape()
            for name in file.keys()  # noqa: SIM118
        }
