"""What all ranks must have alike before a step whose new values are gathered.

One exchange of 48 bytes per rank finds out whether the ranks agree on the parameters with a
gradient, the order of chunks, the layouts, the number of the step, and on values that several ranks
hold. Digests stand for lists, which follow only after a difference or a change. Nothing has been
changed or read when an error is raised. Without replicated boxes there is no agreement.

If the ranks differ in their gradients, no rule could give what plain training gives, because the
replicas would drift apart. Replicated values are compared before the first step and in each seal; a
later step compares those that have been changed since the step before, as far as torch counts
changes: it does not if they are made through ``.data``.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.distributed import ProcessGroup

from offload.ambient import in_neutral
from offload.device.boundary import Marks, is_on_device
from offload.device.staging import Traffic
from offload.distributed.agreement.peers import Json
from offload.distributed.agreement.reports import differing
from offload.distributed.gathering.gather_plan import BoxKey
from offload.distributed.gathering.holder_groups import ranks_in_words, share_bytes, share_numbers
from offload.errors import RanksError, reason_of
from offload.format.digests import LEAF_BYTES, leaf_digest, leaf_digests
from offload.model.shards import is_dtensor
from offload.model.tensor_image import TensorImage

Find: TypeAlias = Callable[[str], torch.Tensor | None]
"""Function that returns the live tensor with a name, if there is one."""

_BATCH_BYTES = 4 * LEAF_BYTES


class Replicas:
    """The values on this rank that other ranks hold as well."""

    def __init__(
        self, rank: int, find: Find, traffic: Traffic, progress: Callable[[], None]
    ) -> None:
        self._rank = rank
        self._find = find
        self._traffic = traffic
        self._progress = progress
        self._held: dict[str, int] = {}
        """First of the ranks that hold the same values, by the name of the parameter."""
        self._known: dict[str, tuple[int, int]] = {}
        """What `_stamp` returned when the values were known to be the same on all ranks."""

    def know(self, holders: Mapping[BoxKey, tuple[int, ...]]) -> None:
        """Take the ranks that hold each box of each parameter. Values of new ones are unknown."""
        self._held = {
            name: ranks[0]
            for (name, _), ranks in holders.items()
            if len(ranks) > 1 and self._rank in ranks
        }

    def note(self) -> None:
        """Record that all values are the same on all ranks now."""
        self._known = self._stamps()

    def forget(self) -> None:
        """Record that nothing is known of the values on other ranks."""
        self._known = {}

    def changed(self) -> list[str]:
        """Return the names of the parameters whose values may differ between ranks."""
        known = self._known
        return [name for name, stamp in self._stamps().items() if known.get(name) != stamp]

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """Return numbers for each parameter that are others after a change that torch counts."""
        stamps: dict[str, tuple[int, int]] = {}
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for name in self._held:
                tensor = self._find(name)
                if tensor is not None:
                    memory = _memory(tensor)
                    version = 0 if memory.is_inference() else memory._version
                    stamps[name] = version, memory.data_ptr()
        return stamps

    def digests(
        self,
        names: Collection[str] | None = None,
        find: Find | None = None,
        marks: Marks | None = None,
    ) -> list[Json]:
        """Return the name, the first rank that holds it, and the digest of each parameter."""
        out = torch.empty(_BATCH_BYTES, dtype=torch.uint8, device="cpu")
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return [
                [name, first, self._digest(name, (find or self._find)(name), out, marks)]
                for name, first in self._held.items()
                if names is None or name in names
            ]

    def _digest(
        self, name: str, tensor: torch.Tensor | None, out: torch.Tensor, marks: Marks | None
    ) -> str:
        if tensor is None:
            return ""
        memory = _memory(tensor).detach()
        if memory.is_contiguous() and not is_on_device(memory):
            batches = self._in_place(memory)
        else:
            batches = self._copied(name, memory, out, marks)
        leaves: list[bytes] = []
        for batch in batches:
            leaves.append(leaf_digests(batch))
            self._progress()
        return leaf_digest(memoryview(b"".join(leaves))).hex()

    def _in_place(self, memory: torch.Tensor) -> Iterator[memoryview]:
        """Yield the bytes of contiguous host memory."""
        if memory.nbytes:
            data = memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr()))
            for start in range(0, memory.nbytes, _BATCH_BYTES):
                yield data[start : start + _BATCH_BYTES]

    def _copied(
        self, name: str, memory: torch.Tensor, out: torch.Tensor, marks: Marks | None
    ) -> Iterator[memoryview]:
        """Yield copies of the bytes of any memory."""
        image = TensorImage([memory], marks, self._traffic, names=[name])
        for start in range(0, image.data_bytes, _BATCH_BYTES):
            stop = min(start + _BATCH_BYTES, image.data_bytes)
            image.gather(start, stop, out[: stop - start], on_one_thread=True)
            yield out[: stop - start].numpy().data


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's live memory of a parameter, with its version counter."""
    if is_dtensor(tensor):
        held: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return held
    return tensor


_MOST_NAMED = 3
"""Maximal number of parameters that an error names."""

_MAX_REFUSAL_BYTES = 400


def _no_digests(_: Sequence[str] | None) -> Json:
    return []


@dataclass(frozen=True, slots=True)
class StepTerms:
    """What one rank is about to do in a step."""

    step: int
    stepped: list[str]
    """Names of the parameters with a gradient, in the order of the model. These are all parameters
    that the optimizer steps, also those whose boxes are on other ranks."""

    order: list[int]
    """Chunks of this rank in the order in which it updates them."""

    refusal: str = ""
    layout: int = 0
    """Digest of the layout of this rank's state, of at most 63 bits."""

    changed: Sequence[str] = ()
    """Names of the parameters of several ranks whose values may differ between them."""

    digests: Callable[[Sequence[str] | None], Json] = _no_digests
    """Function that returns what `differing` compares, of parameters or of all of them."""


class StepAgreement:
    """Agreement of all ranks on each step. All calls are collective."""

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
        lines.append(
            f"{name!r} has one on {ranks_in_words(with_it)} and none on {ranks_in_words(without)}"
        )
    more = f" ({len(names) - _MOST_NAMED} more differ)" if len(names) > _MOST_NAMED else ""
    return RanksError(
        f"some parameters have a gradient on some ranks only: {'; '.join(lines)}{more}. All ranks "
        "must step the same parameters; nothing was changed. If a rank does not use all parameters "
        "in each forward, pass find_unused_parameters=True to DistributedDataParallel, and set "
        "gradients to None on all ranks or on none"
    )
