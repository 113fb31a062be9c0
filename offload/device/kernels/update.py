"""One optimizer step of pieces of parameters in device memory, in a single pass.

The arithmetic is torch's on CUDA: that of its foreach step or, with ``fused=True`` in the group,
that of its fused kernel. `docs/device.md` specifies the results to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch

from offload.device.kernels.forms import (
    BLOCK_ELEMENTS,
    GROUPS_PER_TURN,
    MAX_FACTORS,
    STATE_DTYPES,
    THREADS,
    Form,
    form_for,
)
from offload.device.kernels.loading import Kernel, defines, load, update_source
from offload.format import rounding_keys
from offload.format.arrays import MASTER, MASTER_LOW, scale_name

_IS_NEW, _MAXIMIZE, _NESTEROV, _DECAY, _SCALED = (1 << bit for bit in range(5))
_QUAD = 4

_MAX_TURNS = 1 << 19
"""Number of turns of a tile: the kernel counts its elements with 32 bits."""

_TILES_PER_PROCESSOR = 32
"""Maximal number of thread blocks to launch per multiprocessor, which runs 2 to 4 at a time. With
fewer blocks, a thread steps more elements with values that it computes once, such as the bias
corrections of `fused`, and requests more of them while it computes."""

MAX_PIECES = 48
"""Number of pieces that one launch can step: their table is passed by value."""

PIECE = np.dtype(
    [
        ("live", np.uint64),
        ("gradient", np.uint64),
        ("num_elements", np.uint64),
        ("first_element", np.uint64),
        ("at", np.uint64),
        ("scale_at", np.uint32),
        ("first_tile", np.uint32),
        ("keys", np.uint32, 6),
        ("aligned", np.uint32),
        ("unused", np.uint32),
    ]
)
"""Layout of `struct Piece` in `arguments.cuh`."""

ARGUMENTS = np.dtype(
    [
        ("master", np.uint64),
        ("moments", np.uint64, 3),
        ("scales", np.uint64, 3),
        ("hyper", np.float32, 8),
        ("wide_hyper", np.float64, 4),
        ("factors", np.float32, MAX_FACTORS),
        ("flags", np.uint32),
        ("num_pieces", np.uint32),
        ("groups_per_tile", np.uint32),
        ("unused", np.uint32),
        ("pieces", PIECE, MAX_PIECES),
    ]
)
"""Layout of `struct Arguments` in `arguments.cuh`."""

_Numbers: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRun:
    """Pieces of parameters that are stepped in one call: flat, contiguous tensors on one device.

    They share hyper-parameters, scalar state and dtypes. Their state lies end to end.
    """

    live: Sequence[torch.Tensor]
    """Each piece's elements of its parameter, shape (n,); updated in place."""

    gradients: Sequence[torch.Tensor]
    """FP32, bf16 or fp16, of the same shapes; unchanged."""

    arrays: Mapping[str, torch.Tensor]
    """Stored values of all pieces by the array's name in the layout (``master``, ``exp_avg``,
    ``exp_avg_scale``, ...); updated in place. Blocks of 32 elements of 8-bit state are counted from
    each piece's first element, which must be the start of a block in the format."""

    first_elements: Sequence[int]
    """Index of each piece's first element, as the keys count it. Stochastic rounding depends on
    it."""

    keys: Callable[[_Numbers, _Numbers], Sequence[_Numbers]] | None = None
    """Function that returns the keys of stochastic rounding: for each moment, uint64 of shape (n,).
    Its arguments are indices of pieces and the first elements that are rounded, both of shape (n,).
    Only needed for bf16 state."""

    is_new: bool = False
    """Whether there is no state yet. The step then begins with arrays of zeros, whatever they
    hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of the update kernel."""

    form: Form
    arguments: _Numbers = field(repr=False)
    """Structure of arguments, of dtype `ARGUMENTS` and shape (1,)."""

    num_tiles: int
    """Number of blocks of threads."""


def form_of_run(
    optimizer_class: type[torch.optim.Optimizer], group: Mapping[str, Any], run: DeviceRun
) -> Form:
    """Return the variant of the kernel for a run, which must not be empty."""
    form = form_for(
        optimizer_class,
        group,
        live=run.live[0].dtype,
        gradient=run.gradients[0].dtype,
        arrays={name: array.dtype for name, array in run.arrays.items()},
    )
    _check(form, run)
    return form


def launches(
    optimizer_class: type[torch.optim.Optimizer],
    group: Mapping[str, Any],
    run: DeviceRun,
    *,
    step: int,
    factors: Sequence[float] = (),
    max_tiles: int = 1 << 16,
) -> Iterator[Launch]:
    """Yield the launches for a run: one for every `MAX_PIECES` pieces."""
    if len(factors) > MAX_FACTORS:
        raise ValueError(f"the kernel multiplies by {MAX_FACTORS} factors, not by {len(factors)}")
    if not sum(map(torch.Tensor.numel, run.live)):
        return
    form = form_of_run(optimizer_class, group, run)
    common = np.zeros(1, ARGUMENTS)
    record = common[0]
    _set_arrays(record, form, run)
    hyper = _hyper(form, group, step)
    if form.computes_in_fp64:
        record["wide_hyper"][: len(hyper)] = hyper
    maximize = bool(group["maximize"])
    scale, clip = (*factors, 1.0, 1.0)[:2]
    if maximize and not form.computes_in_fp64:
        scale = -scale
    with np.errstate(over="ignore"):  # FP32 has infinity for such a number, as in torch
        record["hyper"][: len(hyper)] = hyper
        record["factors"] = scale, clip
    decay = group["weight_decay"]
    if form.arithmetic == "fused" and form.rule != "sgd":
        decay = np.float32(decay)
    record["flags"] = (
        _IS_NEW * run.is_new
        + _MAXIMIZE * maximize
        + _NESTEROV * bool(group.get("nesterov"))
        + _DECAY * bool(decay != 0)
        + _SCALED * ((scale, clip) != (1, 1))
    )
    pieces = _pieces(form, run)
    for first in range(0, len(pieces), MAX_PIECES):
        table = pieces[first : first + MAX_PIECES]
        arguments = common.copy()
        num_tiles = _set_pieces(arguments[0], table, max_tiles)
        yield Launch(form=form, arguments=arguments, num_tiles=num_tiles)


def _check(form: Form, run: DeviceRun) -> None:
    """Check that a run's tensors are those of a form, and fit together."""
    lengths = [live.numel() for live in run.live]
    num, device = sum(lengths), run.live[0].device
    for what, tensors, dtype in (
        ("live parameter", run.live, form.live),
        ("gradient", run.gradients, form.gradient),
    ):
        for tensor, length in zip(tensors, lengths, strict=True):
            if not (
                tensor.dtype is dtype
                and tensor.dim() == 1
                and tensor.numel() == length
                and tensor.is_contiguous()
                and tensor.device == device
            ):
                _refuse(what, tensor, dtype, length, device)
    expected: dict[str, tuple[torch.dtype, int]] = {}
    if form.master != "own":
        split = form.master == "split"
        expected[MASTER_LOW if split else MASTER] = (torch.int16 if split else torch.float32, num)
    for k, name in enumerate(form.moments):
        expected[name] = (STATE_DTYPES[form.state][k > 0], num)
        if form.state == "int8":
            num_scales = sum(-(-length // BLOCK_ELEMENTS) for length in lengths)
            expected[scale_name(name)] = (torch.bfloat16, num_scales)
    if missing := expected.keys() - run.arrays.keys():
        raise ValueError(f"the block lacks {', '.join(sorted(missing))}")
    for name, (dtype, length) in expected.items():
        array = run.arrays[name]
        fits = array.dtype == dtype and array.shape == (length,) and array.is_contiguous()
        if not fits or array.device != device:
            _refuse(name, array, dtype, length, device)


def _refuse(
    what: str, tensor: torch.Tensor, dtype: torch.dtype, length: int, device: torch.device
) -> None:
    if tensor.device != device:
        raise ValueError(f"{what} is on {tensor.device}, and the live parameter on {device}")
    raise ValueError(
        f"{what}: expected {length} contiguous values of {dtype}, got {tensor.dtype} of shape "
        f"{tuple(tensor.shape)}"
    )


def _set_arrays(record: Any, form: Form, run: DeviceRun) -> None:
    """Set the addresses of the arrays."""
    if form.master != "own":
        record["master"] = run.arrays[_master_name(form)].data_ptr()
    for k, name in enumerate(form.moments):
        record["moments"][k] = run.arrays[name].data_ptr()
        if form.state == "int8":
            record["scales"][k] = run.arrays[scale_name(name)].data_ptr()


def _master_name(form: Form) -> str:
    return MASTER_LOW if form.master == "split" else MASTER


def _pieces(form: Form, run: DeviceRun) -> _Numbers:
    """Return the table of the pieces that have elements, without their tiles."""
    num = np.array([live.numel() for live in run.live], np.int64)
    table = np.zeros(len(num), PIECE)
    table["live"] = [live.data_ptr() for live in run.live]
    table["gradient"] = [gradient.data_ptr() for gradient in run.gradients]
    table["num_elements"] = num
    table["first_element"] = run.first_elements
    ends = np.cumsum(num)
    table["at"] = ends - num
    num_blocks = -(-num // BLOCK_ELEMENTS)
    table["scale_at"] = np.cumsum(num_blocks) - num_blocks
    numbers = np.arange(len(num))
    if form.state == "bfloat16":
        table, numbers = _within_windows(form, table)
    is_some = table["num_elements"] > 0
    table, numbers = table[is_some], numbers[is_some]
    if form.state == "bfloat16" and form.moments:
        if run.keys is None:
            raise ValueError("bf16 state is rounded stochastically, and the run has no keys")
        for k, keys in enumerate(run.keys(numbers, table["first_element"].astype(np.int64))):
            table["keys"][:, 2 * k] = keys & np.uint64(0xFFFFFFFF)
            table["keys"][:, 2 * k + 1] = keys >> np.uint64(32)
    _set_aligned(form, run, table)
    return table


def _within_windows(form: Form, table: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Return the table with pieces cut where the key of stochastic rounding changes.

    The second result has the index of the piece that each row is a part of.
    """
    first, num = table["first_element"], table["num_elements"]
    bits = np.uint64(rounding_keys.WINDOW_BITS)
    last = first + np.maximum(num, np.uint64(1)) - np.uint64(1)
    if (first >> bits == last >> bits).all():
        return table, np.arange(len(table))
    rows, numbers = [], []
    for number, row in enumerate(table):
        done, total = 0, int(row["num_elements"])
        while done < total:
            begin = int(row["first_element"]) + done
            window_end = (begin >> rounding_keys.WINDOW_BITS) + 1 << rounding_keys.WINDOW_BITS
            part = row.copy()
            part["num_elements"] = min(total - done, window_end - begin)
            part["first_element"] = begin
            part["live"] += np.uint64(done * form.live.itemsize)
            part["gradient"] += np.uint64(done * form.gradient.itemsize)
            part["at"] += np.uint64(done)
            rows.append(part)
            numbers.append(number)
            done += int(part["num_elements"])
    return np.array(rows, PIECE), np.array(numbers)


def _set_aligned(form: Form, run: DeviceRun, table: _Numbers) -> None:
    """Note for each piece whether every array is aligned to its quads."""
    at = table["at"]
    starts = [(table["live"], form.live.itemsize), (table["gradient"], form.gradient.itemsize)]
    names = [*form.moments] if form.master == "own" else [_master_name(form), *form.moments]
    for array in (run.arrays[name] for name in names):
        size = array.itemsize
        starts.append((at * np.uint64(size) + np.uint64(array.data_ptr()), size))
    aligned = np.ones(len(table), bool)
    for start, size in starts:
        aligned &= start % np.uint64(_QUAD * size) == 0
    table["aligned"] = aligned


def _set_pieces(record: Any, table: _Numbers, max_tiles: int) -> int:
    """Set the pieces of a launch, cut into tiles, and return the number of tiles.

    Tiles are of equal length, so that all multiprocessors have work; and long, so that a thread
    steps many quads and requests the next one while it computes.
    """
    groups = -(-table["num_elements"].astype(np.int64) // BLOCK_ELEMENTS)
    turns = max(1, -(-int(groups.sum()) // (max_tiles * GROUPS_PER_TURN)))
    turns = min(turns, _MAX_TURNS)
    groups_per_tile = turns * GROUPS_PER_TURN
    tiles = -(-groups // groups_per_tile)
    record["pieces"][: len(table)] = table
    record["pieces"]["first_tile"][: len(table)] = np.cumsum(tiles) - tiles
    record["num_pieces"], record["groups_per_tile"] = len(table), groups_per_tile
    return int(tiles.sum())


def _hyper(form: Form, group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    if form.rule == "sgd":
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        if form.arithmetic == "fused":
            return decay, momentum, dampening, lr
        return decay, momentum, 1 - dampening, -lr
    beta1, beta2 = (float(beta) for beta in group["betas"])
    eps = float(group["eps"])
    if form.arithmetic == "fused":
        return lr, beta1, beta2, decay, eps, float(step)
    return (
        (1 - lr * decay if decay else 1.0) if form.rule == "adamw" else decay,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        eps,
        (lr / (1 - beta1**step)) * -1,
    )


def update_run(
    optimizer_class: type[torch.optim.Optimizer],
    group: Mapping[str, Any],
    run: DeviceRun,
    *,
    stream: int,
    step: int,
    factors: Sequence[float] = (),
) -> None:
    """Enqueue one step of a run on a stream; returns before it has run.

    The caller keeps the tensors alive until the step has run, and orders the stream after all work
    that writes them. If there is no state yet, the stream must be torch's current one.
    """
    if run.is_new:
        for array in run.arrays.values():
            array.zero_()
    device = run.live[0].device.index or 0
    properties = torch.cuda.get_device_properties(device)
    max_tiles = properties.multi_processor_count * _TILES_PER_PROCESSOR
    for launch in launches(
        optimizer_class, group, run, step=step, factors=factors, max_tiles=max_tiles
    ):
        compiled = kernel(launch.form, device)
        compiled.launch(launch.num_tiles, THREADS, (launch.arguments,), stream=stream)


@cache
def kernel(form: Form, device: int) -> Kernel:
    """Return a variant of the kernel for a device, which the first call compiles."""
    return load(update_source(), ["update"], device, defines(form.macros))[0]
