"""Retention policies against their definitions, written down again without the code's shortcuts."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import BestBy, EverySeconds, EverySteps, LastK, ParametersOnly, Retention
from offload.retention.policy import (
    Record,
    as_retention,
    describe,
    kept_generations,
    num_wanted,
    whole_generations,
)

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def clock(seconds: float) -> str:
    return (EPOCH + timedelta(seconds=seconds)).isoformat(timespec="seconds")


@st.composite
def histories(draw: st.DrawFn, max_size: int = 7) -> list[Record]:
    """Checkpoints by rising generation: steps rise, clocks do as they like, metrics repeat."""
    records = []
    step = generation = now = 0
    for _ in range(draw(st.integers(0, max_size))):
        step += draw(st.integers(0, 7))
        generation += draw(st.integers(1, 3))
        now += draw(st.sampled_from([-5000, -1, 0, 1, 3, 10, 10, 400]))
        metrics = draw(
            st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from([-1.0, 0.0, 0.5, 2.0]))
        )
        created = draw(st.sampled_from([clock(now)] * 6 + ["", "yesterday"]))
        pins = draw(st.sampled_from([()] * 5 + [("p",)]))
        records.append(Record(step, generation, created, metrics, pins))
    return records


single = st.one_of(
    st.integers(1, 4).map(LastK),
    st.integers(1, 9).map(EverySteps),
    st.sampled_from([1, 2.5, 10, 3600]).map(EverySeconds),
    st.builds(BestBy, st.sampled_from("ab"), st.integers(1, 3), st.sampled_from(["min", "max"])),
)


def oracle(policy: Retention, records: Sequence[Record]) -> set[int]:
    """What a policy keeps, from the sentence that defines it."""
    if isinstance(policy, LastK):

        def keeps(r: Record) -> bool:
            return sum(other.generation > r.generation for other in records) < policy.k

    elif isinstance(policy, EverySteps):
        last = max((r.step for r in records), default=0)
        multiples = range(policy.steps, last + 1, policy.steps)
        return {next(r for r in records if r.step >= m).generation for m in multiples}

    elif isinstance(policy, BestBy):

        def better(a: Record, b: Record) -> bool:
            x, y = a.metrics[policy.metric], b.metrics[policy.metric]
            if x == y:
                return a.generation < b.generation
            return x < y if policy.mode == "min" else x > y

        def keeps(r: Record) -> bool:
            ranked = [o for o in records if policy.metric in o.metrics]
            return r in ranked and sum(better(o, r) for o in ranked if o is not r) < policy.k

    else:
        assert isinstance(policy, EverySeconds)
        return _spaced(policy.seconds, records)
    return {r.generation for r in records if keeps(r)}


def _spaced(seconds: float, records: Sequence[Record]) -> set[int]:
    """Of all sets of checkpoints there is one such that a checkpoint is in it if and only if none
    before it is, or the last before it is far enough in the past, or in the future."""
    timed = [(r, datetime.fromisoformat(r.created)) for r in records if r.created[:2] == "20"]
    numbers = range(len(timed))
    found = []
    for chosen in chain.from_iterable(combinations(numbers, n) for n in range(len(timed) + 1)):
        for i in numbers:
            before = [timed[j][1] for j in chosen if j < i][-1:]
            apart = [(timed[i][1] - b).total_seconds() for b in before]
            due = not apart or apart[0] < 0 or apart[0] >= seconds
            if due != (i in chosen):
                break
        else:
            found.append({timed[i][0].generation for i in chosen})
    assert len(found) == 1
    return found[0]


@settings(deadline=None, max_examples=100)
@given(policies=st.lists(single, min_size=1, max_size=4), records=histories(), seed=st.integers())
def test_a_store_keeps_what_any_policy_keeps_the_pinned_and_the_newest(policies, records, seed):
    policy = policies[0]
    for other in policies[1:]:
        policy = policy | other
    expected = set[int]().union(*(oracle(p, records) for p in policies))
    expected |= {r.generation for r in records if r.pins}
    if records:
        expected.add(max(r.generation for r in records))
    shuffled = random.Random(seed).sample(records, len(records))
    assert kept_generations(policy, shuffled) == expected


@settings(deadline=None, max_examples=50)
@given(policies=st.lists(single, min_size=1, max_size=3), records=histories(max_size=10))
def test_what_was_let_go_of_is_never_missed(policies, records):
    """Checkpoints come one by one and what is not kept goes: in the end it is as if none had."""
    policy = policies[0]
    for other in policies[1:]:
        policy = policy | other
    there: list[Record] = []
    for record in records:
        there.append(record)
        kept = kept_generations(policy, there)
        assert kept, "one at least"
        there = [r for r in there if r.generation in kept]
        room = num_wanted(policy, there)
        assert len(there) <= room
        assert room <= max(1, sum(p.most or 0 for p in policies)) + len(there)
    assert {r.generation for r in there} == kept_generations(policy, records)


@settings(deadline=None, max_examples=50)
@given(
    policies=st.lists(single, min_size=1, max_size=3),
    only=single,
    records=histories(max_size=10),
)
def test_parameters_are_kept_beside_what_is_kept_whole(policies, only, records):
    """Checkpoints come one by one; what is kept only for its parameters gives up its state."""
    policy = ParametersOnly(only)
    for other in policies:
        policy = policy | other
    there: list[Record] = []
    for record in records:
        there.append(record)
        kept, whole = kept_generations(policy, there), whole_generations(policy, there)
        assert whole <= kept
        assert record.generation in whole, "the newest"
        there = [
            dataclasses.replace(r, has_state=r.has_state and r.generation in whole)
            for r in there
            if r.generation in kept
        ]
        assert sum(r.has_state for r in there) <= len(whole)
    expected = oracle(only, records).union(*(oracle(p, records) for p in policies))
    assert {r.generation for r in there} >= expected
    for last in (p for p in policies if isinstance(p, LastK)):
        newest = {r.generation for r in records[-last.k :]}
        assert newest <= {r.generation for r in there if r.has_state}


def test_the_last_few_are_those_that_can_be_gone_on_from():
    records = [Record(n, n, has_state=n < 3) for n in range(1, 6)]
    policy = LastK(2) | ParametersOnly(EverySteps(2))
    assert whole_generations(policy, records) == {1, 2}
    assert kept_generations(policy, records) == {1, 2, 4}


def test_the_last_few_and_every_thousandth():
    records = [Record(step, step) for step in range(300, 4000, 300)]
    kept = kept_generations(LastK(2) | EverySteps(1000), records)
    assert sorted(kept) == [1200, 2100, 3000, 3600, 3900]


def test_one_an_hour_in_any_zone_and_a_clock_that_is_set_back():
    times = [0, 1800, 3600, 5400, -7200, -5400, -3600, 9000]
    records = [Record(n, n, clock(s)) for n, s in enumerate(times)]
    assert EverySeconds(3600).kept(records) == {0, 2, 4, 6, 7}
    zones = ["2026-01-01T00:00:00", "2026-01-01T01:59:00+01:00", "2026-01-01T01:00:00"]
    records = [Record(n, n, created) for n, created in enumerate(zones)]
    assert EverySeconds(3600).kept(records) == {0, 2}


@pytest.mark.parametrize(
    ("policy", "arguments"),
    [
        (LastK, (True,)),
        (EverySteps, (0,)),
        (EverySteps, (1.5,)),
        (EverySeconds, (math.nan,)),
        (EverySeconds, (math.inf,)),
        (BestBy, ("",)),
        (BestBy, ("loss", 0)),
        (BestBy, ("loss", 1, "best")),
    ],
    ids=str,
)
def test_policies_that_make_no_sense_are_refused(policy, arguments):
    with pytest.raises(ValueError, match=r"must be .*got "):
        policy(*arguments)


def test_keep_is_a_number_or_a_policy():
    assert as_retention(2) == LastK(2)
    assert as_retention(LastK(2) | EverySteps(5)) == EverySteps(5) | LastK(2)
    assert describe(as_retention(2)) == "2 checkpoints"
    assert describe(LastK(2) | EverySteps(5)) == "LastK(k=2) | EverySteps(steps=5)"
    with pytest.raises(TypeError, match="a number of checkpoints or a policy"):
        as_retention("2")
    with pytest.raises(TypeError):
        LastK(2) | 5
