"""Room on the drives of several ranks, in several directories and on several hosts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gds import MemoryBackend
from offload.distributed.rank_opening import Opened
from offload.distributed.recut_rooms import Room, _room, first_lacking
from tests.ranks_store.job import ONE, TWO
from tests.ranks_store.test_owner_store import STORE_ID, naming, open_owner, sealed
from tests.ranks_training.rank_server import Jobs
from tests.ranks_training.test_hosts import ROUND, on, run_all
from tests.ranks_training.test_reshaped_hosts import FOUR, SETTING, contents, go_on
from tests.stores.files import contents as files_of


def room(drive: str, directory: str, needed: int, free: int, spare: int = 0) -> Room:
    return Room(drive, f"place of {directory}", directory, needed, free, spare)


@pytest.mark.parametrize(
    ("rooms", "expected"),
    [
        ([room("x", "a", 5, 5), room("y", "b", 5, 5)], None),
        ([room("x", "a", 5, 9), room("x", "b", 5, 9)], ("a", 10, 9)),
        ([room("x", "a", 5, 9), room("y", "b", 5, 4)], ("b", 5, 4)),
        ([room("x", "a", 5, 3, 2), room("y", "b", 5, 4, 1)], None),
        ([room("x", "a", 5, 3, 4), room("x", "a", 5, 3, 4)], ("a", 10, 7)),
        ([room("x", "a", 5, 3, 4), room("x", "b", 5, 3, 3)], None),
        ([room("x", "a", 5, 9), room("x", "a", 4, 8)], ("a", 9, 8)),
    ],
    ids=[
        "own drives",
        "one drive",
        "second drive",
        "spare",
        "spare counts once for a directory",
        "spare of two directories",
        "the least that is free",
    ],
)
def test_what_is_needed_on_a_drive_is_added_up(
    rooms: list[Room], expected: tuple[str, int, int] | None
) -> None:
    assert first_lacking(rooms) == expected


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_drive_of_any_rank_is_noticed_before_anything_is_written(
    jobs: Jobs, tmp_path: Path, full: int
) -> None:
    """The directories are on one drive of the machine; on one of two hosts, it says it is full."""
    run_all(jobs, tmp_path, [[*host, *ROUND] for host in FOUR], **SETTING)
    before = contents(tmp_path)
    calls: list[list[Any]] = [[*on("a")], [*on("b", "b", "bc")]]
    calls[full].append(["fill_drive", 100])
    ranks = jobs.run(tmp_path, [[*one, ["restore"]] for one in calls], **SETTING)
    for rank in ranks:
        assert rank.of("restore")["error"] == "StoreFullError"
        assert "new slot of" in rank.of("restore")["message"]
        assert f"{tmp_path}/{'ab'[full]}" in rank.of("restore")["message"]
    assert contents(tmp_path) == before
    go_on(jobs, tmp_path, [on("a"), on("b", "b", "bc")], 2)


def test_directories_of_one_host_are_checked_too(jobs: Jobs, tmp_path: Path) -> None:
    here = ["open", {"directory": ["a", "b"]}]
    run_all(jobs, tmp_path, [[here, *ROUND]] * 2, **SETTING)
    before = contents(tmp_path)
    calls = [here, ["fill_drive", 8192], ["restore"]]
    for rank in jobs.run(tmp_path, [calls] * 3, **SETTING):
        assert rank.of("restore")["error"] == "StoreFullError"
    assert contents(tmp_path) == before
    go_on(jobs, tmp_path, [[here]] * 3, 2)


def test_parts_count_as_spare_under_the_identity_that_came_from_a_tier() -> None:
    """A rank in another directory than the first counts what nobody needs there."""
    backend = MemoryBackend()
    owner = open_owner(backend)
    owner.take_over("f" * 32)
    reference = sealed(owner)
    peers = SimpleNamespace(peers=SimpleNamespace(rank=1))
    plan = SimpleNamespace(store_id=STORE_ID, directories=(ONE, TWO), near=(True, False))
    opened: Any = Opened(peers, backend, plan, (TWO,), ONE, part=owner)  # type: ignore[arg-type]
    files = files_of(backend, f"{owner.path}/{reference.name}")
    part_bytes = sum(map(len, files.values()))
    assert _room(opened, 1, naming()).spare_bytes == part_bytes > 0
    assert _room(opened, 1, naming(reference)).spare_bytes == 0
