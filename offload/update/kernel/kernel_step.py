"""One step of an optimizer by the update kernel: one call for each chunk and thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from offload.device.staging import FlatTensors
from offload.format.arrays import MASTER, MASTER_LOW, scale_name
from offload.format.chunk_plan import Piece
from offload.format.digests import LEAF_BYTES, Digests
from offload.format.layout import Layout
from offload.update.kernel.forms import (
    DTYPES,
    GROUP,
    MAX_FACTORS,
    MOMENTS,
    RUN,
    STATES,
    Job,
    group_values,
    why_not,
)
from offload.update.kernel.loading import Library
from offload.update.kernel.piece_table import LayoutTables, Numbers, PieceTable
from offload.update.pool import BlockContext
from offload.update.step_code import Call, LoadedChunk, PieceNumbers, StepCode
from offload.update.step_keys import Key, StepInputs, StepKeys

_SCALES = {name: scale_name(name) for names in MOMENTS.values() for name in names}
"""Name of the array with the scales of each moment that the kernel knows."""

NOT_HERE = -1
"""Group of a parameter that the kernel does not step."""

PART_ELEMENTS = LEAF_BYTES // 4
"""The elements of a chunk are divided among threads at multiples of this number, so that most
leaves belong to one thread."""


class UpdateKernel:
    """The kernel, for one class of optimizers and one kind of square root."""

    def __init__(
        self, library: Library, root: int, optimizer_class: type[torch.optim.Optimizer]
    ) -> None:
        self.library = library
        self.root = root
        self.optimizer_class = optimizer_class
        self._tables: LayoutTables | None = None

    def tables(self, layout: Layout) -> LayoutTables:
        """Return the tables of a layout; those of the last layout are kept."""
        if self._tables is None or self._tables.layout is not layout:
            self._tables = LayoutTables(layout)
        return self._tables


@dataclass(slots=True, eq=False)
class KernelCall:
    """One call of the kernel, for some runs of a chunk."""

    library: Library
    job: Job
    runs: Numbers
    """Runs that the job points to."""

    groups: Numbers
    """Groups that the job points to."""

    digests: Digests | None
    leaves: dict[str, tuple[Numbers, Numbers]] = field(default_factory=dict)
    """Digests of each array's leaves, and whether each is known, which the kernel writes."""

    held: list[torch.Tensor] = field(default_factory=list)
    """Views and copies that the runs point into."""

    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Views of parameters that the kernel cannot write to, and the copies that it steps instead."""

    def run(self, _: BlockContext) -> None:
        """Step the runs, and pass on the digests of the leaves that have been completed."""
        self.library.update(self.job)
        for view, copy in self.copies:
            view.copy_(copy)
        if self.digests is not None:
            for name, (digests, is_known) in self.leaves.items():
                for number in np.flatnonzero(is_known).tolist():
                    self.digests.digested(name, number, digests[number].tobytes())


class KernelStep(StepCode):
    """The part of one step that the kernel takes."""

    def __init__(
        self,
        kernel: UpdateKernel,
        keys: StepKeys,
        inputs: StepInputs,
        live: FlatTensors,
        gradients: FlatTensors,
    ) -> None:
        layout = inputs.layout
        num = len(layout.parameters)
        self._kernel = kernel
        self._keys = keys
        self._factors = list(inputs.factors)
        refusal = ""
        if len(self._factors) > MAX_FACTORS:
            refusal = f"gradients are multiplied {len(self._factors)} times"
        self._reasons = [refusal or why_not(kernel.optimizer_class, group) for group in keys.groups]
        self._tables = kernel.tables(layout)
        self._parameters = inputs.parameters
        self._live = Addresses(live, num)
        self._gradients = Addresses(gradients, num)
        self._num_left = self._tables.num_elements.copy()
        self._group_of = np.full(num, NOT_HERE, dtype=np.int64)
        self._groups = np.zeros(0, dtype=GROUP)
        self._group_numbers: dict[Key, int] = {}
        """Group of each key of a parameter that the kernel steps, as an index into `_groups`."""
        self._moments = [n for n in MOMENTS[kernel.optimizer_class] if n in layout.array_names]
        is_rounded = layout.state_dtype == "bfloat16" and not refusal
        self._rounding_keys = inputs.rounding_keys(self._moments) if is_rounded else []
        self._state = STATES[layout.state_dtype]
        for index, gradient in enumerate(inputs.gradients):
            if gradient is not None:
                self.add_gradient(index)

    def why_not(self, group: int) -> str:
        """Return why the kernel cannot step a group; empty if it can."""
        return self._reasons[group]

    def add_gradient(self, index: int) -> None:
        """Let the kernel step a parameter, if it can and if there is state."""
        key = self._keys.of[index]
        if key.scalars is not None and not self._reasons[key.group]:
            self._group_of[index] = self._group_numbers.setdefault(key, len(self._group_numbers))

    def calls(
        self, chunk: LoadedChunk, numbers: PieceNumbers
    ) -> tuple[Sequence[Call], PieceNumbers]:
        """Take the pieces that the kernel steps, and divide their elements among the threads."""
        if not self._group_numbers:
            return [], numbers
        every = self._tables.pieces(chunk.number)
        parameters = every[numbers]
        if len(parameters) < len(every):  # other code has taken the rest
            self._group_of[np.delete(every, numbers)] = NOT_HERE
        self._look(parameters[self._group_of[parameters] != NOT_HERE])
        others = numbers[self._group_of[parameters] == NOT_HERE]
        self._set_groups()
        table = self._tables.chunk(chunk.number)
        is_here = self._group_of[table.parameters] != NOT_HERE
        if not is_here.all():
            table = table.take(is_here)
        num_elements = int(table.lengths.sum())
        most = -(-num_elements // (chunk.num_threads * PART_ELEMENTS)) * PART_ELEMENTS
        is_one = 0 < num_elements <= most
        parts = [table] if is_one else table.parts(most, self._tables.formats)
        return [self._call(part, chunk.arrays, chunk.digests).run for part in parts], others

    def done(self, chunk: LoadedChunk) -> None:
        """Report that parameters have changed, and which tensors are not used any more."""
        if not self._group_numbers:
            return
        table = self._tables.chunk(chunk.number)
        rows = np.flatnonzero(self._group_of[table.parameters] != NOT_HERE)
        changed = table.parameters[rows]
        np.subtract.at(self._num_left, changed, table.lengths[rows])
        increment_version([self._parameters[i] for i in changed.tolist() if self._live.plain[i]])
        self._live.finish(table, rows)
        self._gradients.finish(table, rows)
        ended = changed[self._num_left[changed] == 0]
        self._gradients.tensors.release(ended[self._gradients.plain[ended]].tolist())

    def _set_groups(self) -> None:
        """Compute the hyper-parameters of all groups, unless those of each group are known."""
        keys = list(self._group_numbers)  # backward passes may add others at the same time
        if len(keys) == len(self._groups):
            return
        optimizer_class, groups = self._kernel.optimizer_class, self._keys.groups
        values = [
            group_values(optimizer_class, groups[key.group], self._keys.scalars_after(key))
            for key in keys
        ]
        with np.errstate(over="ignore"):  # FP32 has infinity for such a number, as in torch
            self._groups = np.array(values, dtype=GROUP)

    def _look(self, parameters: Numbers) -> None:
        """Look at the tensors of parameters, and leave to torch's code what only it can step.

        These are tensors without memory of their own, and parameters that share memory with their
        gradient: torch reads some elements of such a gradient after it has changed them.
        """
        live, gradients = self._live, self._gradients
        live.look(parameters)
        gradients.look(parameters)
        here = live.has_memory[parameters] & gradients.has_memory[parameters]
        begin, gradient = live.pointers[parameters], gradients.pointers[parameters]
        num = self._tables.num_elements[parameters].astype(np.uint64)
        end = begin + num * live.sizes[parameters]
        gradient_end = gradient + num * gradients.sizes[parameters]
        here &= (begin >= gradient_end) | (gradient >= end)
        viewed = ~(live.plain[parameters] & gradients.plain[parameters]) & here
        for row in np.flatnonzero(viewed).tolist():
            here[row] = not self._share_storage(int(parameters[row]))
        self._group_of[parameters[~here]] = NOT_HERE

    def _share_storage(self, index: int) -> bool:
        """Return whether a parameter and its gradient are views of the same storage."""
        live, gradient = self._live.tensors.tensor(index), self._gradients.tensors.tensor(index)
        if live is None or gradient is None or self._live.tensors.is_staged(live):
            return False
        if self._gradients.tensors.is_staged(gradient):
            return False
        return bool(live.untyped_storage()._cdata == gradient.untyped_storage()._cdata)

    def _call(
        self, table: PieceTable, arrays: Mapping[str, torch.Tensor], digests: Digests | None
    ) -> KernelCall:
        job, runs = Job(), np.zeros(len(table.parameters), dtype=RUN)
        call = KernelCall(self._kernel.library, job, runs, self._groups, digests)
        parameters = table.parameters
        runs["live"], runs["live_dtype"], call.copies = self._live.addresses(table, call.held)
        addresses = self._gradients.addresses(table, call.held)
        runs["gradient"], runs["gradient_dtype"], _ = addresses
        firsts = table.starts + self._tables.rounding_starts[parameters]
        runs["num_elements"], runs["first_element"] = table.lengths, firsts
        runs["group"] = self._group_of[parameters]
        runs["master_form"] = self._tables.master_forms[parameters]
        for number, name in enumerate((MASTER, MASTER_LOW)):
            if name in arrays:
                array = job.masters[number]
                self._point(call, array, runs["master"], name, table, arrays[name])
        for number, name in enumerate(self._moments):
            array = job.moments[number]
            self._point(call, array, runs["moments"][:, number], name, table, arrays[name])
            if (scale := _SCALES[name]) in arrays:
                array = job.scales[number]
                self._point(call, array, runs["scales"][:, number], scale, table, arrays[scale])
        if self._rounding_keys:
            pieces = np.stack([parameters, firsts, firsts + table.lengths], axis=1)
            for number, keys in enumerate(self._rounding_keys):
                runs["keys"][:, number] = keys.of_runs(pieces)
        job.runs, job.num_runs = runs.ctypes.data, len(runs)
        job.groups, job.num_groups = self._groups.ctypes.data, len(self._groups)
        job.state, job.root = self._state, self._kernel.root
        job.num_factors = len(self._factors)
        for number, factor in enumerate(self._factors):
            job.factors[number] = factor
        return call

    def _point(
        self,
        call: KernelCall,
        array: Any,
        addresses: Numbers,
        name: str,
        table: PieceTable,
        values: torch.Tensor,
    ) -> None:
        """Fill in the addresses of an array's values in each run, and where its digests go."""
        base, offsets = values.data_ptr(), table.offsets[name]
        found = offsets >= 0
        addresses[found] = offsets[found].astype(np.uint64) + np.uint64(base)
        if call.digests is None:
            return
        num_leaves = -(-values.nbytes // LEAF_BYTES)
        leaves = np.zeros(num_leaves, dtype="<u8"), np.zeros(num_leaves, dtype=np.uint8)
        call.leaves[name] = leaves
        array.data, array.num_bytes = base, values.nbytes
        array.digests, array.is_known = (column.ctypes.data for column in leaves)


class Addresses:
    """Addresses of the values of parameters, or of gradients.

    Values are used in place if a tensor is contiguous and in host memory. Flat views of all others
    are taken piece by piece.
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
        new = parameters[~self._is_known[parameters]].tolist()
        for index, tensor in zip(new, self.tensors.some(new), strict=True):
            self._is_known[index] = True
            if tensor is None:
                continue
            # Then its values are staged in host memory.
            is_staged = self.tensors.is_staged(tensor)
            self.has_memory[index] = is_staged or _has_memory(tensor)
            if (
                self.has_memory[index]
                and not is_staged
                and (number := DTYPES.get(tensor.dtype)) is not None
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
        if len(viewed):
            self.tensors.finish([_piece(table, row) for row in viewed.tolist()])


def _has_memory(tensor: torch.Tensor) -> bool:
    # A subclass that handles torch's operations itself may only stand for other tensors.
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    return tensor.data_ptr() != 0  # zero for `torch._efficientzerotensor`


def _piece(table: PieceTable, row: int) -> Piece:
    start = int(table.starts[row])
    return Piece(int(table.parameters[row]), start, start + int(table.lengths[row]), 0)
