"""Gathering between real processes: all holders have the owner's bits, and no rank hangs."""

from __future__ import annotations

import pytest

from tests.ranks_gather import scenes
from tests.ranks_gather.ranks import Run
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


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_all_holders_have_the_bits_of_the_owner(run: Run, num_ranks: int) -> None:
    worlds = [
        random_world(100 * num_ranks + seed, num_ranks, ["ddp", "mixed"][seed % 2], idle=seed > 15)
        for seed in range(24)
    ]
    assert sum(len(world.plan().transfers) for world in worlds) > 50
    assert any(not chunks for world in worlds for chunks in world.chunks), "no rank is idle"
    results = run(num_ranks, scenes.gather_worlds, worlds, num_ranks - 1)
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


def test_values_are_written_after_the_seal_has_copied_the_old_ones(run: Run) -> None:
    world = scenes.ddp_world(3, 2)
    for rank, (copied, bits) in enumerate(run(3, scenes.gather_beside_a_seal, world)):
        old = {n: memory(*about, scattered=False) for n, about in world.tensors.items()}
        assert copied == {name: scenes.bits(tensor) for name, tensor in old.items()}
        assert bits == expected(world, rank)


FAULTS = {
    "pass": {1: ("pass", 0)},
    "pass of the last chunk": {1: ("pass", 2)},
    "memory": {1: ("live", 1)},
    "before writing": {1: ("before_write", 0)},
    "after arriving": {1: ("arrived", 2)},
    "several ranks": {1: ("pass", 1), 2: ("arrived", 0)},
}


def test_a_failure_is_raised_on_all_ranks_and_names_the_first(run: Run) -> None:
    world = scenes.ddp_world(3, 3, length=700)
    played = run(3, scenes.gather_with_faults, world, FAULTS)
    for case, faults in FAULTS.items():
        results = [found[case] for found in played]
        (name, said, _), total = results[0]
        assert name == "RanksError", case
        assert "rank 1 of 3 failed in the middle of a step" in said
        assert f"Fault: the drive of {faults[1][0]} is gone" in said
        assert ("Failed as well: rank" in said) == (2 in faults)
        assert [found[0][:2] for found in results] == [(name, said)] * 3, "errors differ"
        assert results[1][0][2] == "Fault", "the rank's own error is the cause"
        assert total == 1 + 2 + 3, "the ranks cannot talk any more"
