"""Frames: memory for one chunk of every state array, in host memory or on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeAlias

import torch

from gds import ALIGNMENT, Backend, Buffer, IOFuture
from offload.checkpoint.sealed_slot import SlotFiles
from offload.checkpoint.second_read import reread_and_check, unreliable
from offload.device.boundary import HOST
from offload.format.chunk_plan import ChunkPlan
from offload.format.digests import ChunkDigests, Digests, one_by_one
from offload.format.layout import Layout
from offload.format.model_places import ModelPlaces
from offload.stream.model_part import ModelPart
from offload.update.dtypes import DTYPES

Part: TypeAlias = tuple[Buffer, torch.Tensor]
"""Memory as a backend's buffer, and the same memory as a tensor of bytes."""


class FrameMemory(Protocol):
    """Allocator of frames in one kind of memory, with digests and copies for that memory."""

    @property
    def device(self) -> torch.device:
        """Device of the frames' tensors."""
        ...

    def allocate(self, sizes: Sequence[int]) -> list[Part]:
        """Return memory of several lengths in bytes, in the same order."""
        ...

    def footprint_bytes(self, sizes: Sequence[int]) -> int:
        """Return how much memory `allocate` takes for these lengths."""
        ...

    def digests(self, arrays: Mapping[str, torch.Tensor]) -> Digests:
        """Return a digester of a chunk's bytes in this memory, given by array."""
        ...

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return these tensors in host memory: the same tensors, or copies."""
        ...

    def send(
        self, fetched: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy the results of `fetch` back into the original tensors; complete on return."""
        ...


class HostFrames:
    """Frames in host memory, page-locked or not, depending on the backend's allocations."""

    device = HOST

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def allocate(self, sizes: Sequence[int]) -> list[Part]:
        """Return memory of the backend, each length as an allocation of its own."""
        return [self._allocate(nbytes) for nbytes in sizes]

    def footprint_bytes(self, sizes: Sequence[int]) -> int:
        """Return the sum."""
        return sum(sizes)

    def _allocate(self, nbytes: int) -> Part:
        buffer = self._backend.allocate(nbytes)
        if buffer.kind == "device":
            raise ValueError(
                f"the {self._backend.name} backend that was passed in allocates device memory by "
                "default, but host memory is needed, too: let it allocate host memory, pinned or "
                'not (KvikioBackend(memory="pinned")). With Options(placement="device"), the '
                "optimizer itself requests device memory for state"
            )
        return buffer, tensor_of(buffer)

    def digests(self, arrays: Mapping[str, torch.Tensor]) -> ChunkDigests:
        """Return digests that the CPU computes."""
        return ChunkDigests({name: data.numpy().data for name, data in arrays.items()})

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the same tensors."""
        return dict(tensors)

    def send(
        self, fetched: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Do nothing: the tensors are the same."""


def tensor_of(buffer: Buffer) -> torch.Tensor:
    """Return a buffer of host memory as a tensor of bytes, which keeps the memory alive."""
    return torch.frombuffer(buffer.memoryview(), dtype=torch.uint8)


class Frame:
    """Memory for one chunk of every state array, and the transfers that use it."""

    def __init__(
        self,
        memory: FrameMemory,
        layout: Layout,
        parts: Sequence[Part],
        model: ModelPart | None = None,
    ) -> None:
        self.device = memory.device
        self._memory = memory
        self._layout = layout
        self._buffers: dict[str, Buffer] = {}
        self._bytes: dict[str, torch.Tensor] = {}
        for name, part in zip(frame_sizes(layout), parts, strict=True):
            self._buffers[name], self._bytes[name] = part
        self.model = model
        """Memory for the chunk's parameters, if they are written together with the state."""
        self.chunk = -1
        self.futures: list[IOFuture] = []
        self.is_late = False
        """Whether no read was started, because the source does not hold the present chunk yet."""
        self.digests: Digests | None = None
        """Digests of the present chunk, if it will be stored after its update."""

    def buffer(self, plan: ChunkPlan, array: str) -> tuple[Buffer, int]:
        """Return the memory for a chunk of an array, and its offset in the array's file."""
        share = plan.arrays[array]
        return self._buffers[array].slice(share.offset % ALIGNMENT, share.nbytes), share.offset

    def buffers(self, plan: ChunkPlan) -> dict[str, tuple[Buffer, int]]:
        """Return what `buffer` returns, for each state array by name."""
        return {name: self.buffer(plan, name) for name in plan.arrays}

    def bytes_of(self, plan: ChunkPlan, array: str) -> torch.Tensor:
        """Return the memory that `buffer` returns, as a tensor of bytes."""
        share = plan.arrays[array]
        pad = share.offset % ALIGNMENT
        return self._bytes[array][pad : pad + share.nbytes]

    def fill(self, plan: ChunkPlan, write: Callable[[Mapping[str, memoryview]], None]) -> None:
        """Let a function write a chunk, in host memory, instead of reading the chunk from files."""
        tensors = {name: self.bytes_of(plan, name) for name in plan.arrays}
        fetched = self._memory.fetch(tensors)
        write({name: data.numpy().data for name, data in fetched.items()})
        self._memory.send(fetched, tensors)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the present chunk as one flat tensor per state array, in its stored dtype."""
        formats = self._layout.formats
        return {
            name: data.view(DTYPES[formats[name].dtype])
            for name, data in self._chunk_bytes().items()
        }

    @contextmanager
    def copied_to_host(self, *, changes: bool) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield the present chunk's tensors in host memory: the same, or copies of a device's.

        Args:
            changes: Whether the block changes the tensors, so that copies are sent back.
        """
        tensors = self.tensors()
        fetched = self._memory.fetch(tensors)
        yield fetched
        if changes:
            self._memory.send(fetched, tensors)

    def new_digests(self) -> Digests:
        """Return digests of the present chunk, with no bytes final yet."""
        return self.digests_of(self._chunk_bytes())

    def digests_of(self, arrays: Mapping[str, torch.Tensor]) -> Digests:
        """Return digests of bytes that are in this frame, by state array."""
        return self._memory.digests(arrays)

    def _chunk_bytes(self) -> dict[str, torch.Tensor]:
        """Return the memory of the present chunk in each state array, as bytes."""
        plan = self._layout.plans[self.chunk]
        return {name: self.bytes_of(plan, name) for name in plan.arrays}


def allocate_frames(
    memory: FrameMemory, layout: Layout, num_frames: int, places: ModelPlaces | None = None
) -> list[Frame]:
    """Return frames whose memory is allocated together.

    Args:
        memory: Allocator.
        layout: Layout of the chunks.
        num_frames: Number of frames.
        places: Places of the chunks' parameters, for frames in host memory that hold them too.
    """
    sizes = _sizes(layout, places)
    parts = memory.allocate(sizes * num_frames)
    frames = []
    for n in range(num_frames):
        own = parts[n * len(sizes) : (n + 1) * len(sizes)]
        model = None if places is None else ModelPart(places, *own.pop())
        frames.append(Frame(memory, layout, own, model))
    return frames


def frames_bytes(
    memory: FrameMemory, layout: Layout, num_frames: int, places: ModelPlaces | None = None
) -> int:
    """Return the memory in bytes that `allocate_frames` takes."""
    return memory.footprint_bytes(_sizes(layout, places) * num_frames)


def _sizes(layout: Layout, places: ModelPlaces | None) -> list[int]:
    sizes = list(frame_sizes(layout).values())
    return sizes if places is None else [*sizes, places.memory_bytes + ALIGNMENT]


def frame_bytes(layout: Layout) -> int:
    """Return the size in bytes of a frame, which holds one chunk."""
    return sum(frame_sizes(layout).values())


def frame_sizes(layout: Layout) -> dict[str, int]:
    """Return the bytes that a frame needs for each state array."""
    # A range that starts inside a 4 KiB block of the file starts at the same position inside a
    # block of memory. Its aligned part can then be transferred directly.
    return {name: layout.max_chunk_bytes(name) + ALIGNMENT for name in layout.array_names}


def check_read(frame: Frame, source: SlotFiles) -> None:
    """Compare a chunk that was read with its digests.

    If an array differs, it is read a second time, into other host memory, to find out whether the
    drive has the right bytes. If it does, the frame is filled again, and the caller goes on.
    """
    if not frame.futures or frame.chunk >= source.layout.num_chunks:
        return  # nothing was read: the chunk has never been written
    for name in source.layout.array_names:
        expected = source.digests[name][frame.chunk]
        if expected is None:
            continue
        found = _digest_of(frame, source, name)
        if found != expected:
            _look_again(frame, source, name, found, expected)


def _look_again(frame: Frame, source: SlotFiles, name: str, found: str, expected: str) -> None:
    """Read a chunk of an array again; if the drive has it intact, fill the frame again."""
    chunk, file = frame.chunk, source.array(name, frame.chunk)
    buffer, offset = frame.buffer(source.layout.plans[chunk], name)
    digest = partial(source.context.digest, name, chunk)
    reread_and_check(file, offset, buffer.nbytes, digest, found=found, expected=expected)
    file.read_again(buffer, offset, direct=not file.direct).result()
    if _digest_of(frame, source, name) != expected:
        raise unreliable(file, offset, buffer.nbytes)


def _digest_of(frame: Frame, source: SlotFiles, name: str) -> str:
    """Return the digest of a frame's content of one state array, computed on the frame's device."""
    plan = source.layout.plans[frame.chunk]
    digests = frame.digests_of({name: frame.bytes_of(plan, name)})
    return digests.finish(source.context, frame.chunk, one_by_one)[name]
