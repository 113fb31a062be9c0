"""Gathering between real processes: all holders have the owner's bits, and no rank hangs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from offload.distributed.gathering.gather import BounceBuffer, Gathering
from offload.distributed.gathering.gather_plan import GatherPlan
from offload.distributed.gathering.live_ranges import range_views
from offload.update.dtypes import DTYPES
from tests.ranks_gather import ranks, scenes
from tests.ranks_gather.worlds import World, memory, new_values, random_world


def expected(world: World, rank: int) -> dict[str, bytes]:
    """Return the bits that a rank must have: new values in the boxes that it holds, else -1."""
    found = {}
    for name, (shape, dtype) in world.tensors.items():
        tensor = memory(shape, dtype, scattered=False)
        for (of, box), holders in world.holders.items():
            if of == name and rank in holders:
                tensor[box.slices] = new_values(name, shape, dtype)[box.slices]
        found[name] = scenes.bits(tensor)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_holders_have_the_bits_of_the_owner(num_ranks: int) -> None:
    worlds = [
        random_world(100 * num_ranks + seed, num_ranks, ["ddp", "mixed"][seed % 2], idle=seed > 15)
        for seed in range(24)
    ]
    assert sum(len(world.plan().transfers) for world in worlds) > 50
    assert any(not chunks for world in worlds for chunks in world.chunks), "no rank is idle"
    results = ranks.values(ranks.run(num_ranks, scenes.gather_worlds, worlds, num_ranks - 1))
    for rank, found in enumerate(results):
        for world, (bits, changes) in zip(worlds, found, strict=True):
            assert bits == expected(world, rank)
            arriving = {
                piece.name
                for transfer in world.plan().of(rank)
                if transfer.owner != rank
                for piece in transfer.pieces
            }
            assert changes == [int(name in arriving) for name in world.tensors]


def test_large_pieces_are_gathered_through_two_slots() -> None:
    world = scenes.large_world()
    for rank, (bits, slot_bytes) in enumerate(ranks.values(ranks.run(2, scenes.gather_large))):
        assert bits == expected(world, rank)
        assert slot_bytes == 2 * (4 << 20)


def test_a_group_need_not_be_the_whole_world() -> None:
    world = random_world(5, 2, "ddp")
    results = ranks.values(ranks.run(4, scenes.gather_in_a_part_of_the_world, world))
    assert results == [{}, expected(world, 0), {}, expected(world, 1)]


def test_values_are_written_after_the_seal_has_copied_the_old_ones() -> None:
    world = scenes.ddp_world(3, 2)
    for rank, (copied, bits) in enumerate(
        ranks.values(ranks.run(3, scenes.gather_beside_a_seal, world))
    ):
        old = {n: memory(*about, scattered=False) for n, about in world.tensors.items()}
        assert copied == {name: scenes.bits(tensor) for name, tensor in old.items()}
        assert bits == expected(world, rank)


def test_chunks_that_are_not_reported_are_sent_all_the_same() -> None:
    world = scenes.ddp_world(2, 4)
    results = ranks.values(ranks.run(2, scenes.gather_without_some_calls, world, [1]))
    assert results == [expected(world, 0), expected(world, 1)]


def test_a_chunk_that_comes_too_late_fails_on_all_ranks() -> None:
    world = scenes.ddp_world(2, 3)
    results = ranks.values(ranks.run(2, scenes.gather_in_the_wrong_order, world))
    assert results[0] == results[1]
    name, said = results[0]
    assert name == "RanksError"
    assert "rank 0 of 2 failed" in said
    assert "in the order of the plan" in said


@pytest.mark.parametrize("place", ["pass", "before_write", "live", "arrived"])
@pytest.mark.parametrize("count", [0, 2])
def test_a_failure_on_one_rank_is_raised_on_all(place: str, count: int) -> None:
    world = scenes.ddp_world(3, 3, length=700)
    count = min(count, 1) if place == "live" else count
    results = ranks.values(ranks.run(3, scenes.gather_with_faults, world, {1: (place, count)}))
    (name, said, _), total = results[0]
    assert name == "RanksError"
    assert "rank 1 of 3 failed in the middle of a step" in said
    assert f"Fault: the drive of {place} is gone" in said
    assert [found[0][:2] for found in results] == [(name, said)] * 3, "errors differ"
    assert results[1][0][2] == "Fault", "the rank's own error is the cause"
    assert total == 1 + 2 + 3, "the ranks cannot talk any more"


def test_the_first_of_several_failed_ranks_is_named() -> None:
    world = scenes.ddp_world(4, 2)
    faults = {1: ("pass", 1), 3: ("pass", 0), 2: ("arrived", 0)}
    results = ranks.values(ranks.run(4, scenes.gather_with_faults, world, faults))
    (_, said, _), _ = results[0]
    assert "rank 1 of 4 failed" in said
    assert "Failed as well: ranks 2, 3." in said
    assert len({found[0][:2] for found in results}) == 1


def test_an_interrupt_stays_an_interrupt_where_it_came() -> None:
    world = scenes.ddp_world(2, 3)
    results = ranks.values(ranks.run(2, scenes.gather_with_faults, world, {0: ("interrupt", 1)}))
    assert results[0][0][0] == "KeyboardInterrupt"
    assert results[1][0][0] == "RanksError"
    assert "rank 0 of 2 failed" in results[1][0][1]
    assert results[1][1] == 1 + 2


def test_ranks_learn_that_another_one_has_been_killed() -> None:
    world = scenes.ddp_world(3, 3)
    results = ranks.run(3, scenes.gather_with_faults, world, {2: ("killed", 1)})
    assert isinstance(results[2], ranks.Gone)
    for rank in (0, 1):
        (name, said, _), _ = results[rank]
        assert name == "RanksError"
        assert f"rank {rank} of 3 lost another rank" in said
        assert "Restart the job" in said


def test_a_rank_waits_no_longer_than_the_limit() -> None:
    world = scenes.ddp_world(2, 2)
    results = ranks.values(ranks.run(2, scenes.gather_too_late, world))
    assert [name for name, _ in results] == ["RanksError", "RanksError"]
    assert "gave no sign within the time limit" in results[1][1]


def test_each_byte_of_a_file_is_read_once_over_all_ranks(tmp_path: Path) -> None:
    path, offset, lengths, whole = tmp_path / "file", 0, {}, {}
    with open(path, "wb") as file:
        sizes = {"a": ("F32", 3000), "b": ("BF16", 7001), "n": ("I64", 1), "m": ("BOOL", 33)}
        for name, (dtype, length) in sizes.items():
            data = os.urandom(length * DTYPES[dtype].itemsize)
            if dtype == "BOOL":
                data = bytes(value % 2 for value in data)
            lengths[name], whole[name] = (dtype, length, offset), data
            offset += file.write(data)
    results = ranks.values(ranks.run(3, scenes.read_a_file, str(path), lengths))
    assert [bits for bits, _ in results] == [whole] * 3
    assert sum(num_read for _, num_read in results) == path.stat().st_size
    assert max(num_read for _, num_read in results) <= path.stat().st_size / 3 + 4096


class NoGroups:
    """Groups of a rank that must not talk to any other."""

    rank = 1
    num_ranks = 3


def test_without_replicas_no_rank_talks_to_another() -> None:
    world = random_world(1, 3, "fsdp")
    own = scenes.Rank(world, 1)
    buffer = BounceBuffer(8 << 20)
    for failure in (None, scenes.Fault("a drive")):
        gathering = Gathering(world.plan(), NoGroups(), own.live, buffer)
        for chunk in world.chunks[1]:
            own.update(chunk)
            gathering.updated(chunk.number)
        if failure is None:
            gathering.finish()
        else:
            assert gathering.fail(failure) is failure
    assert own.bits() == expected(world, 1)
    assert buffer._free is None, "memory was allocated"


def test_a_buffer_must_hold_a_slice() -> None:
    with pytest.raises(ValueError, match="too small"):
        Gathering(GatherPlan([[]], {}), NoGroups(), lambda *_: torch.zeros(1), BounceBuffer(1024))
    with pytest.raises(ValueError, match="at least one slot"):
        BounceBuffer(1024, 0)


@pytest.mark.parametrize("dims", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_views_of_a_range_are_its_elements(dims: tuple[int, ...]) -> None:
    tensor = torch.arange(3 * 4 * 5).view(3, 4, 5).permute(dims)
    flat = tensor.reshape(-1).tolist()
    for start in range(61):
        for stop in range(start, 61):
            views = range_views(tensor, start, stop)
            assert [value for view in views for value in view.reshape(-1).tolist()] == flat[
                start:stop
            ]
            assert all(view.untyped_storage().data_ptr() == tensor.data_ptr() for view in views)
            assert len(views) <= 7
