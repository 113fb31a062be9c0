"""The optimizer state of one parameter of a checkpoint, as FP32, whatever it is stored as."""

from __future__ import annotations

import errno
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from offload.ambient import in_neutral
from offload.codecs import Scratch, decode_blocks, join_master
from offload.errors import CheckpointNotFoundError
from offload.formats import MASTER, MASTER_LOW, scale_name
from offload.frame import DTYPES
from offload.layout import Layout, array_file_name
from offload.slot import MODEL_NAME

if TYPE_CHECKING:
    from offload.checkpoint import Checkpoint


@in_neutral
def read_state(checkpoint: Checkpoint, name: str) -> dict[str, torch.Tensor]:
    """Read the FP32 master and state arrays of a parameter; see `Checkpoint.read_state`."""
    layout = checkpoint.manifest.layout
    index = next((i for i, p in enumerate(layout.parameters) if p.name == name), None)
    if index is None:
        names = ", ".join(p.name for p in layout.parameters[:8])
        raise CheckpointNotFoundError(
            errno.ENOENT,
            f"no trainable parameter {name!r} here (it has: {names}, ...)",
            checkpoint.path,
        )
    spec = layout.parameters[index]
    reader = _Reader(checkpoint, index)
    out: dict[str, torch.Tensor] = {}
    scratch = Scratch()
    for array in spec.arrays:
        if array == MASTER_LOW:
            master = torch.empty(spec.num_elements, dtype=torch.float32, device="cpu")
            live = reader.parameter().view(torch.bfloat16)
            join_master(live, reader.array(array), master, scratch=scratch)
            out[MASTER] = master
        elif layout.formats[array].block > 1:
            continue  # scales, of the array before
        elif layout.formats[array].dtype in ("I8", "U8"):
            values = torch.empty(spec.num_elements, dtype=torch.float32, device="cpu")
            codes, scales = reader.array(array), reader.array(scale_name(array))
            for elements, blocks in _runs(layout, index):
                decode_blocks(codes[elements], scales[blocks], values[elements], scratch=scratch)
            out[array] = values
        else:
            out[array] = reader.array(array).float()
    if MASTER not in out:  # an FP32 parameter is its own master
        out[MASTER] = reader.parameter().view(torch.float32)
    return {array: values.view(spec.shape) for array, values in out.items()}


class _Reader:
    """Reads what is stored of one parameter."""

    def __init__(self, checkpoint: Checkpoint, index: int) -> None:
        self._checkpoint = checkpoint
        self._layout = checkpoint.manifest.layout
        self._index = index

    def parameter(self) -> torch.Tensor:
        """Return the bytes of the live parameter."""
        header = self._layout.model_header
        entry = header.entries[self._layout.parameters[self._index].name]
        path = f"{self._checkpoint.path}/{MODEL_NAME}"
        return self._read(path, header.data_start + entry.start, entry.nbytes)

    def array(self, array: str) -> torch.Tensor:
        """Return all stored values of an array, flat, from all drives."""
        layout, form = self._layout, self._layout.formats[array]
        start = layout.starts[self._index]
        stop = layout.starts[self._index + 1]
        parts = []
        for chunk in range(start // layout.chunk_elements, layout.num_chunks):
            first, last = layout.chunk_range(chunk)
            if first >= stop:
                break
            offset, _ = layout.byte_range(array, chunk)
            before, _ = layout.array_range(array, first, first)
            begin, end = layout.array_range(array, max(first, start), min(last, stop))
            path = f"{self._places[layout.drives[chunk]]}/{array_file_name(array)}"
            at = offset + (begin - before) * form.nbytes
            parts.append(self._read(path, at, (end - begin) * form.nbytes))
        data = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")
        return data.view(DTYPES[form.dtype])

    @property
    def _places(self) -> list[str]:
        return [self._checkpoint.path, *self._checkpoint.parts]

    def _read(self, path: str, offset: int, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        file = self._checkpoint.backend.open(path)
        try:
            return torch.frombuffer(bytearray(file.read_bytes(offset, nbytes)), dtype=torch.uint8)
        finally:
            file.close()


def _runs(layout: Layout, index: int) -> list[tuple[slice, slice]]:
    """Return the elements of a parameter in each chunk, and the 8-bit blocks that they make."""
    scale = next(n for n in layout.parameters[index].arrays if layout.formats[n].block > 1)
    start, stop = layout.starts[index : index + 2]
    edge = start + -start % layout.chunk_elements
    cuts = sorted({start, stop, *range(edge, stop, layout.chunk_elements)})
    base, _ = layout.array_range(scale, start, start)
    out = []
    for first, last in pairwise(cuts):
        begin, end = layout.array_range(scale, first, last)
        out.append((slice(first - start, last - start), slice(begin - base, end - base)))
    return out
