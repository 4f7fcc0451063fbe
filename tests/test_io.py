"""A file takes another's place whole, or nothing happens."""

import os

import pytest

from capture_hooks.errors import StoreError
from capture_hooks.io import files_within, replacing


def test_a_device_or_a_pipe_is_not_replaced(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)  # as /dev/stdout leads to what a process writes to
    for path in (pipe, link, tmp_path):
        with pytest.raises(StoreError, match="no regular file"), replacing(path) as file:
            file.write(b"x")
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_after_an_error_the_old_file_is_there(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"new", "no bytes"])
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["file"])
    with replacing(path) as file:
        file.write(b"new")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"new", ["file"])


def test_what_a_directory_is_takes_a_bounded_look(tmp_path):
    deep = tmp_path
    for depth in range(5):
        (deep / f"{depth}.ckpt").write_bytes(b"")
        (deep / f"{depth}.pt").mkdir()  # of that name, and no file
        deep = deep / "inner"
        deep.mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    found = [path.name for path in files_within(tmp_path, ".ckpt", ".pt")]
    assert sorted(found) == [f"{depth}.ckpt" for depth in range(5)]
    assert [path.name for path in files_within(tmp_path, ".ckpt", folders=1)] == ["0.ckpt"]
