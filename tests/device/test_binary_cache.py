"""Compiled kernels between processes: found whole, or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from offload.device.kernels.binary_cache import BinaryCache, directory

PARTS = ["source", "-DX=1", "90"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def entry(path: Path) -> Path:
    BinaryCache(path).keep(PARTS, b"machine code" * 1000)
    (found,) = path.iterdir()
    return found


def found(path: Path, parts=PARTS) -> bytes | None:
    return BinaryCache(path).find(parts)


def test_it_is_in_the_users_cache_directory(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert directory() == Path("/somewhere/ssd-offload/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    monkeypatch.setenv("HOME", "/home/user")
    assert directory() == Path("/home/user/.cache/ssd-offload/kernels")


def test_what_is_kept_is_found_by_all_of_its_parts(path, entry):
    assert found(path) == b"machine code" * 1000
    for parts in (["source", "-DX=1"], ["source-DX=1", "90"], ["source", "-DX=", "190"]):
        assert found(path, parts) is None


@pytest.mark.parametrize("at", [0, 25, 60, -1])
def test_a_damaged_entry_is_not_found_and_is_replaced(at, path, entry):
    content = bytearray(entry.read_bytes())
    content[at] ^= 1
    entry.write_bytes(content)
    assert found(path) is None
    BinaryCache(path).keep(PARTS, b"new")
    assert found(path) == b"new"


@pytest.mark.parametrize("length", [0, 10, 40, 500])
def test_a_torn_entry_is_not_found(length, path, entry):
    os.truncate(entry, length)
    assert found(path) is None


@pytest.mark.parametrize("what", ["the entry", "its directory", "the directory above"])
def test_nothing_that_others_can_write_is_trusted(what, path, entry):
    target = {"the entry": entry, "its directory": path, "the directory above": path.parent}[what]
    mode = target.stat().st_mode
    for shared in (0o002, 0o020):
        target.chmod(mode | shared)
        assert found(path) is None
    target.chmod(mode)
    assert found(path)


def test_nothing_is_kept_where_others_can_write(path, entry):
    entry.unlink()
    path.chmod(0o777)
    BinaryCache(path).keep(PARTS, b"new")
    assert list(path.iterdir()) == []


def test_what_belongs_to_another_user_is_not_trusted(path, entry, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert found(path) is None


def test_a_link_or_a_pipe_is_not_an_entry(path, entry, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)
    assert found(path) is None
    entry.unlink()
    os.mkfifo(entry)
    assert found(path) is None


def test_the_umask_does_not_matter(path):
    before = os.umask(0)
    try:
        BinaryCache(path).keep(PARTS, b"new")
    finally:
        os.umask(before)
    assert found(path) == b"new"


def test_a_directory_that_cannot_be_made_is_done_without(tmp_path):
    (tmp_path / "file").write_text("no directory")
    cache = BinaryCache(tmp_path / "file" / "kernels")
    cache.keep(PARTS, b"new")
    assert cache.find(PARTS) is None


def test_a_user_without_a_home_keeps_nothing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is without one
    BinaryCache(directory()).keep(PARTS, b"new")
    assert BinaryCache(directory()).find(PARTS) is None
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(path, entry, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    BinaryCache(path).keep(["other"], b"new")
    assert list(path.iterdir()) == [entry]


def test_processes_that_keep_the_same_one_at_once_agree(path):
    binaries = [bytes([number]) * 100_000 for number in range(4)]
    threads = [
        threading.Thread(target=lambda b=b: [BinaryCache(path).keep(PARTS, b) for _ in range(20)])
        for b in binaries
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert found(path) in [None, *binaries]
    assert found(path) in binaries
    assert len(list(path.iterdir())) == 1
