"""Agreement of the ranks before a step whose new values are gathered.

Each rank derives the plan of the gathering from what all ranks do in the step, so all must know it:

- *Parameters with a gradient.* All ranks must step the same ones. DistributedDataParallel makes it
  so: with ``find_unused_parameters=True`` a parameter that any rank has used has a gradient on all
  of them, and another one has none on any. If the ranks differ nevertheless, no rule could give
  what plain training gives, because the replicas would drift apart there. So that is an error.
- *The order of chunks*, which each rank may have learned from its own forward.
- *The layout of each rank's state*, which may change on some ranks only. The ranks then exchange
  their layouts; all of them learn from the agreement that they have to.
- *The number of the step*, and whether a rank cannot take it.
- *Values that several ranks hold*, if a rank does not know that they are the same on all of them.

One exchange of 48 bytes per rank finds out whether the ranks agree; digests stand for the lists.
The lists themselves are only exchanged after a difference or a change. Nothing has been changed or
read when an error is raised. Without replicated boxes no plan is needed, and no agreement either.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.ambient import in_neutral
from offload.distributed.agreement.messages import Json
from offload.distributed.agreement.reports import differing
from offload.distributed.gathering.holder_groups import ProcessGroup, share_bytes, share_numbers
from offload.errors import RanksError, reason_of

_MOST_NAMED = 3
"""Maximal number of parameters that an error names."""

_MAX_REFUSAL_BYTES = 400


def _no_digests(names: Sequence[str] | None) -> Json:
    del names
    return []


@dataclass(frozen=True, slots=True)
class StepTerms:
    """What one rank is about to do in a step."""

    step: int
    """Number of the step, from 1."""

    stepped: list[str]
    """Names of the parameters with a gradient, in the order of the model. These are all parameters
    that the optimizer steps, also those whose boxes are on other ranks."""

    order: list[int]
    """Chunks of this rank in the order in which it updates them."""

    refusal: str = ""
    """Reason why this rank cannot take the step; empty if it can."""

    layout: int = 0
    """Digest of the layout of this rank's state, of at most 63 bits."""

    changed: Sequence[str] = ()
    """Names of the parameters of several ranks whose values may differ between them."""

    digests: Callable[[Sequence[str] | None], Json] = _no_digests
    """Function that returns what `differing` compares, of parameters or of all of them."""


class StepAgreement:
    """Agreement of all ranks on each step. All calls are collective.

    Args:
        group: Group of all ranks; it must accept tensors in host memory.
        look: Function that is called while other ranks are waited for to begin a step. It raises
            `RanksError` if one of them will never come.
    """

    def __init__(self, group: ProcessGroup, look: Callable[[], None] | None = None) -> None:
        self._group = group
        self._look = look
        self._known: list[int] = []
        """Digest of each rank's order, when the orders were last exchanged."""
        self._orders: list[tuple[int, ...]] = []
        self._digested: tuple[list[str], list[int]] | None = None
        """Lists of the last step; most steps have the same."""
        self._digests = (0, 0)
        self.layouts: tuple[int, ...] = ()
        """Digest of each rank's layout in the last step that was agreed on, by rank; the same on
        all ranks."""

    @in_neutral
    def agree(self, terms: StepTerms) -> list[tuple[int, ...]]:
        """Check that all ranks take the same step, and return what their plans need."""
        try:
            return self._agree(terms)
        except RuntimeError as error:
            if isinstance(error, RanksError):
                raise
            raise RanksError(
                f"rank {self._group.rank()} of {self._group.size()} waited in vain for the other "
                f"ranks to begin step {terms.step}: one has ended, or has not called step() within "
                "the time limit. Nothing was changed in this step. Restart the job, which goes on "
                f"from the newest checkpoint ({reason_of(error)})"
            ) from error

    def _agree(self, terms: StepTerms) -> list[tuple[int, ...]]:
        if (terms.stepped, terms.order) != self._digested:
            self._digested = (list(terms.stepped), list(terms.order))
            self._digests = (_digest(terms.stepped), _digest(terms.order))
        stepped, order = self._digests
        changed = _digest([*terms.changed]) if terms.changed else 0
        numbers = [terms.step, stepped, order, terms.layout, int(bool(terms.refusal)), changed]
        table = share_numbers(numbers, self._group, self._look)
        columns = ([*column] for column in zip(*table, strict=True))
        steps, digests, orders, layouts, refuses, changes = columns
        if any(refuses):
            said = terms.refusal.encode()[:_MAX_REFUSAL_BYTES].decode(errors="ignore").encode()
            found = share_bytes(said, self._group)
            rank = refuses.index(1)
            raise RanksError(
                f"rank {rank} of {len(found)} cannot take step {steps[rank]}: "
                f"{found[rank].decode()}. No rank has taken it"
            )
        if len({*steps}) > 1:
            listed = ", ".join(f"rank {rank} step {step}" for rank, step in enumerate(steps))
            raise RanksError(
                f"the ranks take different steps ({listed}), so their parameters differ: call "
                "step() equally often on every rank, and restore() on every rank to continue"
            )
        if len({*digests}) > 1:
            names = json.dumps(terms.stepped).encode()
            raise _differing([set(json.loads(d)) for d in share_bytes(names, self._group)])
        if any(changes):
            own = terms.digests(terms.changed if len({*changes}) == 1 else None)
            values = share_bytes(json.dumps(own).encode(), self._group)
            if words := differing({rank: json.loads(one) for rank, one in enumerate(values)}):
                raise RanksError(f"step {terms.step} was not taken: {words}")
        if orders != self._known:
            found = share_bytes(json.dumps(terms.order).encode(), self._group)
            self._orders = [tuple(json.loads(data)) for data in found]
            self._known = orders
        self.layouts = tuple(layouts)
        return self._orders


def _digest(values: list[str] | list[int]) -> int:
    return digest_of(json.dumps(values).encode())


def digest_of(data: bytes) -> int:
    """Return a number of 63 bits that stands for some data, as `StepTerms` have it."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _differing(stepped: Sequence[set[str]]) -> RanksError:
    everywhere, anywhere = set.intersection(*stepped), set.union(*stepped)
    names = sorted(anywhere - everywhere)
    if not names:
        return RanksError(
            "the ranks list the same parameters in different orders: construct the same model and "
            "give the optimizer its parameters in the same order on every rank"
        )
    lines = []
    for name in names[:_MOST_NAMED]:
        with_it = [rank for rank, own in enumerate(stepped) if name in own]
        without = [rank for rank, own in enumerate(stepped) if name not in own]
        lines.append(f"{name!r} has one on {_ranks(with_it)} and none on {_ranks(without)}")
    more = f" ({len(names) - _MOST_NAMED} more differ)" if len(names) > _MOST_NAMED else ""
    return RanksError(
        f"some parameters have a gradient on some ranks only: {'; '.join(lines)}{more}. All ranks "
        "must step the same parameters; nothing was changed. If a rank does not use all parameters "
        "in each forward, pass find_unused_parameters=True to DistributedDataParallel, and set "
        "gradients to None on all ranks or on none"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
