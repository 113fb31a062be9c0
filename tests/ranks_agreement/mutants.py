"""The protocol without one of its steps, each with the exploration that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.mutation.mutation import Edit
from tests.ranks_agreement.wing import FOLDER


@dataclass(frozen=True)
class Mutant:
    """One or more edits of the wing, and what must notice them."""

    lost: str
    """The step that is missing, for people."""

    edits: tuple[Edit, ...]
    scenario: str


def _edit(module: str, find: str, replace: str) -> Edit:
    return Edit(f"{FOLDER}/{module}.py", find, replace)


_FAILS = "2 ranks, one effect fails"
_STOPPED = "2 ranks, any is stopped"
_PLAIN = "2 ranks, nothing fails"
_KILLED = "2 ranks, killed twice, store lost"

_DECIDED_TWICE = """    if problem:
        yield Put(key(scope, "decision"), decision.encode(own.step))
        reports, problem, lost = yield from _gather(peers, number, own)
    if not problem:
        try:
            yield Act(complete"""

MUTANTS: Final = (
    Mutant(
        "the reports of all ranks before the rename",
        (
            _edit(
                "reports",
                "missing = {*range(peers.size)} - reports",
                "missing = set[int]() - reports",
            ),
        ),
        _STOPPED,
    ),
    Mutant(
        "a report's error, which aborts",
        (
            _edit(
                "reports",
                "        if report.error\n    ]",
                "        if report.error and False\n    ]",
            ),
        ),
        _FAILS,
    ),
    Mutant(
        "the look at who has given up, before the rename",
        (_edit("seal", "if left is not None:", "if left is not None and False:"),),
        _STOPPED,
    ),
    Mutant(
        "giving up is said to the writer",
        (_edit("seal", 'yield Put(key(scope, "left"), peers.name(peers.rank))', "pass"),),
        _STOPPED,
    ),
    Mutant(
        "a failed rename is in doubt, not aborted",
        (
            _edit(
                "seal",
                "return Decision(Outcome.IN_DOUBT, reason_of(error), error)",
                "return Decision(Outcome.ABORTED, reason_of(error), error)",
            ),
        ),
        _FAILS,
    ),
    Mutant(
        "no decision in time is in doubt, not aborted",
        (
            _edit(
                "seal",
                "decision = Decision(Outcome.IN_DOUBT, what, error)",
                "decision = Decision(Outcome.ABORTED, what, error)",
            ),
        ),
        _STOPPED,
    ),
    Mutant(
        "no decision is in doubt even if the key-value store is gone",
        (
            _edit(
                "seal",
                "what, error = str(failure), failure\n",
                "what, error = str(failure), failure\n"
                "        decision = Decision(Outcome.ABORTED, what, error)\n"
                "        yield Act(settle, (number, decision.outcome))\n"
                "        return decision\n",
            ),
        ),
        _KILLED,
    ),
    Mutant(
        "the rename before its announcement",
        (
            _edit(
                "seal",
                "    try:\n        yield Act(rename)\n",
                '    yield Put("seal/0/decision", Decision(Outcome.PUBLISHED).encode(0))\n'
                "    try:\n        yield Act(rename)\n",
            ),
        ),
        _FAILS,
    ),
    Mutant(
        "one decision only: a report that comes late is still published",
        (
            _edit(
                "seal",
                "    if not problem:\n        try:\n            yield Act(complete",
                _DECIDED_TWICE,
            ),
        ),
        _STOPPED,
    ),
    Mutant(
        "the error in completing the manifest, which aborts",
        (
            _edit(
                "seal",
                "            yield Act(complete, (reports,))\n",
                "            try:\n"
                "                yield Act(complete, (reports,))\n"
                "            except OSError:\n"
                "                pass\n",
            ),
        ),
        _FAILS,
    ),
    Mutant(
        "the announcement of an aborted seal",
        (
            _edit(
                "seal",
                "    yield from _announce(",
                "    if decision.outcome is Outcome.ABORTED:\n"
                "        return decision\n"
                "    yield from _announce(",
            ),
        ),
        _FAILS,
    ),
    Mutant(
        "keys stay until every rank has read them",
        (
            _edit(
                "seal",
                "        arrived: Arrived = yield Await(wanted, scope)\n"
                "        if arrived.values.keys()",
                "        arrived = Arrived(dict.fromkeys(peers.others, ''))\n"
                "        if arrived.values.keys()",
            ),
        ),
        _PLAIN,
    ),
    Mutant(
        "a part is held from the beginning of its seal",
        (
            _edit(
                "seal",
                "    yield Act(hold, (number, part))\n",
                '    yield Act(hold, (number, ""))\n',
            ),
        ),
        "2 ranks, two seals beside training",
    ),
    Mutant(
        "a part is held while its seal is in doubt",
        (
            _edit(
                "ledger", "if outcome is Outcome.ABORTED:", "if outcome is not Outcome.PUBLISHED:"
            ),
        ),
        "2 ranks, beside training, one effect fails",
    ),
    Mutant(
        "a part of a published seal is held until an offer counts it",
        (_edit("ledger", "if number > decided or self", "if self"),),
        "2 ranks, two seals beside training",
    ),
    Mutant(
        "the wait for the verdict",
        (
            _edit(
                "unanimous",
                '    text = yield from _from_leader(exchange, "verdict")\n',
                "    return Agreed(body, {})\n"
                '    text = yield from _from_leader(exchange, "verdict")\n',
            ),
        ),
        _PLAIN,
    ),
    Mutant(
        "the answers of all ranks before the verdict",
        (
            _edit(
                "unanimous",
                '    arrived: Arrived = yield _await(exchange, _wanted(exchange, "answer"))\n'
                "    texts",
                "    arrived = Arrived({})\n    texts",
            ),
            _edit("unanimous", '    failed, restart = _missing(exchange, arrived, "answer")\n', ""),
        ),
        _PLAIN,
    ),
    Mutant(
        "a rank without an answer fails the exchange",
        (
            _edit(
                "unanimous",
                '    failed, restart = _missing(exchange, arrived, "answer")\n',
                '    failed, restart = "", False\n',
            ),
        ),
        _STOPPED,
    ),
    Mutant(
        "a refusal fails the exchange",
        (_edit("unanimous", '    if found["error"]:\n', '    if found["error"] and False:\n'),),
        _FAILS,
    ),
    Mutant(
        "being ready before the answer",
        (
            _edit(
                "unanimous",
                "            note = yield Act(exchange.ready, (body,))\n            answer",
                '            yield Put(answer_key, _answer(what, None, ""))\n'
                "            note = yield Act(exchange.ready, (body,))\n            answer",
            ),
        ),
        _PLAIN,
    ),
    Mutant(
        "the leader is ready before the verdict",
        (
            _edit(
                "unanimous",
                "        note = yield Act(exchange.ready, (offer,))\n",
                "        note = None\n",
            ),
            _edit(
                "unanimous",
                "    return Agreed(offer, notes)",
                "    yield Act(exchange.ready, (offer,))\n    return Agreed(offer, notes)",
            ),
        ),
        _PLAIN,
    ),
    Mutant(
        "the leader's own failure in the verdict",
        (
            _edit(
                "unanimous",
                "        texts[peers.rank] = _answer(what, None, reason_of(error))\n",
                "        raise _error(what, reason_of(error), restart=False) from error\n",
            ),
        ),
        _FAILS,
    ),
    Mutant(
        "an offer that cannot be made is announced",
        (
            _edit(
                "unanimous",
                "    if failed:\n"
                "        yield Put(offer_key, _offer(what, None, failed, restart=restart))\n",
                "    if failed:\n",
            ),
        ),
        _FAILS,
    ),
    Mutant(
        "a rank that cannot be ready answers all the same",
        (
            _edit(
                "unanimous",
                "            answer = _answer(what, None, reason_of(error))\n",
                "            raise\n",
            ),
        ),
        _FAILS,
    ),
    Mutant(
        "keys of an exchange stay until the next",
        (_edit("unanimous", "for scope in exchange.stale", "for scope in (exchange.scope,)"),),
        _PLAIN,
    ),
    Mutant(
        "the newest checkpoint is opened",
        (_edit("opening", "c.generation, reverse=True", "c.generation"),),
        _PLAIN,
    ),
    Mutant(
        "the writer is the rank that sees the first directory",
        (_edit("opening", "writer = min(with_first)", "writer = 0"),),
        _PLAIN,
    ),
)
