"""Every order of the effects of all ranks, with ranks that are killed, stopped or lose power."""

from __future__ import annotations

import pytest

from tests.ranks_agreement.checker import Bounds, ViolationError
from tests.ranks_agreement.mutants import MUTANTS, Mutant
from tests.ranks_agreement.scenarios import LARGE, SCENARIOS, Scenario
from tests.ranks_agreement.wing import mutated, plain


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_state_breaks_an_invariant(name: str, record_property) -> None:
    explored = SCENARIOS[name].run(plain())
    record_property("agreement_states", explored.states)
    assert explored.ends


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_no_state_of_a_large_exploration_breaks_an_invariant(name: str, record_property) -> None:
    explored = LARGE[name].run(plain())
    record_property("agreement_states", explored.states)
    assert explored.ends


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.lost)
def test_a_protocol_without_one_of_its_steps_breaks_an_invariant(mutant: Mutant) -> None:
    with pytest.raises(ViolationError):
        (SCENARIOS | LARGE)[mutant.scenario].run(mutated(mutant.edits))


@pytest.mark.parametrize("effect", ["sync", "sync names"])
@pytest.mark.parametrize("beside", [False, True], ids=["waited-for", "beside-training"])
def test_an_engine_that_leaves_out_a_sync_breaks_an_invariant(effect: str, beside: bool) -> None:
    with pytest.raises(ViolationError):
        Scenario(2, seals=2, beside=beside, forgets=effect).run(plain())


def test_ranks_that_do_not_seal_leave_no_checkpoint_and_no_wait_without_end() -> None:
    for skips in ((1,), (0,), (0, 2)):
        Scenario(3, skips=skips, bounds=Bounds(silence=True)).run(plain())
