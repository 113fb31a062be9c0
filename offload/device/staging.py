"""Staging of device tensors in host memory, chunk by chunk, as flat views for the CPU.

The data that a chunk needs is fetched into page-locked memory while the previous chunk is updated.
Changes are sent back while the next chunk is updated. At any time, at most one chunk is fetched and
`_MAX_SENDING` chunks are sent back, so the memory for staging depends only on the chunk size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from offload.device.boundary import (
    HOST,
    Boundary,
    Event,
    boundary_of,
    is_on_device,
    marks_of,
)
from offload.format.chunk_plan import Piece


class FlatTensors:
    """Flat views of tensors; a tensor that has no flat view is copied.

    A writable tensor is also copied if its flat view would not be contiguous. When all elements of
    a writable tensor are finished, its copy is written back; a tensor that is only read is then
    released. Safe for several threads that request different elements.

    Args:
        tensors: Parameters or gradients; None for a missing gradient.
        writable: Whether the tensors may be changed.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None], *, writable: bool) -> None:
        self._tensors = list(tensors)
        self._writable = writable
        self._flat: dict[int, torch.Tensor] = {}
        self._num_left: dict[int, int] = {}
        """Number of elements of each viewed tensor that have not been finished."""
        self._lock = threading.Lock()

    def views(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the elements of each piece, flat, in row-major order.

        Raises:
            RuntimeError: A tensor is missing or has been released.
        """
        found = []
        with self._lock:
            for piece in pieces:
                flat = self._flat.get(piece.parameter)
                if flat is None:
                    flat = self._flatten(piece.parameter)
                is_whole = piece.stop - piece.start == flat.numel()
                found.append(flat if is_whole else flat[piece.start : piece.stop])
        return found

    def _flatten(self, index: int) -> torch.Tensor:
        # reshape returns a view if one exists, and a copy otherwise
        flat = self._tensor(index).detach().reshape(-1)
        if self._writable:
            flat = flat.contiguous()
        self._flat[index] = flat
        self._num_left[index] = flat.numel()
        return flat

    def _tensor(self, index: int) -> torch.Tensor:
        tensor = self._tensors[index]
        if tensor is None:
            raise RuntimeError(f"tensor {index} was requested, but this pass has no such tensor")
        return tensor

    def is_staged(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        """Return whether a tensor's values come to host memory chunk by chunk."""
        return False

    def tensor(self, index: int) -> torch.Tensor | None:
        """Return a tensor itself; None if it is missing or has been released."""
        return self._tensors[index]

    def some(self, indices: Sequence[int]) -> list[torch.Tensor | None]:
        """Return what `tensor` returns, for each index."""
        return [self._tensors[index] for index in indices]

    def replace(self, index: int, tensor: torch.Tensor) -> None:
        """Set a tensor that has not been viewed yet."""
        self._tensors[index] = tensor

    def release(self, indices: Iterable[int]) -> None:
        """Drop tensors that have not been viewed, and are not needed any more."""
        for index in indices:
            self._tensors[index] = None

    def finish(self, pieces: Sequence[Piece]) -> None:
        """Report that elements of pieces, which have been viewed, are not used any more."""
        ended = []
        with self._lock:
            for piece in pieces:
                index = piece.parameter
                self._num_left[index] -= piece.stop - piece.start
                if self._num_left[index]:
                    continue
                del self._num_left[index]
                flat, tensor = self._flat.pop(index), self._tensors[index]
                if not self._writable:
                    self._tensors[index] = None
                elif tensor is not None and not tensor.is_contiguous():
                    ended.append((tensor, flat))
        for tensor, flat in ended:
            tensor.detach().copy_(flat.view(tensor.shape))


_MAX_SENDING = 2
_PIECE_ALIGNMENT = 64
"""Alignment in bytes of each part in staging memory, for the widest loads of the CPU."""


class Traffic:
    """Counts the bytes that cross between host and devices. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.to_host_bytes = 0
        self.to_device_bytes = 0
        self.peak_bytes = 0
        """Maximal host memory, in bytes, held at one time for both directions together."""
        self._held_bytes = 0

    def fetched(self, nbytes: int) -> None:
        """Count bytes that are copied to the host."""
        with self._lock:
            self.to_host_bytes += nbytes

    def sent(self, nbytes: int) -> None:
        """Count bytes that are copied to a device."""
        with self._lock:
            self.to_device_bytes += nbytes

    def hold(self, nbytes: int) -> None:
        """Count bytes of host memory that are taken; a negative number counts released bytes."""
        with self._lock:
            self._held_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self._held_bytes)


@dataclass(slots=True, eq=False)
class _Part:
    """A range of one tensor, with its copy in host memory."""

    index: int
    start: int
    stop: int
    host: torch.Tensor
    changes: bool


@dataclass(slots=True, eq=False)
class _Batch:
    """Parts of one chunk that cross from or to one device."""

    boundary: Boundary
    memory: torch.Tensor
    parts: list[_Part]
    event: Event
    """End of the fetch; after `leave`, end of the copies back to the device."""
    held_bytes: int
    """Host memory that the batch takes."""


@dataclass(slots=True)
class _DevicePieces:
    """Pieces of a chunk on one device, and the events that their fetch waits for."""

    pieces: list[Piece] = field(default_factory=list)
    after: list[Event] = field(default_factory=list)


class StagedTensors(FlatTensors):
    """Flat views of tensors, some of which are on a device.

    The order for each chunk is `prepare`, `arrive`, then `views` from any thread, then `leave`.
    `FlatTensors` handles the tensors in host memory.

    Args:
        tensors: Parameters or gradients; None for a missing gradient. Fetches read them after the
            work that is queued now on the calling thread's current streams.
        writable: Whether changes are sent back.
        traffic: Counter of the bytes that cross.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor | None], *, writable: bool, traffic: Traffic
    ) -> None:
        super().__init__(tensors, writable=writable)
        self._traffic = traffic
        self._batches: dict[int, list[_Batch]] = {}
        self._sending: deque[_Batch] = deque()
        self._parts: dict[int, deque[_Part]] = {}
        self._begun = marks_of(tensors)
        self._given: dict[int, Event] = {}
        self._copies: dict[int, torch.Tensor] = {}
        """Contiguous copies, on the device, of tensors that are not contiguous."""
        self._left: dict[int, int] = {}
        """Number of elements that `leave` has not handled yet, by index of the tensor."""

    def __del__(self) -> None:
        # If a pass has failed, the memory of its chunks is released together with the pass.
        for batches in self._batches.values():
            for batch in batches:
                self._traffic.hold(-batch.held_bytes)
        for batch in self._sending:
            self._traffic.hold(-batch.held_bytes)

    def replace(self, index: int, tensor: torch.Tensor) -> None:
        """Set a tensor that has not been viewed yet.

        Fetches read the tensor after the work that is queued now on the current stream.
        """
        super().replace(index, tensor)
        if is_on_device(tensor):
            self._given[index] = boundary_of(tensor.device).now()

    def is_staged(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on a device."""
        return is_on_device(tensor)

    def prepare(self, chunk: int, pieces: Sequence[Piece], changes: Callable[[int], bool]) -> None:
        """Begin to fetch the data that a chunk needs, unless the fetch has begun already.

        Args:
            chunk: Index of the chunk.
            pieces: Parts of parameters to fetch; each parameter at most once.
            changes: Function that returns whether a parameter, given by its index, is sent back.
        """
        if chunk in self._batches:
            return
        while len(self._sending) >= _MAX_SENDING:
            self._end(self._sending.popleft())
        by_device: dict[torch.device, _DevicePieces] = {}
        for piece in pieces:
            tensor = self._tensors[piece.parameter]
            if tensor is None or not is_on_device(tensor) or piece.start == piece.stop:
                continue
            wanted = by_device.setdefault(tensor.device, _DevicePieces())
            wanted.pieces.append(piece)
            if piece.parameter in self._given:
                wanted.after.append(self._given[piece.parameter])
        self._batches[chunk] = [
            self._fetch(device, wanted, changes) for device, wanted in by_device.items()
        ]

    def arrive(self, chunk: int) -> None:
        """Wait until all data that `prepare` requested for a chunk is in host memory."""
        for batch in self._batches[chunk]:
            batch.boundary.wait(batch.event)

    def leave(self, chunk: int) -> None:
        """Begin to send a chunk's changes back. The chunk's views must not be used afterwards."""
        for batch in self._batches.pop(chunk):
            copies = []
            for part in batch.parts:
                self._parts[part.index].popleft()
                tensor = self._tensor(part.index)
                if part.changes and self._writable:
                    copies.append((part.host, self._flat_of(part.index)[part.start : part.stop]))
                    self._traffic.sent(part.host.nbytes)
                self._left[part.index] -= part.stop - part.start
                if self._left[part.index] == 0:
                    copy = self._copies.pop(part.index, None)
                    if copy is not None and part.changes and self._writable:
                        copies.append((copy.view(tensor.shape), tensor.detach()))
                    if not self._writable:
                        self._tensors[part.index] = None  # this gradient has been applied
            if copies:
                batch.event = batch.boundary.send(copies, [])
                self._sending.append(batch)
            else:
                self._end(batch, sent=False)

    def fence(self) -> None:
        """Make the calling thread's current streams wait for all sends so far."""
        for device in self._begun:
            boundary_of(device).fence()

    def views(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the elements of each piece, flat, in host memory."""
        staged = [self._staged(piece) for piece in pieces]
        rest = [p for p, view in zip(pieces, staged, strict=True) if view is None]
        others = iter(super().views(rest))
        return [next(others) if view is None else view for view in staged]

    def _staged(self, piece: Piece) -> torch.Tensor | None:
        """Return a piece in staging memory; None if its tensor is in host memory already."""
        for part in self._parts.get(piece.parameter, ()):
            if part.start <= piece.start and piece.stop <= part.stop:
                return part.host[piece.start - part.start : piece.stop - part.start]
        return None

    def finish(self, pieces: Sequence[Piece]) -> None:
        """Report that elements of pieces, which have been viewed, are not used any more."""
        super().finish([piece for piece in pieces if piece.parameter not in self._left])

    def _fetch(
        self, device: torch.device, wanted: _DevicePieces, changes: Callable[[int], bool]
    ) -> _Batch:
        boundary = boundary_of(device)
        after = wanted.after
        if device in self._begun:
            after = [self._begun[device], *after]
        sizes = [
            (piece.stop - piece.start) * self._tensor(piece.parameter).itemsize
            for piece in wanted.pieces
        ]
        places, total = [], 0
        for size in sizes:
            places.append(total)
            total += -(-size // _PIECE_ALIGNMENT) * _PIECE_ALIGNMENT
        memory = boundary.allocate(total)
        held_bytes = boundary.held_bytes(total)
        self._traffic.hold(held_bytes)
        parts, copies = [], []
        for piece, place, size in zip(wanted.pieces, places, sizes, strict=True):
            index, tensor = piece.parameter, self._tensor(piece.parameter)
            if index not in self._left:
                self._left[index] = tensor.numel()
                if not tensor.is_contiguous():
                    self._copies[index] = boundary.flatten(tensor, after)
            host = memory[place : place + size].view(tensor.dtype)
            part = _Part(index, piece.start, piece.stop, host, changes(index))
            parts.append(part)
            self._parts.setdefault(index, deque()).append(part)
            copies.append((self._flat_of(index)[piece.start : piece.stop], host))
        self._traffic.fetched(sum(sizes))
        return _Batch(boundary, memory, parts, boundary.fetch(copies, after), held_bytes)

    def _end(self, batch: _Batch, *, sent: bool = True) -> None:
        if sent:
            batch.boundary.wait(batch.event)
        self._traffic.hold(-batch.held_bytes)

    def _flat_of(self, index: int) -> torch.Tensor:
        copy = self._copies.get(index)
        return self._tensor(index).detach().view(-1) if copy is None else copy


def flat_tensors(
    tensors: Sequence[torch.Tensor | None], *, writable: bool, traffic: Traffic
) -> FlatTensors:
    """Return flat views of parameters or gradients, on any device; see `StagedTensors`."""
    if {tensor.device.type for tensor in tensors if tensor is not None} - {HOST.type}:
        return StagedTensors(tensors, writable=writable, traffic=traffic)
    return FlatTensors(tensors, writable=writable)


@contextmanager
def on_host(tensors: object, chunk: int, pieces: Sequence[Piece]) -> Iterator[None]:
    """Stage parts of tensors in host memory for the block, and send all of them back after it.

    Does nothing if `tensors` are not `StagedTensors`.

    Args:
        tensors: Source of the views.
        chunk: Index of the chunk.
        pieces: Parts of parameters to stage; each parameter at most once.
    """
    if not isinstance(tensors, StagedTensors):
        yield
        return
    tensors.prepare(chunk, pieces, lambda _: True)
    tensors.arrive(chunk)
    yield
    tensors.leave(chunk)
