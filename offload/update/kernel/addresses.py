"""Addresses of the values of parameters and gradients, which the runs of a kernel call point to."""

from __future__ import annotations

import numpy as np
import torch

from offload.device.boundary import is_on_device
from offload.device.flat_tensors import FlatTensors
from offload.format.chunk_plan import Piece
from offload.update.kernel.forms import DTYPES
from offload.update.kernel.piece_table import Numbers, PieceTable


class Addresses:
    """Addresses of the values of parameters, or of gradients.

    Values are used in place if a tensor is contiguous and in host memory. Flat views of all others
    are taken piece by piece.

    Args:
        tensors: Flat views of the tensors.
        num: Number of parameters.
    """

    def __init__(self, tensors: FlatTensors, num: int) -> None:
        self.tensors = tensors
        self.plain = np.zeros(num, dtype=bool)
        """Whether a tensor is used in place."""
        self.has_memory = np.zeros(num, dtype=bool)
        """Whether the values of a tensor are in memory that can be addressed."""
        self.pointers = np.zeros(num, dtype=np.uint64)
        """Address of the first value of a tensor that is used in place."""
        self.sizes = np.zeros(num, dtype=np.uint64)
        """Bytes of a value of a tensor that is used in place; 0 for all others."""
        self._is_known = np.zeros(num, dtype=bool)
        self._dtypes = np.zeros(num, dtype=np.uint32)

    def look(self, parameters: Numbers) -> None:
        """Find out which of these tensors can be used in place, and where they are."""
        for index in parameters[~self._is_known[parameters]].tolist():
            tensor = self.tensors.tensor(index)
            self._is_known[index] = True
            self.has_memory[index] = tensor is not None and _has_memory(tensor)
            if (
                tensor is not None
                and self.has_memory[index]
                and (number := DTYPES.get(tensor.dtype)) is not None
                and not is_on_device(tensor)
                and tensor.is_contiguous()
                and not tensor.is_neg()
            ):
                self.plain[index] = True
                self.pointers[index] = tensor.data_ptr()
                self._dtypes[index] = number
                self.sizes[index] = tensor.itemsize

    def addresses(
        self, table: PieceTable, held: list[torch.Tensor]
    ) -> tuple[Numbers, Numbers, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the address of each piece, uint64, and the number of its dtype, uint32.

        The third result has views that the kernel cannot read, such as those of negated or expanded
        tensors, and the copies at the address instead.
        """
        copies = []
        parameters = table.parameters
        found = self.pointers[parameters] + table.starts.astype(np.uint64) * self.sizes[parameters]
        dtypes = self._dtypes[parameters]
        for row in np.flatnonzero(~self.plain[parameters]).tolist():
            (view,) = self.tensors.views([_piece(table, row)])
            if not (view.is_contiguous() and view.dtype in DTYPES and not view.is_neg()):
                dtype = view.dtype if view.dtype in DTYPES else torch.float32
                copy = view.to(dtype).resolve_neg().contiguous()
                copies.append((view, copy))
                view = copy
            held.append(view)
            found[row], dtypes[row] = view.data_ptr(), DTYPES[view.dtype]
        return found, dtypes, copies

    def finish(self, table: PieceTable, rows: Numbers) -> None:
        """Report that pieces, given by their rows, are not used any more."""
        viewed = rows[~self.plain[table.parameters[rows]]]
        self.tensors.finish([_piece(table, row) for row in viewed.tolist()])


def _has_memory(tensor: torch.Tensor) -> bool:
    if is_on_device(tensor):
        return True  # its values are staged in host memory
    # A subclass that handles torch's operations itself may only stand for other tensors.
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    return tensor.data_ptr() != 0  # zero for `torch._efficientzerotensor`


def _piece(table: PieceTable, row: int) -> Piece:
    start = int(table.starts[row])
    return Piece(int(table.parameters[row]), start, start + int(table.lengths[row]), 0)
