"""Turns in which ranks measure their drives."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from offload.distributed.drive_turns import Turn, turns_of


@pytest.mark.parametrize(
    ("ranks", "turns"),
    [
        ([("x", "x/a", 8)], [Turn(0, 8)]),
        ([("x", "x/a", 8), ("x", "x/a", 9)], [Turn(0, 9), Turn(1, 0)]),
        (
            [("x", "x/a", 8), ("y", "y/b", 7), ("x", "x/a", 0), ("y", "y/b", 9)],
            [Turn(0, 8), Turn(0, 9), Turn(1, 0), Turn(1, 0)],
        ),
        (
            [("x", "x/a", 1), ("x", "x/b", 2), ("y", "y/c", 3), ("x", "x/b", 4)],
            [Turn(0, 1), Turn(1, 4), Turn(0, 3), Turn(2, 0)],
        ),
    ],
    ids=["one rank", "one drive", "two drives", "two directories on one drive"],
)
def test_the_lowest_rank_of_a_directory_measures_it_for_the_largest_state(
    ranks: list[tuple[str, str, int]], turns: list[Turn]
) -> None:
    found, last = turns_of(ranks)
    assert found == turns
    assert last == max(turn.number for turn in [*turns, Turn(1, 0)])


def test_no_drive_is_measured_twice_at_a_time_and_each_directory_once() -> None:
    places = [("x", "x/a"), ("x", "x/b"), ("y", "y/c")]
    for chosen in product(places, repeat=4):
        ranks = [(drive, directory, 1) for drive, directory in chosen]
        turns, last = turns_of(ranks)
        measuring = [
            (turn, place) for turn, place in zip(turns, chosen, strict=True) if turn.state_bytes
        ]
        assert Counter(place for _, place in measuring) == Counter({*chosen})
        at_a_time = Counter((turn.number, drive) for turn, (drive, _) in measuring)
        assert set(at_a_time.values()) == {1}
        assert all(turn.number < last for turn, _ in measuring)
        assert all(turn.number == last for turn in turns if not turn.state_bytes)
