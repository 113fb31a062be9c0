"""Memory for one chunk of every state array."""

from __future__ import annotations

import torch

from gds import ALIGNMENT, Backend, Buffer, IOFuture
from offload.digests import ChunkDigests
from offload.layout import Layout

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""torch dtypes of what state arrays hold, by safetensors code."""


class Frame:
    """Memory for one chunk of every state array, and the transfers that use it."""

    def __init__(self, backend: Backend, layout: Layout) -> None:
        self._layout = layout
        self._buffers: dict[str, Buffer] = {}
        self._bytes: dict[str, torch.Tensor] = {}
        for name, nbytes in frame_sizes(layout).items():
            buffer = backend.allocate(nbytes)
            if buffer.kind == "device":
                raise ValueError(
                    f"the {backend.name} backend that was passed in allocates device memory, and "
                    "state is updated on the CPU in this version: make it allocate host memory, "
                    "pinned or not"
                )
            self._buffers[name] = buffer
            self._bytes[name] = torch.frombuffer(buffer.memoryview(), dtype=torch.uint8)
        self.chunk = -1
        self.futures: list[IOFuture] = []
        self.digests: ChunkDigests | None = None
        """Of what is being written to the present chunk, if it is to be stored after that."""

    def buffer(self, layout: Layout, array: str, chunk: int) -> tuple[Buffer, int]:
        """Return the memory for a chunk of an array, and its offset in the array's file."""
        offset, nbytes = layout.byte_range(array, chunk)
        return self._buffers[array].slice(offset % ALIGNMENT, nbytes), offset

    def memoryviews(self) -> dict[str, memoryview]:
        """Return the bytes of the present chunk of each state array."""
        return {
            name: self.buffer(self._layout, name, self.chunk)[0].memoryview()
            for name in self._buffers
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the present chunk as one flat tensor per state array, as it is stored."""
        out = {}
        for name, data in self._bytes.items():
            offset, nbytes = self._layout.byte_range(name, self.chunk)
            pad = offset % ALIGNMENT
            dtype = DTYPES[self._layout.formats[name].dtype]
            out[name] = data[pad : pad + nbytes].view(dtype)
        return out


def frame_bytes(layout: Layout) -> int:
    """Return the bytes of a frame: what one chunk takes in memory."""
    return sum(frame_sizes(layout).values())


def frame_sizes(layout: Layout) -> dict[str, int]:
    """Return the bytes that a frame needs for each state array."""
    # A range that starts inside a 4 KiB block is kept at the same position inside a block of
    # memory, so that its aligned part can still be transferred directly.
    return {name: layout.max_chunk_bytes(name) + ALIGNMENT for name in layout.array_names}
