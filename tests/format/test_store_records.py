"""What a store records beside its manifests, and what is said of a file that cannot be read."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path

import pytest

from gds import MemoryBackend, PosixBackend, StorageError
from offload.errors import UnreadableError
from offload.format.known_leaves import KnownLeaves
from offload.format.names import STORE_FILE_NAME
from offload.format.unreadable import reading, unreadable
from offload.store.poison import Poison
from offload.store.store_id import StoreIdentity, read_identity, read_store_id, write_store_id
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import FaultBackend
from tests.stores.files import write

RUN = "/run"
ID = "0123456789abcdef" * 2
IDENTITY_BYTES = 512


def recorded(document: object) -> StoreIdentity | None:
    """Return what is read from a ``store.json`` with this JSON document in it."""
    backend = MemoryBackend(directories=[RUN])
    data = json.dumps(document).encode().ljust(IDENTITY_BYTES)
    write(backend, f"{RUN}/{STORE_FILE_NAME}", data)
    return read_identity(backend, RUN, durable=False)


class TestIdentity:
    """The file ``store.json``."""

    def test_what_was_written_is_read(self) -> None:
        backend = MemoryBackend(directories=[RUN])
        assert read_store_id(backend, RUN, durable=False) is None
        identity = StoreIdentity(ID, 7)
        write_store_id(backend, RUN, identity, Poison(RUN))
        assert read_store_id(backend, RUN, durable=False) == ID
        assert read_identity(backend, RUN, durable=False) == identity

    def test_one_without_a_generation_has_taken_nothing_over(self) -> None:
        assert recorded({"store_id": ID}) == StoreIdentity(ID, 0)
        assert recorded({"store_id": ID, "taken_over": 2**53 - 1}) == StoreIdentity(ID, 2**53 - 1)

    @pytest.mark.parametrize(
        "document",
        [
            [ID],
            "store_id",
            {"taken_over": 1},
            {"store_id": None},
            {"store_id": 5},
            {"store_id": [ID]},
            {"store_id": ID[:-1]},
            {"store_id": ID + "0"},
            {"store_id": ID.upper()},
            {"store_id": ID, "taken_over": -1},
            {"store_id": ID, "taken_over": 2**53},
            {"store_id": ID, "taken_over": 1.0},
            {"store_id": ID, "taken_over": True},
            {"store_id": ID, "taken_over": "1"},
            {"store_id": ID, "taken_over": None},
        ],
    )
    def test_other_json_says_nothing(self, document: object) -> None:
        assert recorded(document) is None

    def test_it_is_not_read_through_a_link(self, tmp_path: Path) -> None:
        """Not even if the link is as long as the file."""
        (tmp_path / STORE_FILE_NAME).symlink_to("x/" * (IDENTITY_BYTES // 2 - 1) + "xx")
        with PosixBackend() as backend:
            stat = backend.stat(str(tmp_path / STORE_FILE_NAME))
            assert stat is not None
            assert stat.size_bytes == IDENTITY_BYTES
            assert read_identity(backend, str(tmp_path), durable=False) is None

    @pytest.mark.parametrize("durable", [False, True])
    def test_it_is_synced_only_by_who_relies_on_it(self, *, durable: bool) -> None:
        backend = FaultBackend(MemoryBackend(directories=[RUN]))
        write_store_id(backend, RUN, StoreIdentity(ID), Poison(RUN))
        before = backend.num_done["sync"]
        assert read_store_id(backend, RUN, durable=durable) == ID
        assert backend.num_done["sync"] == before + durable

    def test_it_has_survived_every_loss_of_power_after_it_was_written(self) -> None:
        backend = CrashBackend()
        backend.make_dir(RUN)
        backend.sync_dir("/")
        write_store_id(backend, RUN, StoreIdentity(ID, 3), Poison(RUN))
        disk = Disk(backend.log)
        for seed in range(10):
            survivor = disk.power_cut(random.Random(seed)).backend()
            assert read_identity(survivor, RUN, durable=True) == StoreIdentity(ID, 3)


class TestUnreadable:
    """The error about a file that cannot be read at this moment."""

    @pytest.mark.parametrize(
        ("checkpoint", "then", "end"),
        [
            ("", "", "and try again"),
            ("/run/step-1", "", "If it stays unreadable, move /run/step-1 out of the store"),
            ("", "Nothing was removed", "and try again. Nothing was removed"),
        ],
    )
    def test_it_says_only_what_its_caller_knows(self, checkpoint: str, then: str, end: str) -> None:
        error = unreadable(StorageError(errno.EIO, "read", "/a"), checkpoint=checkpoint, then=then)
        assert (error.errno, error.filename) == (errno.EIO, "/a")
        assert (error.strerror or "").endswith(end)

    def test_one_that_says_so_already_is_only_added_to(self) -> None:
        before = UnreadableError(errno.EACCES, "could not be read, so try again", "/a")
        after = unreadable(before, then="Nothing was removed")
        assert after.strerror == "could not be read, so try again. Nothing was removed"
        assert (after.errno, after.filename) == (errno.EACCES, "/a")

    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
    def test_one_that_comes_out_of_a_reading_stays_what_it_is(self, number: int) -> None:
        """Nothing is said about the content, whatever the number of the error."""
        error = UnreadableError(number, "could not be read", "/a")
        with pytest.raises(UnreadableError) as caught, reading("/run/step-1"):
            raise error
        assert caught.value is error


def test_a_content_that_was_forgotten_is_not_the_content_of_before() -> None:
    leaves = KnownLeaves(readable=True)
    leaves.note(0, b"12345678")
    before = leaves.content
    assert leaves.content == before
    leaves.forget(readable=True)
    assert leaves.content.name != before.name
    assert leaves.of(0) is None
