"""Gathering: brings new values of each box from the rank that updated it to its other holders.

Values are sent by broadcasts while the next chunks stream. Measured with gloo on the CPU, with 2
and 4 ranks on one host: broadcasts of slices take about half of the time of
``all_gather_into_tensor``. They need no padding either, and a large piece is sent from and received
into live memory directly. Small pieces are packed in a bounce buffer of constant size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from offload.ambient import in_neutral
from offload.distributed.gathering.gather_plan import (
    BoxKey,
    BoxPiece,
    GatherPlan,
    Transfer,
    box_plan,
)
from offload.distributed.gathering.holder_groups import HolderGroups, ranks_in_words, share_bytes
from offload.errors import RanksError, reason_of
from offload.format.boxes import Box
from offload.format.shares.dealing import OwnedBox
from offload.model.shards import is_dtensor

Live: TypeAlias = Callable[[str, Box], torch.Tensor]
"""Function that returns this rank's live memory of a box: a tensor of the box's sizes, which shares
its memory and its version counter with the parameter. It is called once per box and gathering."""

BeforeWrite: TypeAlias = Callable[[BoxPiece], object]
"""Function that is called before elements of a box are overwritten, and before the version of the
tensor changes. It waits until a seal in flight has copied them. A seal that compares versions needs
it to wait for the whole tensor."""

NUM_SLOTS = 8
"""Default number of slots of a bounce buffer."""

_TRANSFERS_IN_FLIGHT = 8
"""Number of transfers of each rank that may be in flight, whether or not they use a slot."""

_MAX_CAUSE_BYTES = 400
"""Maximal length of a cause that is sent to other ranks, in UTF-8."""


class BounceBuffer:
    """Memory for values on their way: a constant number of slots, allocated by `allocate`."""

    def __init__(self, slot_bytes: int, num_slots: int = NUM_SLOTS) -> None:
        self.slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._free: list[torch.Tensor] | None = None

    def allocate(self) -> None:
        """Allocate the slots, unless that has been done."""
        if self._free is None:
            self._free = [self._new() for _ in range(self._num_slots)]

    def take(self, *, wait: bool) -> torch.Tensor | None:
        """Return a free slot; if there is none, a new one, or None if those in use come back."""
        if self._free:
            return self._free.pop()
        return None if wait else self._new()

    def give(self, slot: torch.Tensor) -> None:
        """Take back a slot that is not in use any more."""
        if self._free is not None and len(self._free) < self._num_slots:
            self._free.append(slot)

    def _new(self) -> torch.Tensor:
        return torch.empty(self.slot_bytes, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True, slots=True)
class _InFlight:
    transfer: Transfer
    work: Any
    """Work of ``torch.distributed``."""

    slot: torch.Tensor | None
    """Slot that holds the values; None if they are sent from or received into live memory."""


class Gathering:
    """One run of a plan: brings the values of one step, or of a restore, to all holders.

    Every rank of the training makes a `Gathering` for the same plan at the same time. It calls
    `updated` for its chunks, in the order of the plan, and then `finish`; or `fail`, if it cannot
    go on. All calls come from one thread. Between the first `updated` and the end of `finish` no
    one else may change the live memory of the plan's boxes.

    If a rank fails, it goes on taking part in the broadcasts of the step, and sends the values that
    it has. So no rank waits in vain, and at the end all ranks raise the same error.

    ``before_write`` is called before live memory is written, ``arrived`` when values of another
    rank are in it, and ``ended`` when `finish` has succeeded.
    """

    def __init__(
        self,
        plan: GatherPlan,
        groups: HolderGroups,
        live: Live,
        buffer: BounceBuffer,
        *,
        before_write: BeforeWrite | None = None,
        arrived: Callable[[Transfer], object] | None = None,
        ended: Callable[[], object] | None = None,
    ) -> None:
        if plan.transfers:  # allocated now, because no error may come between two transfers
            buffer.allocate()
        self._plan = plan
        self._groups = groups
        self._live = live
        self._buffer = buffer
        self._before_write = before_write
        self._arrived = arrived
        self._ended = ended
        self._rank = groups.rank
        self._transfers = plan.of(groups.rank)
        self.num_arrived = 0
        """Number of this rank's transfers that were completed, in the order of the plan. It stays
        as it is after an error of this rank."""
        self._num_issued = 0
        self._num_rounds_begun = 0
        self._max_in_flight = _TRANSFERS_IN_FLIGHT * plan.num_ranks
        self._in_flight: deque[_InFlight] = deque()
        self._memory: dict[BoxKey, torch.Tensor] = {}
        self._written: set[str] = set()
        """Names of the tensors whose version has been changed."""
        self._error: BaseException | None = None
        """First error of this rank; it goes on taking part after it."""
        self._lost: RanksError | None = None
        """Error of a process group, after which nothing more can be sent or received."""

    @in_neutral
    def updated(self, chunk: int) -> None:
        """Send the new values of a chunk, which are in live memory now.

        A call for a chunk that is not in the plan does nothing. Chunks of the plan that were left
        out count as updated as soon as a later one is. After an error `fail` must be called.
        """
        number = self._plan.round_of(self._rank, chunk)
        if number is None:
            return
        if number < self._num_rounds_begun:
            raise RuntimeError(
                f"chunk {chunk} was updated after the values of a later chunk were sent: chunks "
                "must be updated in the order of the plan"
            )
        self._issue_rounds(number + 1)
        if self._lost is not None:
            raise self._lost
        if self._error is not None:
            raise self._error

    @property
    def stops(self) -> Mapping[str, int]:
        """Number of transfers after which all values of other ranks are here, by tensor."""
        return self._plan.stops(self._rank)

    @in_neutral
    def advance(self) -> bool:
        """Complete the oldest transfer in flight, and return whether there was one.

        An error is raised by the next call of `updated`, or by `finish`.
        """
        if not self._in_flight or self._lost is not None:
            return False
        self._complete_oldest()
        return True

    @in_neutral
    def finish(self) -> None:
        """Take part in the remaining broadcasts, and wait until all values have arrived."""
        error = self._end()
        if error is not None:
            raise error from self._error or error.__cause__
        if self._ended is not None:
            self._ended()

    @in_neutral
    def fail(self, error: BaseException) -> BaseException:
        """Take part in the remaining broadcasts, and tell all ranks about an error of this one.

        Returns the error to raise: the same on all ranks, unless no rank waits for this one or it
        was interrupted.
        """
        if self._lost is None and self._error is None:
            self._error = error
        found = self._end()
        if found is None or not isinstance(error, Exception):
            return error
        if found is not error:
            found.__cause__ = error
        return found

    def _end(self) -> RanksError | None:
        """End the gathering; return the error of the ranks, if there is one."""
        if not self._plan.transfers:
            return None
        self._issue_rounds(self._plan.num_rounds)
        while self._in_flight and self._lost is None:
            self._complete_oldest()
        causes: list[bytes] = []
        if self._lost is None:
            try:
                causes = share_bytes(_cause(self._error), self._groups.everyone)
            except RuntimeError as error:
                self._lose(error)
        failed = [rank for rank, cause in enumerate(causes) if cause]
        if self._lost is not None or not failed:
            return self._lost
        others = f" Failed as well: {ranks_in_words(failed[1:])}." if failed[1:] else ""
        return RanksError(
            f"{ranks_in_words(failed[:1])} of {len(causes)} failed in the middle of a step, so the "
            f"parameters of all ranks are torn: {causes[failed[0]].decode()}.{others} restore() a "
            "checkpoint on every rank to continue"
        )

    def _issue_rounds(self, stop: int) -> None:
        """Issue all transfers of rounds before `stop`."""
        self._num_rounds_begun = stop
        while self._num_issued < len(self._transfers) and self._lost is None:
            transfer = self._transfers[self._num_issued]
            if transfer.round >= stop:
                return
            while len(self._in_flight) >= self._max_in_flight and self._lost is None:
                self._complete_oldest()
            self._num_issued += 1
            self._issue(transfer)

    def _issue(self, transfer: Transfer) -> None:
        """Begin a transfer; errors are noted, so that the order of transfers is kept."""
        slot, values = None, self._direct(transfer)
        if values is None:
            slot = self._slot()
            if slot is None:
                return  # the group is lost
            values = slot[: transfer.nbytes]
            if transfer.owner == self._rank:
                self._try(self._pack, transfer, values)
        try:
            work = self._groups.broadcast(values, transfer.holders, transfer.owner)
        except RuntimeError as error:
            self._lose(error)
            return
        self._in_flight.append(_InFlight(transfer, work, slot))

    def _slot(self) -> torch.Tensor | None:
        while self._lost is None:
            slot = self._buffer.take(wait=bool(self._in_flight))
            if slot is not None:
                return slot
            self._complete_oldest()
        return None

    def _complete_oldest(self) -> None:
        """Wait for the oldest transfer in flight, and copy its values into live memory."""
        oldest = self._in_flight.popleft()
        try:
            oldest.work.wait()
        except RuntimeError as error:
            self._lose(error)
            return  # the backend may still write into the slot, so it is not used again
        transfer = oldest.transfer
        if transfer.owner != self._rank and self._error is None:
            self._try(self._receive, transfer, oldest.slot)
        if oldest.slot is not None:
            self._buffer.give(oldest.slot)
        if self._error is None:
            self.num_arrived += 1

    def _direct(self, transfer: Transfer) -> torch.Tensor | None:
        """Return the live memory of a transfer, uint8; None if a slot must be used."""
        if len(transfer.pieces) > 1 or self._error is not None:
            return None
        (piece,) = transfer.pieces
        found: list[torch.Tensor] = []

        def prepare() -> None:
            """Find the bytes that are sent or received."""
            views = self._views(piece)
            if len(views) == 1 and views[0].is_contiguous():
                if transfer.owner != self._rank:
                    self._begin_write(piece)
                # A contiguous tensor with one element may have any stride.
                flat = views[0].as_strided((views[0].numel(),), (1,))
                found.append(flat.view(torch.uint8))

        self._try(prepare)
        return found[0] if found else None

    def _pack(self, transfer: Transfer, values: torch.Tensor) -> None:
        views = [view for piece in transfer.pieces for view in self._views(piece)]
        typed = values.view(views[0].dtype)
        if all(view.dim() == 1 for view in views):
            torch.cat(views, out=typed)
        else:
            parts = torch.split_with_sizes(typed, [view.numel() for view in views])
            torch._foreach_copy_(_shaped(parts, views), views)

    def _receive(self, transfer: Transfer, slot: torch.Tensor | None) -> None:
        """Copy the values of a transfer from its slot, if it has one, and report them."""
        if slot is not None:
            for piece in transfer.pieces:
                self._begin_write(piece)
            views = [view for piece in transfer.pieces for view in self._views(piece)]
            typed = slot[: transfer.nbytes].view(views[0].dtype)
            parts = torch.split_with_sizes(typed, [view.numel() for view in views])
            torch._foreach_copy_(views, _shaped(parts, views))
        if self._arrived is not None:
            self._arrived(transfer)

    def _views(self, piece: BoxPiece) -> list[torch.Tensor]:
        """Return views of a piece's live memory, without their version counter."""
        return range_views(self._memory_of(piece).data, piece.start, piece.stop)

    def _memory_of(self, piece: BoxPiece) -> torch.Tensor:
        memory = self._memory.get(piece.key)
        if memory is None:
            memory = self._memory[piece.key] = self._live(piece.name, piece.box)
            if tuple(memory.shape) != piece.box.sizes:
                raise RuntimeError(
                    f"live memory of {piece.name!r} has the shape {list(memory.shape)}, expected "
                    f"{list(piece.box.sizes)}: its parameter was replaced or sharded anew"
                )
        return memory

    def _begin_write(self, piece: BoxPiece) -> None:
        """Wait until a piece may be overwritten; change its tensor's version once per gathering."""
        if self._before_write is not None:
            self._before_write(piece)
        if piece.name not in self._written:
            self._written.add(piece.name)
            memory = self._memory_of(piece)
            if not memory.is_inference():
                torch.autograd.graph.increment_version(memory)

    def _try(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function; note its error, with which this rank fails."""
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001  (raised by `updated`, or by all ranks)
            if self._error is None:
                self._error = error

    def _lose(self, error: RuntimeError) -> None:
        if self._lost is None:
            issued, total = self._num_issued, len(self._transfers)
            self._lost = RanksError(
                f"rank {self._rank} of {self._plan.num_ranks} lost another rank at broadcast "
                f"{issued} of {total} of new values, so its parameters are torn. Another rank has "
                "ended, or gave no sign within the time limit. Restart the job, which goes on from "
                f"the newest checkpoint ({reason_of(error)})"
            )
            self._lost.__cause__ = error


def _shaped(parts: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return flat parts in the shapes of views."""
    pairs = zip(parts, views, strict=True)
    return [part if view.dim() == 1 else part.view(view.shape) for part, view in pairs]


def _cause(error: BaseException | None) -> bytes:
    if error is None:
        return b""
    text = f"{type(error).__name__}: {reason_of(error)}"
    return text.encode()[:_MAX_CAUSE_BYTES].decode(errors="ignore").encode()


def range_views(tensor: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
    """Return views that, one after the other in row-major order, are a range of elements.

    A contiguous tensor gives one flat view. Another tensor gives at most two views for each
    dimension and one more, none of which needs a copy of the tensor.
    """
    if start >= stop:
        return []
    if tensor.is_contiguous():
        return [tensor.view(-1)[start:stop]]
    if (start, stop) == (0, tensor.numel()):
        return [tensor]
    row = tensor[0].numel()  # a tensor that is not contiguous has a dimension, and elements
    first, last = -(-start // row), stop // row
    if first > last:  # the range lies within one row
        return range_views(tensor[last], start - last * row, stop - last * row)
    views: list[torch.Tensor] = []
    if start < first * row:
        views += range_views(tensor[first - 1], start - (first - 1) * row, row)
    if first < last:
        views.append(tensor[first:last])
    if last * row < stop:
        views += range_views(tensor[last], 0, stop - last * row)
    return views


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return this rank's live memory of a box, with the version counter of its tensor."""
    if is_dtensor(tensor):
        memory: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return memory.detach()
    return tensor.detach()[box.slices]


def share_boxes(
    boxes: Iterable[OwnedBox],
    tensors: Sequence[tuple[str, str, torch.Tensor]],
    groups: HolderGroups,
    buffer: BounceBuffer,
) -> None:
    """Bring boxes of tensors from their owners to all ranks that hold them. Collective.

    A tensor is given by the name in the boxes, which several may have, its dtype and its memory.
    """
    plan = box_plan(groups.num_ranks, boxes, ((name, dtype) for name, dtype, _ in tensors))

    def memory(number: str, box: Box) -> torch.Tensor:
        return part_of(tensors[int(number)][2], box)

    gathering = Gathering(plan, groups, memory, buffer)
    gathering.updated(0)
    gathering.finish()
