"""Every order of the effects of all ranks, with ranks that are killed, stopped or lose power."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pytest

from tests.ranks_agreement import world
from tests.ranks_agreement.checker import Bounds, Explored, ViolationError, explore
from tests.ranks_agreement.model import Ranks
from tests.ranks_agreement.wing import Wing, plain, without

_NOTHING = Bounds()
_SILENT = Bounds(silence=True)
_TWICE_AND_LOST = Bounds(kills=2, loses_store=True)


@dataclass(frozen=True)
class Scenario:
    """One exploration."""

    size: int
    seals: int = 1
    faults: int = 0
    """Number of local effects that fail: a full disk, an I/O error, a failed rename or sync."""

    beside: bool = False
    bounds: Bounds = _NOTHING
    forgets: str = ""
    skips: tuple[int, ...] = ()

    def run(self, wing: Wing | None = None) -> Explored:
        """Explore all states, and check them."""
        model = Ranks(
            wing or plain(),
            self.size,
            self.seals,
            beside=self.beside,
            forgets=self.forgets,
            skips=self.skips,
        )
        return explore(model, world.begin(self.size, self.faults), self.bounds)


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "2 ranks, nothing fails": Scenario(2, seals=2),
    "2 ranks, one effect fails": Scenario(2, seals=2, faults=1),
    "2 ranks, any is stopped": Scenario(2, bounds=_SILENT),
    "2 ranks, killed twice, store lost": Scenario(2, faults=1, bounds=_TWICE_AND_LOST),
    "2 ranks, two seals, any is stopped": Scenario(2, seals=2, faults=1, bounds=_SILENT),
    "2 ranks, beside training, one effect fails": Scenario(2, faults=1, beside=True),
    "3 ranks, one effect fails": Scenario(3, faults=1),
    "3 ranks, any subset is killed": Scenario(3, bounds=Bounds(kills=1)),
    "3 ranks, any is stopped": Scenario(3, bounds=_SILENT),
    "3 ranks, one does not seal": Scenario(3, skips=(1,), bounds=_SILENT),
    "3 ranks, two do not seal": Scenario(3, skips=(0, 2), bounds=_SILENT),
}
"""Explorations of the ordinary run: seconds each."""

LARGE: Final[Mapping[str, Scenario]] = {
    "2 ranks, beside training, any is stopped": Scenario(2, beside=True, bounds=_SILENT),
    "2 ranks, two seals beside training": Scenario(2, seals=2, beside=True),
    "2 ranks, two seals, killed twice, store lost": Scenario(
        2, seals=2, faults=1, bounds=_TWICE_AND_LOST
    ),
    "2 ranks, beside training, killed, one effect fails": Scenario(
        2, faults=1, beside=True, bounds=Bounds(kills=1)
    ),
    "2 ranks, two seals beside training, killed": Scenario(
        2, seals=2, beside=True, bounds=Bounds(kills=1)
    ),
    "3 ranks, killed, one effect fails": Scenario(3, faults=1, bounds=Bounds(kills=1)),
    "3 ranks, killed twice, store lost": Scenario(3, bounds=_TWICE_AND_LOST),
    "3 ranks, any is stopped, one effect fails": Scenario(3, faults=1, bounds=_SILENT),
}
"""Explorations that take up to minutes."""


@pytest.mark.parametrize(
    "name", [*SCENARIOS, *(pytest.param(n, marks=pytest.mark.slow) for n in LARGE)]
)
def test_no_state_breaks_an_invariant(name: str) -> None:
    assert (SCENARIOS | LARGE)[name].run().ends


@pytest.mark.parametrize("effect", ["sync", "sync names"])
@pytest.mark.parametrize("beside", [False, True], ids=["waited-for", "beside-training"])
def test_an_engine_that_leaves_out_a_sync_breaks_an_invariant(effect: str, beside: bool) -> None:
    with pytest.raises(ViolationError):
        Scenario(2, seals=2, beside=beside, forgets=effect).run()


_FAILS = "2 ranks, one effect fails"
_STOPPED = "2 ranks, any is stopped"
_PLAIN = "2 ranks, nothing fails"
_BESIDE = "2 ranks, beside training, one effect fails"
_IN_DOUBT = "Decision(Outcome.IN_DOUBT, "

STEPS: Final = {
    "the reports of all ranks before the rename": (
        *("reports", "missing = {*range(peers.size)} - reports", "missing = set[int]() - reports"),
        _STOPPED,
    ),
    "a report's error, which aborts": (
        *("reports", "        if report.error\n    ]", "        if False\n    ]"),
        _FAILS,
    ),
    "the look at who has given up, before the rename": (
        *("seal", "if left is not None:", "if left is not None and False:"),
        _STOPPED,
    ),
    "giving up is said to the writer": (
        *("seal", 'yield Put(key(scope, "left"), peers.name(peers.rank))', "pass"),
        _STOPPED,
    ),
    "a failed rename is in doubt, not aborted": (
        *("seal", f"return {_IN_DOUBT}reason_of", "return Decision(Outcome.ABORTED, reason_of"),
        _FAILS,
    ),
    "no decision in time is in doubt, not aborted": (
        *("seal", f"= {_IN_DOUBT}what, error", "= Decision(Outcome.ABORTED, what, error"),
        _STOPPED,
    ),
    "a part is held while its seal is in doubt": (
        *("seal", "if outcome is Outcome.ABORTED:", "if outcome is not Outcome.PUBLISHED:"),
        _BESIDE,
    ),
    "the wait for the verdict": (
        "unanimous",
        '    text = yield from _from_leader(exchange, "verdict")\n',
        '    return Agreed(body, {})\n    text = yield from _from_leader(exchange, "verdict")\n',
        _PLAIN,
    ),
    "a rank without an answer fails the exchange": (
        "unanimous",
        "    failed, restart = _missing(exchange, arrived, kind)\n",
        '    failed, restart = "", False\n',
        _STOPPED,
    ),
    "keys of an exchange stay until the next": (
        *("unanimous", "for scope in exchange.stale", "for scope in (exchange.scope,)"),
        _PLAIN,
    ),
    "the newest checkpoint is opened": (
        *("opening", "c.generation, reverse=True", "c.generation"),
        _PLAIN,
    ),
}
"""Steps of the protocol: the module, what is replaced by what, and the exploration that notices."""


@pytest.mark.parametrize("lost", STEPS)
def test_a_protocol_without_one_of_its_steps_breaks_an_invariant(lost: str) -> None:
    *edit, scenario = STEPS[lost]
    with pytest.raises(ViolationError):
        SCENARIOS[scenario].run(without(*edit))
