"""The directories that ranks are given besides the first, where one process had the store before.

Called directly: only several processes at once get there otherwise (`tests/ranks_training`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from gds import Backend, MemoryBackend
from offload.format.part_file import SealedPart, invalid_part
from offload.store.directories import spread_directories
from tests.crash.test_drives import BOTH, ONE, optimizer_in
from tests.stores.files import overwrite, write
from tests.stores.training import Model, train

A, B, C = "/a/run", "/b/run", "/c/run"
OWN, FOREIGN = "1" * 32, "2" * 32
UNSEALED = ("", 0)

Part = tuple[str, int]
"""The store that a part is sealed for, and the number of its drive."""


def give_part(backend: Backend, path: str, part: Part) -> None:
    store, drive = part
    backend.make_dir(path)
    data = SealedPart(store, 1, drive, "0" * 32).encode() if store else invalid_part()
    write(backend, f"{path}/part.json", data)


@pytest.fixture
def backend() -> MemoryBackend:
    """Return a store of one checkpoint on one drive, and three more directories."""
    backend = MemoryBackend(directories=[A, B, C])
    with optimizer_in(backend, model := Model(), [ONE]) as optimizer:
        train(model, optimizer, 1)
    return backend


@pytest.mark.parametrize(
    ("parts", "given", "spread"),
    [
        ({A: [(OWN, 3)], B: [(OWN, 1)], C: [(OWN, 2)]}, [A, B, C], [B, C, A]),
        ({A: [(OWN, 8), (OWN, 1)], B: [(OWN, 2)]}, [B, A], [A, B]),
        ({A: [(FOREIGN, 1), UNSEALED]}, [A, B], []),
        ({A: [UNSEALED], C: [(OWN, 1)]}, [A, B, C], [C, A]),
    ],
    ids=["by drive", "by the first of their drives", "of another store", "unsealed last"],
)
def test_those_with_parts_of_the_store_come_in_the_order_of_the_drives(
    parts: Mapping[str, Sequence[Part]], given: list[str], spread: list[str], backend: MemoryBackend
) -> None:
    """Unsealed parts are its own: a process has ended before its first checkpoint there."""
    for directory, found in parts.items():
        for number, part in enumerate(found, 1):
            give_part(backend, f"{directory}/part-{number}", part)
    assert spread_directories(backend, ONE, given, OWN) == spread
    sealed = [one for one in spread if UNSEALED not in parts[one]]
    assert spread_directories(backend, "/missing", given, OWN) == sealed


@pytest.mark.parametrize(
    ("beside", "are_own"),
    [("a torn manifest", True), ("a slot", False), ("no checkpoint", False), ("parts", False)],
)
def test_unsealed_parts_are_its_own_unless_something_else_is_known_of_them(
    beside: str, are_own: bool, backend: MemoryBackend
) -> None:
    first = ONE
    if beside == "a torn manifest":
        overwrite(backend, f"{ONE}/step-00000001/manifest.json", b"\0" * 100)
    elif beside == "no checkpoint":
        first = B
    elif beside == "parts":  # of a checkpoint of one process that was spread
        backend = MemoryBackend(directories=[A])
        with optimizer_in(backend, model := Model(), BOTH) as optimizer:
            train(model, optimizer, 1)
    give_part(backend, f"{A}/part-1", UNSEALED)
    if beside == "a slot":
        backend.make_dir(f"{A}/.slot-1")
    assert spread_directories(backend, first, [A], OWN) == [A] * are_own
