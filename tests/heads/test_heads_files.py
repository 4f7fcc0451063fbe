"""A head's directory is written whole or not at all."""

import json
import os
import resource
import signal
import tempfile
from pathlib import Path

import pytest
import torch

from capture_hooks.errors import HeadError
from capture_hooks.heads import files


def write(place, *, number=1, overwrite=False):
    with files.writing(place, overwrite) as fresh:
        files.write_tensors(fresh / files.WEIGHTS, {"w": torch.full((4,), float(number))}, {"format": "pt"})
        files.write_tensors(fresh / files.WITNESS, {"t": torch.arange(3)}, {})
        files.write_config(fresh / files.CONFIG, {"number": number})


def interrupt_while_writing(place):
    with files.writing(place, True) as fresh:
        files.write_config(fresh / files.CONFIG, {"number": 2})
        raise KeyboardInterrupt


def test_written_files_read_back(tmp_path):
    write(tmp_path / "a" / "head")
    place = tmp_path / "a" / "head"
    assert files.read_config(place) == {"number": 1}
    metadata, tensors = files.read_tensors(place / files.WEIGHTS)
    assert metadata == {"format": "pt"}
    assert tensors["w"].tolist() == [1.0] * 4
    assert files.read_header(place / files.WITNESS)[1]["t"] == files.TensorInfo((3,), "I64")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["head"]


def test_one_weight_under_two_names_is_written_twice(tmp_path):
    shared = torch.arange(6.0).view(2, 3)
    files.write_tensors(tmp_path / "x.safetensors", {"a": shared, "b": shared, "c": shared[1:]}, {})
    _, read = files.read_tensors(tmp_path / "x.safetensors")
    assert torch.equal(read["a"], shared)
    assert torch.equal(read["b"], shared)
    assert torch.equal(read["c"], shared[1:])


def test_a_taken_directory_is_kept_without_overwrite(tmp_path):
    write(tmp_path / "head")
    with pytest.raises(HeadError, match="already holds a head; pass overwrite=True"):
        write(tmp_path / "head", number=2)
    assert files.read_config(tmp_path / "head") == {"number": 1}


def test_overwriting_replaces_all_files_and_leaves_nothing_behind(tmp_path):
    write(tmp_path / "head")
    write(tmp_path / "head", number=2, overwrite=True)
    assert files.read_config(tmp_path / "head") == {"number": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_an_error_while_overwriting_keeps_the_old_head(tmp_path):
    write(tmp_path / "head")
    with pytest.raises(KeyboardInterrupt):
        interrupt_while_writing(tmp_path / "head")
    assert files.read_config(tmp_path / "head") == {"number": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_a_directory_with_other_files_is_never_replaced(tmp_path):
    place = tmp_path / "home"
    place.mkdir()
    (place / "thesis.txt").write_text("years of work")
    with pytest.raises(HeadError, match=r"files that belong to no head \(thesis.txt\)"):
        write(place, overwrite=True)
    assert (place / "thesis.txt").read_text() == "years of work"


def test_a_path_that_cannot_be_a_directory_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadError, match="is no directory"):
        write(tmp_path / "file")
    with pytest.raises(HeadError, match=r"cannot be saved to .*file/head: .*File exists"):
        write(tmp_path / "file" / "head")


def test_no_permission_is_one_line():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        locked = Path(folder) / "locked"
        locked.mkdir(mode=0o555)
        user = os.geteuid()
        if user == 0:  # root may write anywhere, so act as nobody
            os.seteuid(65534)
        try:
            with pytest.raises(HeadError, match=r"cannot be saved to .*head: .*Permission denied"):
                write(locked / "head")
        finally:
            os.seteuid(user)
        assert not list(locked.iterdir())


def in_child(task):
    """Run ``task`` in a forked process; its wait status, and what it returned as text."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write_end, str(task()).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        said = pipe.read().decode()
    return os.waitpid(child, 0)[1], said


def test_a_full_disk_is_one_line_and_the_old_head_stays(tmp_path):
    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            with files.writing(tmp_path / "head", True) as fresh:
                files.write_tensors(fresh / files.WEIGHTS, {"w": torch.zeros(100_000)}, {})
        except HeadError as error:
            return error

    write(tmp_path / "head")
    _, said = in_child(fill)
    assert said.startswith(f"the head cannot be saved to {tmp_path / 'head'}: ")
    assert "\n" not in said
    assert files.read_config(tmp_path / "head") == {"number": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize("before", [True, False])
def test_a_killed_save_leaves_the_old_head_or_none(tmp_path, before):
    def die():
        with files.writing(tmp_path / "head", True) as fresh:
            files.write_tensors(fresh / files.WEIGHTS, {"w": torch.zeros(10)}, {})
            os.kill(os.getpid(), signal.SIGKILL)

    if before:
        write(tmp_path / "head")
    status, _ = in_child(die)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert (tmp_path / "head").exists() == before
    write(tmp_path / "head", number=3, overwrite=True)
    assert files.read_config(tmp_path / "head") == {"number": 3}


@pytest.mark.parametrize("kept", [0, 5, 12, 60, -1])
def test_a_truncated_file_is_one_line(tmp_path, kept):
    write(tmp_path / "head")
    path = tmp_path / "head" / files.WEIGHTS
    path.write_bytes(path.read_bytes()[:kept])
    for read in (files.read_header, files.read_tensors):
        with pytest.raises(HeadError, match="is damaged, truncated or no safetensors file") as caught:
            read(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path, value):
    path = tmp_path / "x.safetensors"
    files.write_tensors(path, {"a": torch.ones(2), "b": torch.tensor([1.0, value])}, {})
    with pytest.raises(HeadError, match="b holds 1 NaN or infinite values of 2"):
        files.read_tensors(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no config.json"),
        (b"{", "is not JSON"),
        (b"[1]", "holds a JSON list"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_bad_configs_are_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(HeadError, match=message):
        files.read_config(tmp_path)


def test_a_missing_directory_says_what_a_head_is(tmp_path):
    with pytest.raises(HeadError, match=r"is not a directory; a head is a directory with config.json"):
        files.read_config(tmp_path / "nowhere")


def test_configs_are_plain_json(tmp_path):
    write(tmp_path / "head")
    assert json.loads((tmp_path / "head" / "config.json").read_text()) == {"number": 1}
