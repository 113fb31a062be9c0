"""Which tests are run for a mutant, and in which order.

First those that have noticed mutants of the same function or module, then the others, cheap and
different ones before dear and similar ones: a parametrised test says much the same with each set of
parameters, so that the second set counts as twice as dear as it is, and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tests.mutation.generated.mutants import Mutant
from tests.mutation.generated.recording import Recorded, Recording

FIRST_S: Final = 6.0
"""Seconds of tests that are tried before all the others are collected."""

LIMIT_S: Final = 60.0
"""Seconds of tests for one mutant, as they took when they were recorded."""

_OVERHEAD_S: Final = 0.05
"""Of each test, besides its own seconds."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tests for one mutant."""

    first: tuple[str, ...]
    """The most promising ones."""

    rest: tuple[str, ...]

    seconds: float
    """Of all of them."""

    longest_s: float
    """Of one of them."""

    num_known: int
    """Tests that reach it, of which some may be left out because of the time."""

    @property
    def tests(self) -> tuple[str, ...]:
        """All, in order."""
        return (*self.first, *self.rest)

    @property
    def is_complete(self) -> bool:
        """Whether no test that reaches the mutant is left out."""
        return len(self.tests) == self.num_known


class Noticing:
    """Which tests have noticed mutants of which functions; grows while mutants are judged."""

    def __init__(self) -> None:
        self._functions: dict[str, Counter[str]] = {}
        self._modules: dict[str, Counter[str]] = {}

    def add(self, function: str, test: str) -> None:
        """Take note of a test that has noticed a mutant of a function."""
        self._functions.setdefault(function, Counter())[test] += 1
        self._modules.setdefault(function.partition(".")[0], Counter())[test] += 1

    def rank(self, function: str, test: str) -> float:
        """Return how promising a test is: higher is better, 0 is unknown."""
        own = self._functions.get(function, Counter())[test]
        return own + self._modules.get(function.partition(".")[0], Counter())[test] / 16

    def of_function(self, function: str) -> list[str]:
        """Return the tests that have noticed mutants of a function, the most successful first."""
        return [test for test, _ in self._functions.get(function, Counter()).most_common()]

    def of_module(self, module: str) -> list[str]:
        """Return the tests that have noticed mutants of a module, the most successful first."""
        return [test for test, _ in self._modules.get(module, Counter()).most_common()]


def choose(
    mutant: Mutant, recording: Recording, noticing: Noticing, limit_s: float = LIMIT_S
) -> Chosen:
    """Return the tests to run for a mutant; none if no test reaches it."""
    known = recording.of_point(mutant.point)
    if known is None and recording.knows(mutant.point):
        return Chosen((), (), 0.0, 0.0, 0)
    if known is None:  # the statement is newer than the recordings
        known = recording.of_function(mutant.function)
        known = known or recording.of_module(mutant.function.partition(".")[0])
    ordered = in_order(known, mutant.function, noticing)
    first: list[str] = []
    rest: list[str] = []
    seconds = longest_s = 0.0
    for test in ordered:
        if seconds + test.seconds > limit_s and (first or rest):
            continue
        (first if not rest and seconds + test.seconds <= FIRST_S else rest).append(test.name)
        seconds += test.seconds + _OVERHEAD_S
        longest_s = max(longest_s, test.seconds)
    return Chosen((*first,), (*rest,), seconds, longest_s, len(known))


def in_order(tests: Iterable[Recorded], function: str, noticing: Noticing) -> Sequence[Recorded]:
    """Return tests in the order in which they are tried."""
    turns: Counter[str] = Counter()
    ranked: list[tuple[float, float, int, Recorded]] = []
    for test in sorted(tests, key=lambda test: (test.seconds, test.num_points, test.name)):
        turns[without_parameters(test.name)] += 1
        price = (test.seconds + _OVERHEAD_S) * turns[without_parameters(test.name)]
        ranked.append((-noticing.rank(function, test.name), price, len(ranked), test))
    return [test for *_, test in sorted(ranked, key=lambda ranks: ranks[:3])]


def without_parameters(test: str) -> str:
    """Return the name of a test without those of its parameters."""
    return test.partition("[")[0]
