"""Files that are damaged, malformed or meant to harm: one error naming the file, nothing run, none left."""

import gzip
import io
import os
import pickle
import struct
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from capture_hooks import CaptureSpec
from capture_hooks.errors import CaptureHooksError, StoreError
from capture_hooks.interop.dumps import Declared, convert_dump, describe
from capture_hooks.testing import tiny

HIDDEN, VOCAB = tiny.HIDDEN, tiny.VOCAB
SPEC = CaptureSpec.parse("post.0, post.1, post.2")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    place = tmp_path_factory.mktemp("target")
    tiny.llama(num_hidden_layers=4).save_pretrained(place)
    return str(place)


def features(tokens=5, **changes):
    """What SpecForge writes."""
    random = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.arange(tokens),
        "loss_mask": torch.ones(tokens, dtype=torch.long),
        "hidden_state": torch.randn(1, tokens, HIDDEN, generator=random),
        "aux_hidden_state": torch.randn(1, tokens, 3 * HIDDEN, generator=random),
    } | changes


def saved(directory, content, name="data_1.ckpt"):
    directory.mkdir(exist_ok=True)
    torch.save(content, directory / name)
    return directory / name


def refused(directory, target, message, path=None, to="capture-hooks", **more):
    """The one error; nothing is left of the destination."""
    stated = {"spec": SPEC, "target": target, "pickles": True} | more
    out = directory.with_name("out")
    with pytest.raises(StoreError, match=message) as caught:
        convert_dump(directory, out, to=to, declared=Declared(**stated))
    assert "\n" not in str(caught.value)
    if path is not None:
        assert str(path) in str(caught.value)
    assert not out.exists()
    assert not out.with_name("out.unfinished").exists()


def repacked(path, change):
    """Rewrite a file's zip with some entries changed: name -> bytes, or None for a compressed copy."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            new = change(name, content)
            archive.writestr(
                name, content if new is None else new, zipfile.ZIP_DEFLATED if new is None else 0
            )


class Harm:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


# -- pickles ----------------------------------------------------------------------------------------------


def test_no_pickle_is_opened_unasked(tmp_path, target):
    path = saved(tmp_path / "d", features(extra=Harm(tmp_path / "harm")))
    refused(path.parent, target, "pickles, which are opened only on request", pickles=False)
    assert "pickles" in dict(describe(path.parent).silent)["what its files hold"]
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["data_1.ckpt", "data_1.ckpt.gz", "1.pt"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_runs_something_is_named_and_not_run(tmp_path, target, name, protocol):
    directory = tmp_path / "d"
    directory.mkdir()
    content = io.BytesIO()
    harmful = features(
        extra=Harm(tmp_path / "harm"), hidden_states=torch.zeros(1), aux_hidden_states=torch.zeros(1)
    )
    torch.save(harmful, content, pickle_protocol=protocol)
    bytes_ = content.getvalue()
    (directory / name).write_bytes(gzip.compress(bytes_) if name.endswith("gz") else bytes_)
    message = r"names (posix|nt)\.system" if protocol == 2 else "makes objects"
    refused(directory, target, message, directory / name)
    assert not (tmp_path / "harm").exists()


def test_a_plain_pickle_is_not_even_looked_into(tmp_path, target):
    directory = tmp_path / "d"
    directory.mkdir()
    (directory / "data_1.ckpt").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    refused(directory, target, "was not written by torch.save in torch 1.6", directory / "data_1.ckpt")
    torch.save(features(), directory / "data_1.ckpt", _use_new_zipfile_serialization=False)
    refused(directory, target, "was not written by torch.save in torch 1.6", directory / "data_1.ckpt")
    assert not (tmp_path / "harm").exists()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(["data_1.ckpt", "data_1.ckpt.gz"]))
def test_a_truncated_file_is_refused(tmp_path_factory, target, data, name):
    directory = tmp_path_factory.mktemp("hostile") / "d"
    content = io.BytesIO()
    torch.save(features(), content)
    whole = content.getvalue() if name.endswith("t") else gzip.compress(content.getvalue(), mtime=0)
    directory.mkdir()
    (directory / name).write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    refused(directory, target, "is damaged", directory / name)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_are_read_as_states_or_refused_in_one_line(tmp_path_factory, target, data):
    place = tmp_path_factory.mktemp("hostile")
    path = saved(place / "d", features())
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    message = ""
    try:
        convert_dump(
            path.parent, place / "out", to="modelopt", declared=Declared(pickles=True, last="normed")
        )
    except CaptureHooksError as error:
        message = str(error)
    assert (place / "out").exists() != (str(path) in message)


def test_a_compressed_entry_is_refused(tmp_path, target):
    path = saved(tmp_path / "d", features(hidden_state=torch.zeros(1, 5, HIDDEN)))
    repacked(path, lambda name, content: None if "/data/" in name else content)
    refused(path.parent, target, "compressed entries", path)


def test_a_gzip_bomb_is_refused_before_it_fills_memory(tmp_path, target):
    directory = tmp_path / "d"
    directory.mkdir()
    with gzip.open(directory / "data_1.ckpt.gz", "wb", 9) as file:
        for _ in range(80):
            file.write(bytes(2**20))
    refused(directory, target, "unpacks to more than 20 times its size", directory / "data_1.ckpt.gz")


def test_keys_and_numbers_that_are_not_carried_over_are_named(tmp_path, target):
    for number in (1, 2, 5):
        saved(
            tmp_path / "d",
            features(**({} if number == 1 else {"surprise": torch.ones(3)})),
            f"data_{number}.ckpt",
        )
    declared = Declared(spec=SPEC, target=target, pickles=True)
    done = convert_dump(tmp_path / "d", tmp_path / "ours", to="capture-hooks", declared=declared)
    extra = f"'surprise', first in {tmp_path / 'd' / 'data_2.ckpt'}"
    assert [note for note in done.notes if "surprise" in note] == [
        f"left out, for the format has no such key: {extra}"
    ]
    gap = "numbered 1 to 5, and 2 of the numbers are missing, the first 3"
    assert len([note for note in done.notes if gap in note]) == 1
    os.remove(tmp_path / "d" / "data_1.ckpt")
    os.rename(tmp_path / "d" / "data_5.ckpt", tmp_path / "d" / "data_3.ckpt")
    done = convert_dump(tmp_path / "d", tmp_path / "again", to="capture-hooks", declared=declared)
    assert not any("missing" in note for note in done.notes)


@pytest.mark.parametrize("name", ["manifest.json", "data.ckpt", "data.ckpt.gz", "0.pt", "0.safetensors"])
def test_a_pipe_is_never_opened(tmp_path, name):
    """Not while the format is recognised either: opening it would wait for ever."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(StoreError, match=r"is no regular file|is of no known format"):
        describe(tmp_path, pickles=True)


def test_a_pipe_or_a_device_among_the_files_is_refused(tmp_path, target):
    path = saved(tmp_path / "d", features())
    (path.parent / "zeros.ckpt").symlink_to("/dev/zero")
    refused(path.parent, target, "is no regular file", path.parent / "zeros.ckpt")


def test_a_tensor_that_claims_more_than_the_file_holds_is_refused(tmp_path, target):
    huge = torch.zeros(1).expand(1, 5, 2**40)
    path = saved(tmp_path / "d", features(aux_hidden_state=huge))
    refused(path.parent, target, "more than the file holds", path)


def test_a_pickle_of_a_million_strings_is_refused(tmp_path, target):
    path = saved(tmp_path / "d", features(extra=[str(number) for number in range(300_000)]))
    refused(path.parent, target, "its pickle has .* bytes", path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_state": torch.randn(1, 4, HIDDEN)}, r"hidden_state is \(1, 5, any\)"),
        ({"hidden_state": torch.randn(5, HIDDEN)}, r"hidden_state is \(1, 5, any\)"),
        ({"hidden_state": torch.randn(1, 5, 0)}, r"hidden_state is \(1, 5, any\)"),
        ({"hidden_state": torch.ones(1, 5, HIDDEN, dtype=torch.int64)}, "of torch.int64"),
        ({"hidden_state": torch.randn(1, 5, HIDDEN).to(torch.float8_e4m3fn)}, "of torch.float8_e4m3fn"),
        ({"hidden_state": torch.randn(1, 5, HIDDEN).to_sparse()}, "names torch.*sparse"),
        ({"hidden_state": torch.randn(1, 5, HIDDEN // 2)}, "another target"),
        ({"aux_hidden_state": torch.randn(1, 5, 2 * HIDDEN)}, "names 3 points"),
        (
            {"aux_hidden_state": torch.randn(1, 5, 3 * HIDDEN).bfloat16()},
            "holds inputs of torch.bfloat16 and a last hidden state of torch.float32",
        ),
        ({"input_ids": torch.arange(5).float()}, r"token ids are \[T\] integers"),
        ({"input_ids": torch.arange(5)[None]}, r"token ids are \[T\] integers"),
        ({"input_ids": torch.arange(0), "loss_mask": torch.ones(0)}, r"token ids are \[T\] integers"),
        ({"input_ids": torch.tensor([1, 2, 3, 4, VOCAB])}, rf"from 1 to {VOCAB} do not fit a vocabulary"),
        ({"input_ids": torch.tensor([1, 2, 3, 4, -100])}, "from -100 to 4 do not fit"),
        ({"input_ids": [1, 2, 3, 4, 5]}, "has a list as 'input_ids'"),
        ({"loss_mask": torch.ones(4)}, r"is \(5,\) of 0 and 1"),
        ({"loss_mask": torch.full((5,), 2)}, "values up to 2"),
        ({"loss_mask": None}, "has no 'loss_mask'"),
        ({"aux_hidden_state": torch.full((1, 5, 3 * HIDDEN), float("nan"))}, "holds nan at token 0"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, target, changes, message):
    saved(tmp_path / "d", features(), "data_0.ckpt")
    path = saved(tmp_path / "d", features(**changes))
    if "another" in message or "names 3" in message:
        torch.save(features(**changes), path.with_name("data_0.ckpt"))
        path = None
    if "nan" in message:
        stated = Declared(spec=SPEC, target=target, pickles=True)
        with pytest.raises(StoreError, match=message):
            convert_dump(tmp_path / "d", tmp_path / "out", to="capture-hooks", declared=stated)
        assert not list((tmp_path / "out").glob("*.safetensors*"))
        return
    refused(tmp_path / "d", target, message, path)


def test_files_of_two_kinds_are_refused(tmp_path, target):
    saved(tmp_path / "d", features(), "data_0.ckpt")
    half = features(hidden_state=torch.randn(1, 5, HIDDEN).half())
    path = saved(tmp_path / "d", half | {"aux_hidden_state": torch.randn(1, 5, 3 * HIDDEN).half()})
    refused(tmp_path / "d", target, "one dump has one kind", path)


def test_a_dflash_file_is_said_to_be_one(tmp_path, target):
    content = {"input_ids": torch.arange(5), "loss_mask": torch.ones(5), "hidden_states": torch.randn(5, 48)}
    path = saved(tmp_path / "d", content)
    refused(path.parent, target, "is a DFlash feature file", path)


@pytest.mark.parametrize("layers", [torch.randn(4, 5, HIDDEN), [torch.randn(5, HIDDEN)], ["a", "b"]])
def test_speculators_layers_are_a_list_of_tensors(tmp_path, target, layers):
    content = {"input_ids": torch.arange(5), "loss_mask": torch.ones(5), "hidden_states": layers}
    path = saved(tmp_path / "d", content, "data_1.pt")
    refused(path.parent, target, "'hidden_states' is a list of", path)


def test_norm_bits_that_differ_are_refused(tmp_path, target):
    for number, bit in enumerate([True, False]):
        content = {
            "input_ids": torch.arange(5),
            "loss_mask": torch.ones(5),
            "hidden_states": torch.randn(5, HIDDEN),
            "aux_hidden_states": torch.randn(5, 3 * HIDDEN),
            "hidden_states_prenorm": bit,
        }
        path = saved(tmp_path / "d", content, f"{number}.pt")
    refused(path.parent, target, "calls its last hidden state normed", path)


# -- safetensors ------------------------------------------------------------------------------------------


def extracted(directory, tokens=5, name="a.safetensors", **changes):
    directory.mkdir(exist_ok=True)
    tensors = {"hidden_states": torch.randn(tokens, 4, HIDDEN), "token_ids": torch.arange(tokens)} | changes
    save_file(tensors, directory / name)
    return directory / name


@pytest.mark.parametrize("size", [2**63, 2**40, 50 * 2**20, 2**20 + 1])
def test_a_header_bomb_is_refused(tmp_path, target, size):
    path = extracted(tmp_path / "d")
    path.write_bytes(struct.pack("<Q", size) + b"{" + bytes(min(size, 2 * 2**20)))
    refused(path.parent, target, f"claims a header of {size} bytes", path, last="unnormed", masks="all")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_truncated_or_altered_file_of_extracted_states_is_read_or_refused(tmp_path_factory, target, data):
    place = tmp_path_factory.mktemp("hostile")
    path = extracted(place / "d")
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        whole[data.draw(st.integers(0, 200))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    message = ""
    try:
        convert_dump(
            path.parent, place / "out", to="speculators", declared=Declared(last="unnormed", masks="all")
        )
    except CaptureHooksError as error:
        message = str(error)
    assert (place / "out").exists() != (str(place / "d") in message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_states": torch.randn(4, 4, HIDDEN)}, r"hidden_states is \(5, any, any\)"),
        ({"hidden_states": torch.randn(5, HIDDEN)}, r"hidden_states is \(5, any, any\)"),
        ({"hidden_states": torch.randn(5, 1, HIDDEN)}, "holds one state a token"),
        ({"token_ids": torch.arange(5).float()}, r"token ids are \[T\] integers"),
        ({"token_ids": torch.arange(5) + VOCAB}, "do not fit a vocabulary"),
    ],
)
def test_malformed_extracted_states_are_named(tmp_path, target, changes, message):
    path = extracted(tmp_path / "d", **changes)
    refused(path.parent, target, message, path, last="unnormed", masks="all")


def test_rows_without_states_and_states_of_other_rows_are_refused(tmp_path, target):
    from capture_hooks.interop.dumps import FORMATS

    for name in "ab":
        extracted(tmp_path / "d", name=f"{name}.safetensors")
    convert_dump(
        tmp_path / "d", tmp_path / "s", to="speculators", declared=Declared(last="unnormed", masks="all")
    )
    states = tmp_path / "s" / "hidden_states"
    other = extracted(tmp_path / "o", token_ids=torch.arange(5) + 1)
    (states / "hs_1.safetensors").write_bytes(other.read_bytes())
    opened = FORMATS["speculators"].open(tmp_path / "s")
    with pytest.raises(StoreError, match=r"hs_1\.safetensors holds other tokens than row 1"):
        opened.rows(1)
    (states / "hs_1.safetensors").unlink()
    refused(tmp_path / "s", target, r"2 rows but no states for 1 of them, the first hidden_states/hs_1")


def test_a_malformed_datasets_directory_is_named(tmp_path, target):
    extracted(tmp_path / "d")
    convert_dump(
        tmp_path / "d", tmp_path / "s", to="speculators", declared=Declared(last="unnormed", masks="all")
    )
    arrow = next((tmp_path / "s").glob("*.arrow"))
    whole = arrow.read_bytes()
    for content in (b"", whole[: len(whole) // 2], bytes(len(whole))):
        arrow.write_bytes(content)
        refused(tmp_path / "s", target, "cannot be read as speculators' data", tmp_path / "s")
    arrow.write_bytes(whole)
    (tmp_path / "s" / "state.json").write_text("{")
    refused(tmp_path / "s", target, "cannot be read as speculators' data", tmp_path / "s")
