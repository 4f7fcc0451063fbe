"""Writing and reading dumps: exactness, damage, disagreement, and refusals by the system."""

import itertools
import json
import os
import pickle
import re
import resource
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from capture_hooks import CaptureSpec
from capture_hooks.capture.fingerprint import TargetFingerprint
from capture_hooks.errors import StoreError
from capture_hooks.store import Dump, Manifest, StoredSequence
from capture_hooks.store.dump import DumpWriter, plan_shards
from capture_hooks.store.manifest import Engine, Provenance

HIDDEN = 8
PRINT = TargetFingerprint(
    architecture="TinyForCausalLM",
    model_type="tiny",
    n_layers=6,
    hidden_size=HIDDEN,
    vocab_size=50,
    dtype="float32",
    structure="0" * 64,
    weights="1" * 64,
    weights_bf16="2" * 64,
    sample="",
)


def manifest(lengths, *, spec="post.1, post.3", dtype="float32", target_input=None, **changes):
    spec = CaptureSpec.parse(spec)
    fields = {
        "spec": spec,
        "widths": (HIDDEN,) * len(spec),
        "target_width": HIDDEN,
        "target_input": target_input,
        "target_normed": True,
        "fingerprint": PRINT,
        "dtype": dtype,
        "engine": Engine(name="test", version="1"),
        "data": Provenance(
            source="tokens.jsonl", digest="d" * 64, sequences=len(lengths), tokens=sum(lengths)
        ),
        "shard_tokens": 10,
        "batch_tokens": 10,
    }
    return Manifest(**(fields | changes))


def sequence(length, seed=0, inputs=2, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed * 1000 + length)
    return StoredSequence(
        states=torch.randn(length, inputs * HIDDEN, generator=random).to(dtype),
        target=torch.randn(length, HIDDEN, generator=random).to(dtype),
        token_ids=torch.randint(50, (length,), generator=random),
        loss_mask=torch.rand(length, generator=random) < 0.5,
        argmax=torch.randint(50, (length,), generator=random),
    )


def write(directory, sequences, **changes):
    lengths = [len(s) for s in sequences]
    with DumpWriter(directory, manifest(lengths, **changes)) as writer:
        for shard in plan_shards(lengths, 10)[len(writer.manifest.shards) :]:
            writer.write([sequences[i] for i in shard])
    return Path(directory)


def assert_same(read, wrote):
    for name in ("states", "target", "token_ids", "loss_mask", "argmax"):
        ours, theirs = getattr(read, name), getattr(wrote, name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name


def contents(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=8),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_what_is_written_is_read(tmp_path_factory, lengths, dtype):
    sequences = [sequence(length, i, dtype=getattr(torch, dtype)) for i, length in enumerate(lengths)]
    directory = write(tmp_path_factory.mktemp("dump") / "d", sequences, dtype=dtype)
    dump = Dump.open(directory, verify=True)
    assert len(dump) == len(lengths)
    assert dump.lengths == dump.manifest.lengths == tuple(lengths)
    assert dump.manifest.tokens == sum(lengths)
    for read, wrote in zip(dump, sequences, strict=True):
        assert_same(read, wrote)
    assert_same(dump[-1], sequences[-1])
    wanted = torch.cat([s.token_ids[s.loss_mask] for s in sequences]).tolist()
    assert dump.token_counts(50).tolist() == [wanted.count(i) for i in range(50)]


@given(lengths=st.lists(st.integers(1, 30), max_size=30), most=st.integers(1, 40))
def test_shards_partition_the_sequences_in_order(lengths, most):
    shards = plan_shards(lengths, most)
    assert [i for shard in shards for i in shard] == list(range(len(lengths)))
    for shard in shards:
        assert len(shard) == 1 or sum(lengths[i] for i in shard) <= most
    for shard, following in pairwise(shards):
        assert sum(lengths[i] for i in shard) + lengths[following[0]] > most


def test_a_shard_is_an_ordinary_safetensors_file(tmp_path):
    only = sequence(7)
    directory = write(tmp_path / "d", [only])
    tensors = load_file(directory / "shard-00000.safetensors")
    assert torch.equal(tensors["states"], only.states)
    assert tensors["starts"].tolist() == [0, 7]


def test_a_target_that_is_an_input_is_stored_once(tmp_path):
    only = sequence(5)
    spec = "post.1, post.3 -> post.3"
    directory = write(tmp_path / "d", [only], spec=spec, target_input=1)
    assert "target" not in load_file(directory / "shard-00000.safetensors")
    assert torch.equal(Dump.open(directory)[0].target, only.states[:, HIDDEN:])


def resident(path):
    """Bytes of a file's memory maps that are in memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux's view of memory maps")
def test_reading_maps_instead_of_loading(tmp_path):
    length = 300_000
    directory, wrote = tmp_path / "d", sequence(length)
    with DumpWriter(directory, manifest([length], shard_tokens=length)) as writer:
        writer.write([wrote])
    shard = directory / "shard-00000.safetensors"
    read = Dump.open(directory)[0]
    assert torch.equal(read.states[50_000], wrote.states[50_000])
    assert 0 < resident(shard) < shard.stat().st_size // 8


def test_it_travels_to_a_worker_without_its_tensors(tmp_path):
    wrote = sequence(2000)
    dump = Dump.open(write(tmp_path / "d", [wrote]))
    assert_same(dump[0], wrote)
    packed = pickle.dumps(dump)
    assert len(packed) < 10_000
    assert_same(pickle.loads(packed)[0], wrote)


def test_a_dump_first_read_in_inference_mode_can_be_trained_from(tmp_path):
    dump = Dump.open(write(tmp_path / "d", [sequence(4)]))
    with torch.inference_mode():
        dump[0]
    weight = torch.ones(2 * HIDDEN, requires_grad=True)
    (dump[0].states * weight).sum().backward()
    assert torch.allclose(weight.grad, dump[0].states.sum(0))


def test_the_same_content_gives_the_same_bytes(tmp_path):
    sequences = [sequence(n, n) for n in (4, 9, 3, 11)]
    write(tmp_path / "a", sequences)
    write(tmp_path / "b", sequences)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_an_unfinished_dump_is_continued_and_not_read_by_accident(tmp_path):
    sequences = [sequence(n, n) for n in (4, 9, 3, 11)]
    whole = write(tmp_path / "a", sequences)
    lengths = [len(s) for s in sequences]
    with DumpWriter(tmp_path / "b", manifest(lengths)) as writer:
        writer.write(sequences[:1])
    (tmp_path / "b" / "shard-00001.safetensors.unfinished").write_bytes(b"half")
    with pytest.raises(StoreError, match=r"is not finished \(1 of 4 sequences\)"):
        Dump.open(tmp_path / "b")
    assert len(Dump.open(tmp_path / "b", partial=True)) == 1
    write(tmp_path / "b", sequences)
    assert contents(whole) == contents(tmp_path / "b")


def die_at(step, directory, sequences):
    """Write in a child process that dies at its ``step``-th fsync or rename; whether it died."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = itertools.count(step, -1)

    def dying(call):
        return lambda *arguments: os._exit(9) if next(left) == 0 else call(*arguments)

    os.fsync, os.replace = dying(os.fsync), dying(os.replace)
    try:
        write(directory, sequences)
    finally:
        os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_may_die_between_any_two_steps(tmp_path):
    sequences = [sequence(n, n) for n in (4, 9, 3, 11)]
    whole = contents(write(tmp_path / "whole", sequences))
    for step in itertools.count():
        directory = tmp_path / str(step)
        died = die_at(step, directory, sequences)
        if not died:
            break
        if (directory / "manifest.json").exists():
            for read, wrote in zip(Dump.open(directory, partial=True, verify=True), sequences, strict=False):
                assert_same(read, wrote)
        assert contents(write(directory, sequences)) == whole
    assert step == 3 + 4 * 6  # fsync, rename, fsync: of the first manifest, then of 4 shards and 4 manifests


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spec": "post.3, post.1"}, ["'post.1, post.3' here", "'post.3, post.1' there", "order"]),
        ({"spec": "post.1, post.4"}, ["'post.1, post.3' here", "'post.1, post.4' there"]),
        ({"dtype": "bfloat16"}, ["dtype: float32 here, bfloat16 there"]),
        (
            {"fingerprint": PRINT.model_copy(update={"vocab_size": 60})},
            ["vocab_size is 50 here and 60 there"],
        ),
        (
            {"fingerprint": PRINT.model_copy(update={"n_layers": 9}), "spec": "post.1, post.8"},
            ["'post.1, post.3' here", "'post.1, post.8' there", "n_layers is 6 here and 9 there"],
        ),
        (
            {"data": Provenance(source="other.jsonl", digest="e" * 64, sequences=2, tokens=9)},
            ["tokens.jsonl", "dddddddddddd", "other.jsonl", "eeeeeeeeeeee"],
        ),
        ({"engine": Engine(name="test", version="2")}, ["version='1'", "version='2'"]),
    ],
)
def test_another_request_for_the_same_directory_is_refused(tmp_path, changes, words):
    directory = write(tmp_path / "d", [sequence(4), sequence(5)])
    before = contents(directory)
    with (
        pytest.raises(StoreError) as caught,
        DumpWriter(directory, manifest([4, 5], **changes)),
    ):
        pass
    for word in words:
        assert word in str(caught.value)
    assert contents(directory) == before


def test_one_writer_at_a_time(tmp_path):
    with (
        DumpWriter(tmp_path / "d", manifest([4])) as writer,
        pytest.raises(StoreError, match="another process is writing"),
        DumpWriter(tmp_path / "d", manifest([4])),
    ):
        pass
    with DumpWriter(tmp_path / "d", manifest([4])) as writer:
        writer.write([sequence(4)])
    assert len(Dump.open(tmp_path / "d")) == 1


@pytest.mark.parametrize("spec", ["post.1, post.3", "pre.2, pre.4", "post.-5, post.-3"])
def test_a_spec_that_names_the_stored_states_opens(tmp_path, spec):
    directory = write(tmp_path / "d", [sequence(4)])
    assert len(Dump.open(directory, CaptureSpec.parse(spec), PRINT)) == 1


def test_a_request_that_disagrees_is_refused_naming_both(tmp_path):
    directory = write(tmp_path / "d", [sequence(4)])
    with pytest.raises(StoreError, match=r"'post.1, post.3' here, 'post.3, post.1' there.*order"):
        Dump.open(directory, CaptureSpec.parse("post.3, post.1"))
    other = PRINT.model_copy(update={"weights": "7" * 64, "weights_bf16": "8" * 64})
    with pytest.raises(StoreError, match=r"weights 111111111111 here, 777777777777 there"):
        Dump.open(directory, fingerprint=other)


def test_same_weights_in_another_precision_open(tmp_path):
    directory = write(tmp_path / "d", [sequence(4)])
    cast = PRINT.model_copy(update={"weights": "7" * 64, "dtype": "bfloat16"})
    assert len(Dump.open(directory, fingerprint=cast)) == 1


def _one_line(caught):
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_damage_is_one_clear_line(tmp_path):
    directory = write(tmp_path / "d", [sequence(4), sequence(9)])
    shard = directory / "shard-00001.safetensors"
    whole = shard.read_bytes()

    shard.write_bytes(whole[:-100])
    with pytest.raises(StoreError, match=f"is damaged: {len(whole) - 100} bytes instead of {len(whole)}"):
        Dump.open(directory)

    shard.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    assert len(Dump.open(directory)) == 2
    with pytest.raises(StoreError, match="its checksum is"):
        Dump.open(directory, verify=True)

    shard.write_bytes(b"\xff" * len(whole))
    with pytest.raises(StoreError, match=r"shard-00001.safetensors is damaged") as caught:
        Dump.open(directory)[1]
    _one_line(caught)

    first = directory / "shard-00000.safetensors"
    document = json.loads((directory / "manifest.json").read_text())
    document["shards"][1]["bytes"] = first.stat().st_size
    (directory / "manifest.json").write_text(json.dumps(document))
    shard.write_bytes(first.read_bytes())
    with pytest.raises(StoreError, match=r"states is .*\(4, 16\).* the manifest says .*\(9, 16\)"):
        Dump.open(directory)[1]

    shard.unlink()
    with pytest.raises(StoreError, match=r"shard-00001.safetensors is missing"):
        Dump.open(directory)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"kind": "something else"}', "\x00\x01", "null"],
)
def test_a_damaged_manifest_is_one_clear_line(tmp_path, text):
    directory = write(tmp_path / "d", [sequence(4)])
    (directory / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=r"manifest.json is damaged or not a dump's manifest") as caught:
        Dump.open(directory)
    _one_line(caught)


def test_a_manifest_of_a_later_version_is_refused(tmp_path):
    directory = write(tmp_path / "d", [sequence(4)])
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2', 1))
    with pytest.raises(StoreError, match="version"):
        Dump.open(directory)


def test_a_manifest_cannot_point_outside_its_directory(tmp_path):
    directory = write(tmp_path / "d", [sequence(4)])
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace("shard-00000.safetensors", "../shard-00000.safetensors"))
    with pytest.raises(StoreError, match="damaged"):
        Dump.open(directory)


def test_foreign_directories(tmp_path):
    with pytest.raises(StoreError, match="does not exist"):
        Dump.open(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="is not a directory"):
        Dump.open(tmp_path / "file")
    with pytest.raises(StoreError, match=r"has no manifest.json: it is not a dump"):
        Dump.open(tmp_path)
    with (
        pytest.raises(StoreError, match=r"is not a dump, nor empty \(it holds file\)"),
        DumpWriter(tmp_path, manifest([4])),
    ):
        pass
    with pytest.raises(StoreError, match="in the way"), DumpWriter(tmp_path / "file", manifest([4])):
        pass


def in_child(action):
    """Run ``action`` in a forked process, so that its limits and rights are its own; the error it met."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            action()
        except StoreError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_file_that_may_not_grow_leaves_nothing_half_written(tmp_path):
    def outgrow():
        with DumpWriter(tmp_path / "d", manifest([4, 400])) as writer:
            writer.write([sequence(4)])
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
            writer.write([sequence(400)])

    assert "shard-00001.safetensors: the file would be larger than is allowed" in in_child(outgrow)
    assert sorted(contents(tmp_path / "d")) == ["manifest.json", "shard-00000.safetensors"]
    dump = Dump.open(tmp_path / "d", partial=True, verify=True)
    assert_same(dump[0], sequence(4))


def test_a_full_disk_is_one_line(tmp_path):
    # /dev/full accepts every open and refuses every byte with ENOSPC.
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("this system has no /dev/full")
    with DumpWriter(tmp_path / "d", manifest([4])) as writer:
        unfinished = tmp_path / "d" / "shard-00000.safetensors.unfinished"
        unfinished.symlink_to("/dev/full")
        with pytest.raises(
            StoreError, match=r"no space left on the device.*same command continues"
        ) as caught:
            writer.write([sequence(4)])
        _one_line(caught)
        assert sorted(contents(tmp_path / "d")) == [".lock", "manifest.json"]
        writer.write([sequence(4)])
    assert_same(Dump.open(tmp_path / "d")[0], sequence(4))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_no_permission(tmp_path):
    tmp_path.chmod(0o500)

    def intrude():
        if os.geteuid() == 0:
            os.seteuid(65534)  # root may write anywhere
        with DumpWriter(tmp_path / "d", manifest([4])):
            pass

    assert in_child(intrude) == f"cannot write {tmp_path / 'd'}: permission denied"
    assert contents(tmp_path) == {}
