"""An error at any call with which a store is opened is one that says that nothing has changed."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from itertools import count

import pytest

from gds import MemoryBackend
from offload import open_checkpoint
from offload.errors import StoreError, UnreadableError
from offload.retention.policy import LastK
from offload.store.store import Store
from tests.crash.fault_backend import FaultBackend, Kind
from tests.crash.test_drives import ONE, TWO, part_of, store_of_two
from tests.stores.files import everything, write

KINDS: tuple[Kind, ...] = (
    "stat", "list_dir", "open", "read_bytes", "capabilities", "lock", "sync_dir",
)  # fmt: skip


def opened(backend: FaultBackend) -> Store:
    return Store(
        backend,
        ONE,
        [(backend, TWO)],
        keep=LastK(2),
        train_state_bytes=8192,
        allow_volatile=True,
    )


def with_owner() -> MemoryBackend:
    """Return a first directory with a part of an owner that was only begun."""
    backend = MemoryBackend(directories=[f"{ONE}/owner-1/part-1", TWO])
    write(backend, f"{ONE}/owner-1/part-1/table.json", b"begun")
    return backend


def empty() -> MemoryBackend:
    """Return directories that somebody has made, and nothing in them."""
    return MemoryBackend(directories=[ONE, TWO])


def error_of(backend: FaultBackend) -> StoreError | None:
    """Return the error with which a store is not opened; None if it is, and has been closed."""
    try:
        opened(backend).close()
    except StoreError as error:
        return error
    return None


def content(backend: MemoryBackend) -> dict[str, bytes | None]:
    """Return what is there, without the locks."""
    return {path: data for path, data in everything(backend).items() if "LOCK" not in path}


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (made, kind)
        for made in (store_of_two, with_owner, empty)
        for kind in KINDS
        if made is not empty or kind not in ("open", "read_bytes")  # it has no files
    ],
)
def test_an_error_at_any_call_is_named_and_passes(
    made: Callable[[], MemoryBackend], kind: Kind
) -> None:
    inner = made()
    before = content(inner)
    for number in count(1):
        backend = FaultBackend(inner)
        backend.fail(kind, number, forever=False)
        raised = error_of(backend)
        if raised is None:
            assert backend.num_failed == 0, f"call {number} has failed, and nobody says so"
            break
        said = str(raised)
        assert isinstance(raised, UnreadableError), said
        assert raised.errno == errno.EIO, said
        assert re.search(r"(try again|out of the store)\. No checkpoint has been changed$", said)
        assert said.count("could not be read") == 1, said
        assert "move  out" not in said, said
    assert number > 1, "no call has failed"
    assert content(inner) == before


def test_a_file_that_this_user_may_not_read_says_nothing_about_the_store() -> None:
    backend = FaultBackend(store_of_two())
    part = f"{TWO}/{part_of(backend, 1)}/part.json"
    backend.fail_if(lambda kind, path: kind == "open" and path == part, errno.EACCES)
    with pytest.raises(UnreadableError, match="check its permissions") as caught:
        opened(backend)
    assert "No checkpoint has been changed" in str(caught.value)
    opened(backend).close()


@pytest.mark.parametrize("kind", ["stat", "open"])
def test_a_reader_is_told_once_what_to_do_about_a_part(kind: Kind) -> None:
    backend = FaultBackend(store_of_two())
    path = f"{ONE}/step-00000002"
    part = f"{TWO}/{part_of(backend, 2)}"
    backend.fail_if(lambda what, where: what == kind and where.startswith(part))
    with pytest.raises(UnreadableError) as caught:
        open_checkpoint(path, backend=backend)
    said = str(caught.value)
    assert said.count("out of the store") == (kind == "stat"), said
    assert said.endswith(("try again", f"move {path} out of the store")), said


def test_a_part_that_a_former_owner_has_left_is_not_read_by_one_process() -> None:
    """No checkpoint names it, so that nothing depends on what is in it."""
    inner = store_of_two()
    table = f"{ONE}/owner-1/part-1/table.json"
    inner.make_dir(f"{ONE}/owner-1")
    inner.make_dir(f"{ONE}/owner-1/part-1")
    write(inner, table, b"left")
    backend = FaultBackend(inner)
    backend.fail_if(lambda kind, path: kind == "open" and path == table)
    store = opened(backend)
    assert store.newest is not None
    assert store.newest.manifest.step == 2
    store.close()
    assert backend.num_failed == 0
