"""On how many threads blocks are updated: it follows what the drive lets a step gain."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import offload
import offload.update.host_place
import offload.update.pool
from gds import MemoryBackend
from offload.stream.streamer import Streamer
from offload.update.pool import UpdatePool, UpdateThreads

ALL = 8


def passes(
    threads: UpdateThreads, num: int, *, alone_s: float, together_s: float, drive_s: float
) -> list[int]:
    """Tell of passes that take as long as the slower one of update and drive.

    Args:
        threads: What is told.
        num: Of passes.
        alone_s: That updating 10 chunks takes on one thread.
        together_s: On all of them.
        drive_s: That the drive needs for a pass.

    Returns:
        The threads of each pass.
    """
    used = []
    for _ in range(num):
        used.append(threads.num_threads)
        updating_s = alone_s if threads.num_threads == 1 else together_s
        threads.passed(10, updating_s, max(drive_s - updating_s, 0.0))
    return used


def test_one_thread_is_enough_for_a_drive_that_is_slower_than_it() -> None:
    used = passes(UpdateThreads(ALL), 50, alone_s=0.8, together_s=0.6, drive_s=1.0)
    assert set(used) == {1}


def test_all_are_used_where_one_would_be_waited_for() -> None:
    used = passes(UpdateThreads(ALL), 50, alone_s=1.2, together_s=0.6, drive_s=1.0)
    assert used == [1] * 6 + [ALL] * 44


def test_what_is_slow_to_update_begins_with_all_and_keeps_them_unless_the_drive_is_slower() -> None:
    used = passes(UpdateThreads(ALL, ALL), 50, alone_s=2.0, together_s=1.1, drive_s=1.0)
    assert set(used) == {ALL}
    used = passes(UpdateThreads(ALL, ALL), 50, alone_s=2.0, together_s=1.1, drive_s=3.0)
    assert used == [ALL] * 6 + [1] * 44


@pytest.mark.parametrize(
    ("state_dtype", "first"), [("float32", 1), ("int8", ALL), ("bfloat16", ALL)]
)
def test_compressed_state_is_slow_to_update(state_dtype, first, monkeypatch) -> None:
    monkeypatch.setattr(offload.update.pool, "default_num_threads", lambda: ALL)
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True, state_dtype=state_dtype)
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with offload.AdamW([parameter], directory="/store", options=options) as optimizer:
        assert optimizer._live_engine().state.pool.threads.num_threads == first


def test_it_follows_a_drive_that_becomes_slower_and_faster() -> None:
    threads = UpdateThreads(ALL)
    assert passes(threads, 20, alone_s=1.2, together_s=0.6, drive_s=0.5)[-1] == ALL
    assert passes(threads, 20, alone_s=1.2, together_s=0.6, drive_s=2.0)[-1] == 1
    assert passes(threads, 20, alone_s=1.2, together_s=0.6, drive_s=0.5)[-1] == ALL


@pytest.mark.parametrize("alone_s", [n / 100 for n in range(50, 200, 3)])
def test_it_does_not_come_and_go(alone_s: float) -> None:
    used = passes(UpdateThreads(ALL), 30, alone_s=alone_s, together_s=0.45, drive_s=1.0)
    assert sum(before != after for before, after in pairwise(used)) <= 1


def test_one_thread_is_tried_again_in_time_and_seldom() -> None:
    """When it was last tried it was much slower; since then others may have left the machine."""
    threads = UpdateThreads(ALL)
    passes(threads, 10, alone_s=3.0, together_s=0.2, drive_s=1.0)
    used = passes(threads, 1000, alone_s=3.0, together_s=0.2, drive_s=1.0)
    assert 0 < used.count(1) < 30
    used = passes(threads, 1000, alone_s=0.5, together_s=0.2, drive_s=1.0)
    assert set(used[-500:]) == {1}


def test_a_pass_that_finds_the_ring_full_changes_nothing() -> None:
    threads = UpdateThreads(ALL)
    for number in range(60):
        threads.passed(10, 1.0, 0.01 if number % 3 == 0 else 0.4)
        assert threads.num_threads == 1


def test_passes_of_few_chunks_count_as_those_of_many() -> None:
    threads = UpdateThreads(ALL)
    for num_chunks in (1000, 1, 30, 7, 500, 2, 90):
        threads.passed(num_chunks, 0.1 * num_chunks, 0.05 * num_chunks)
        threads.passed(0, 0.0, 0.0)
    assert threads.num_threads == 1


def test_one_thread_stays_one_where_there_is_no_other() -> None:
    assert set(passes(UpdateThreads(1), 20, alone_s=2.0, together_s=2.0, drive_s=1.0)) == {1}


def test_a_step_tells_what_it_updated_and_how_long_it_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that only goes while a chunk is waited for, or updated."""
    now = 0.0
    told: list[tuple[int, float, float]] = []
    take, run = Streamer.take, UpdatePool.run

    def slow_take(self, chunk):
        nonlocal now
        now += 3.0
        return take(self, chunk)

    def slow_run(self, function, items, num_threads=None):
        nonlocal now
        now += 2.0 if items else 0.0
        run(self, function, items, num_threads)

    monkeypatch.setattr(Streamer, "take", slow_take)
    monkeypatch.setattr(UpdatePool, "run", slow_run)
    monkeypatch.setattr(
        offload.update.host_place, "time", SimpleNamespace(perf_counter=lambda: now)
    )
    weight = torch.nn.Parameter(torch.zeros(5 * 1024))
    with_gradient = torch.ones_like(weight)
    optimizer = offload.SGD(
        [weight],
        lr=0.1,
        momentum=0.9,
        directory="run",
        options=offload.Options(backend=MemoryBackend(), chunk_bytes=4096, allow_volatile=True),
    )
    threads = optimizer._live_engine().state.pool.threads
    monkeypatch.setattr(threads, "passed", lambda *seen: told.append(seen))
    for _ in range(3):
        weight.grad = with_gradient
        optimizer.step()
    optimizer.close()
    assert told == [(5, 10.0, 15.0)] * 2, "the first step, which makes the state, does not count"
