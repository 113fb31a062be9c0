"""An exchange in which the leader offers something, and all ranks accept it or none goes on.

1. If the exchange asks, each rank first says what it knows, and the leader bases its offer on that.
2. The leader makes the offer, or says why it cannot.
3. Each rank gets ready for the offer, and answers that it is ready, or why it cannot be.
4. The leader gathers the answers of all ranks and announces the verdict.
5. Each rank notes that it has read how the exchange has ended, for rank 0: see `await_read`.

A rank goes on only after it has read the verdict that all ranks are ready. Otherwise every rank
raises the same error, which names the ranks that cannot and why. What a rank does to get ready must
therefore be harmless if the others cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from offload.distributed.agreement.effects import (
    Act,
    Arrived,
    Await,
    ChannelLostError,
    Delete,
    Program,
    Put,
)
from offload.distributed.agreement.peers import (
    Json,
    MessageError,
    Peers,
    begun_key,
    decode,
    encode,
    error_key,
    in_words,
    key,
    names,
)
from offload.errors import RanksError, reason_of

INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""What ends a rank in the middle of an exchange without being an error of it."""


class OutOfStepError(RanksError):
    """Ranks are not at the same point of the protocol any more; only a restart brings them back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One exchange, as one rank takes part in it."""

    peers: Peers
    scope: str
    """Name of the exchange, which begins its keys."""

    what: str
    """Call of the user that leads to the exchange; it must be the same on all ranks."""

    ask: Json = None
    """What this rank says first; None if no rank says anything."""

    make: Callable[[Mapping[int, Json]], Json]
    """Makes the offer out of what each rank has said; called on the leader only."""

    ready: Callable[[Json], Json]
    """Gets this rank ready for the offer. It returns a note for all ranks."""

    heeds_errors: bool = True
    """Whether an error that a rank has announced ends the exchange, if that rank is not there."""

    stale: Sequence[str] = ()
    """Scopes of earlier exchanges whose keys are not deleted yet."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks have agreed on."""

    offer: Json
    notes: Mapping[int, Json]


def unanimous(exchange: Exchange) -> Program[Agreed]:
    """Take part in an exchange."""
    try:
        agreed = yield from _lead(exchange) if exchange.peers.is_leader else _follow(exchange)
    except (OutOfStepError, ChannelLostError):
        raise
    except RanksError:
        yield from _note_read(exchange)
        raise
    yield from _note_read(exchange)
    return agreed


def _lead(exchange: Exchange) -> Program[Agreed]:
    peers, scope, what = exchange.peers, exchange.scope, exchange.what
    offer_key, verdict_key = key(scope, "offer"), key(scope, "verdict")
    asked: dict[int, Json] = {}
    failed, restart = "", False
    if exchange.ask is not None:
        asked, failed, restart = yield from _gather(exchange, "ask", _ask(exchange))
    offer: Json = None
    offer_text = ""
    if not failed:
        try:
            offer = yield Act(exchange.make, (asked,))
            offer_text = _offer(what, offer)
        except Exception as error:  # noqa: BLE001  (all ranks raise it)
            failed = _failure(peers, peers.rank, error)
        except INTERRUPTS:
            yield Put(offer_key, _offer(what, None, _interrupted(peers), restart=True))
            raise
    if failed:
        yield Put(offer_key, _offer(what, None, failed, restart=restart))
        raise _error(what, failed, restart)
    yield Put(offer_key, offer_text)
    try:
        note = yield Act(exchange.ready, (offer,))
        own = _answer(what, note, "")
    except Exception as error:  # noqa: BLE001  (all ranks raise it)
        own = _answer(what, None, reason_of(error))
    except INTERRUPTS:
        yield Put(verdict_key, _verdict(_interrupted(peers), restart=True, notes={}))
        raise
    notes, failed, restart = yield from _gather(exchange, "answer", own)
    yield Put(verdict_key, _verdict(failed, restart=restart, notes=notes))
    if not restart:  # every rank has answered, so it has read all there was in earlier exchanges
        yield from _delete(exchange)
    if failed:
        raise _error(what, failed, restart)
    return Agreed(offer, notes)


def _gather(exchange: Exchange, kind: str, own: str) -> Program[tuple[dict[int, Json], str, bool]]:
    """Return what each rank says, what is wrong with it in words, and whether a rank is lost."""
    wanted = tuple((rank, key(exchange.scope, kind, rank)) for rank in exchange.peers.others)
    arrived: Arrived = yield Await(wanted, exchange.scope, exchange.heeds_errors)
    failed, restart = _missing(exchange, arrived, kind)
    said: dict[int, Json] = {}
    refusals: list[str] = []
    for rank, text in sorted({exchange.peers.rank: own, **arrived.values}.items()):
        name = exchange.peers.name(rank)
        try:
            found = decode(text, kind, name)
            _require_same_call(exchange, rank, found["what"])
            if found.get("error"):
                raise RanksError(f"{name}: {found['error']}")
            said[rank] = found["body" if kind == "ask" else "note"]
        except RanksError as error:
            refusals.append(str(error))
    return said, "; ".join([*refusals, failed] if failed else refusals), restart


def _follow(exchange: Exchange) -> Program[Agreed]:
    peers, scope, what = exchange.peers, exchange.scope, exchange.what
    answer_key = key(scope, "answer", peers.rank)
    if exchange.ask is not None:
        yield Put(key(scope, "ask", peers.rank), _ask(exchange))
    text = yield from _from_leader(exchange, "offer")
    leader = peers.name(peers.leader)
    own: BaseException | None = None
    body: Json = None
    try:
        found = decode(text, "offer", leader)
        body = found["body"]
        if found["failed"]:
            raise _error(found["what"], found["failed"], found["restart"])
        _require_same_call(exchange, peers.leader, found["what"])
    except MessageError as error:
        own = error
        yield Put(answer_key, _answer(what, None, reason_of(error)))
    else:
        try:
            note = yield Act(exchange.ready, (body,))
            answer = _answer(what, note, "")
        except Exception as error:  # noqa: BLE001  (all ranks raise it)
            own = error
            answer = _answer(what, None, reason_of(error))
        except INTERRUPTS:
            yield Put(answer_key, _answer(what, None, "interrupted"))
            raise
        yield Put(answer_key, answer)
    text = yield from _from_leader(exchange, "verdict")
    verdict = decode(text, "verdict", leader)
    if verdict["failed"]:
        raise _error(what, verdict["failed"], verdict["restart"]) from own
    return Agreed(body, dict(verdict["notes"]))


def await_read(peers: Peers, scope: str) -> Program[None]:
    """Wait, on rank 0, until every other rank has read how an exchange has ended, or is lost.

    The process of rank 0 may serve the key-value store, and takes it along when it ends.
    """
    waiting = {rank: key(scope, "read", rank) for rank in peers.others}
    while waiting:
        arrived: Arrived = yield Await(tuple(waiting.items()), scope)
        gone = {*arrived.values, *arrived.left} or {*waiting}
        waiting = {rank: name for rank, name in waiting.items() if rank not in gone}


def _note_read(exchange: Exchange) -> Program[None]:
    """Note that this rank needs nothing of the exchange any more."""
    rank = exchange.peers.rank
    if rank:
        yield Put(key(exchange.scope, "read", rank), "read")


def _from_leader(exchange: Exchange, what: str) -> Program[str]:
    """Wait for a message of the leader and return it."""
    peers = exchange.peers
    wanted = ((peers.leader, key(exchange.scope, what)),)
    arrived: Arrived = yield Await(wanted, exchange.scope, exchange.heeds_errors)
    if peers.leader not in arrived.values:
        raise _error(exchange.what, *_missing(exchange, arrived, what, (peers.leader,)))
    return arrived.values[peers.leader]


def _missing(
    exchange: Exchange, arrived: Arrived, what: str, wanted: Sequence[int] | None = None
) -> tuple[str, bool]:
    """Return what is missing of a wait in words, and whether the ranks are out of step by it."""
    peers = exchange.peers
    missing = {*(peers.others if wanted is None else wanted)} - arrived.values.keys()
    if not missing:
        return "", False
    if arrived.error:
        return arrived.error, True
    if arrived.left:
        return in_words(arrived.left), True
    lost = names(missing & arrived.lost or missing)
    text = (
        f"no {what} of {lost} came within {peers.timeout_s:g} s of the last sign of progress. A "
        f"process may have ended or hang, or may not have called {exchange.what} as the others did"
    )
    return text, True


def _require_same_call(exchange: Exchange, rank: int, what: str) -> None:
    if what != exchange.what:
        peers = exchange.peers
        raise MessageError(
            f"{peers.name(rank)} called {what} while {peers.name(peers.rank)} called "
            f"{exchange.what}: make the same calls in the same order on all ranks"
        )


def _delete(exchange: Exchange) -> Program[None]:
    """Delete the keys of exchanges that every rank has left."""
    per_rank = ("ask", "answer", "read", "sign")
    keys = [
        name
        for scope in exchange.stale
        for name in (
            key(scope, "offer"),
            key(scope, "verdict"),
            error_key(scope),
            begun_key(scope),
            *(key(scope, what, rank) for what in per_rank for rank in range(exchange.peers.size)),
        )
    ]
    if keys:
        yield Delete(tuple(keys))


def _ask(exchange: Exchange) -> str:
    return encode("ask", {"what": exchange.what, "body": exchange.ask})


def _offer(what: str, body: Json, failed: str = "", *, restart: bool = False) -> str:
    fields = {"what": what, "body": body, "failed": failed, "restart": restart}
    return encode("offer", fields)


def _answer(what: str, note: Json, error: str) -> str:
    return encode("answer", {"what": what, "note": note, "error": error})


def _verdict(failed: str, *, restart: bool, notes: Mapping[int, Json]) -> str:
    fields = {"failed": failed, "restart": restart, "notes": [[r, n] for r, n in notes.items()]}
    return encode("verdict", fields)


def _failure(peers: Peers, rank: int, error: BaseException) -> str:
    """Return an error of a rank in words; an error of the ranks names its rank already."""
    if isinstance(error, RanksError) and not isinstance(error, ChannelLostError):
        return str(error)
    return f"{peers.name(rank)}: {reason_of(error)}"


def _interrupted(peers: Peers) -> str:
    return f"{peers.name(peers.rank)} was interrupted"


def _error(what: str, failed: str, restart: bool) -> RanksError:
    if restart:
        return OutOfStepError(f"{what}: {failed}. Restart the job")
    return RanksError(f"{what}: {failed}")
