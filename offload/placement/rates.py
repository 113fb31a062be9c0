"""Measuring how fast state moves and is updated here: what `placement` decides with.

`find_rates` takes under half a second where it measures, and remembers the result beside the data,
as ``placement.json``: a device's arithmetic differs from a CPU's in last bits (`docs/device.md`),
so the same run should not be placed now here, now there, by what else a machine was doing when it
was measured. The file may be removed at any time; everything is then measured anew.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from gds import Backend
from gds.errors import StorageError
from gds.small_files import read_small_file, write_small_file
from offload.device.boundary import BOUNDARIES, Boundary, boundary_of
from offload.format.digests import ChunkDigests, DigestContext
from offload.format.header import DTYPE_BYTES
from offload.format.layout import Layout, ModelTensor
from offload.format.names import RATES_NAME
from offload.placement.model import Rates, StepBytes
from offload.update.dtypes import DTYPES
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule
from offload.update.step_inputs import StepInputs
from offload.update.updater import ChunkUpdater

_FORMAT_VERSION = 1
_TRIAL_ELEMENTS = 8 << 20
"""Of the update that is timed: 96 MiB of FP32 state with Adam, more than caches hold."""

_TRIAL_S = 0.2
_MOST_TRIALS = 5
_COPY_BYTES = 64 << 20
_COPIES = 4
"""Of that size, one after another, in one sample."""

_SAMPLES = 3
_PLATFORM_FILES = ("/proc/driver/nvidia/version", "/proc/driver/nvidia-fs/version")

Clock: TypeAlias = Callable[[], float]
"""Returns seconds, as `time.perf_counter` does."""


@runtime_checkable
class MovesDeviceMemory(Protocol):
    """A backend that does, and knows which way: `gds.kvikio.KvikioBackend`."""

    def paths_in(self, directory: str) -> Mapping[Any, Any]:
        """Say for ``"read"`` and ``"write"`` how device memory is moved there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Whose rates are to be found."""

    backends: Sequence[Backend]
    """One for each directory; not wrapped."""

    directories: Sequence[str]
    """The store: one on each drive."""

    drive_gbps: float
    """Of all drives together, as `Drives.rates` has it: reads and writes at once; 0 if that was
    not measured."""

    device: torch.device
    """Where the parameters are."""

    pool: UpdatePool
    """Nothing else may use it meanwhile."""

    rule: UpdateRule
    groups: Sequence[Mapping[str, Any]]
    """``param_groups``."""

    layout: Layout


def step_bytes(layout: Layout, *, kept_on_host: int = 0, kept_on_device: int = 0) -> StepBytes:
    """Return what a step of a layout moves, gradients being of their parameters' dtypes.

    Args:
        layout: Of the state.
        kept_on_host: Bytes of state that may stay in host memory if steps are taken there.
        kept_on_device: Likewise in device memory; both are cut to what there is.
    """
    parameters = sum(p.num_elements * DTYPE_BYTES[p.dtype] for p in layout.parameters)
    return StepBytes(
        state=layout.state_bytes,
        gradients=parameters,
        parameters=parameters,
        kept_on_host=min(kept_on_host, layout.state_bytes),
        kept_on_device=min(kept_on_device, layout.state_bytes),
    )


def find_rates(site: Site, *, clock: Clock = time.perf_counter) -> Rates | str:
    """Return what was measured before under the same conditions, or measure it and remember it.

    Waits for what has been queued on the current stream of the device, where it measures.

    Returns:
        The rates; or, for people, why there are none: then the host is the place.
    """
    if reason := _why_not(site):
        return reason
    path = os.path.join(site.directories[0], RATES_NAME)
    conditions = conditions_of(site)
    found = load_rates(path, conditions)
    if found is not None:
        return found
    measured = measure_rates(site, clock=clock)
    if isinstance(measured, Rates):
        try:
            save_rates(path, conditions, measured)
        except StorageError as error:
            logging.getLogger("offload").warning("what was measured is not kept: %s", error)
    return measured


def measure_rates(site: Site, *, clock: Clock = time.perf_counter) -> Rates | str:
    """Measure the link and the CPU, and find out which way device memory goes.

    The latter tries cuFile in a child process, once for each file system, and can take seconds.

    Returns:
        As `find_rates`.
    """
    if reason := _why_not(site):
        return reason
    try:
        direct = all(
            used.path == "gds"
            for backend, directory in zip(site.backends, site.directories, strict=True)
            if isinstance(backend, MovesDeviceMemory)
            for used in backend.paths_in(directory).values()
        )
    except StorageError as error:
        return f"device memory cannot be moved there: {error}"
    try:
        to_host, to_device = link_gbps(site.device, clock=clock)
    except (RuntimeError, MemoryError) as error:
        # What torch raises where there is no memory left: none for a ring there, either.
        return f"the link to {site.device} could not be measured: {' '.join(str(error).split())}"
    return Rates(
        drive_gbps=site.drive_gbps,
        update_gbps=update_gbps(site.pool, site.rule, site.groups, site.layout, clock=clock),
        to_host_gbps=to_host,
        to_device_gbps=to_device,
        direct=direct,
    )


def link_gbps(device: torch.device, *, clock: Clock = time.perf_counter) -> tuple[float, float]:
    """Return GB/s of copies from a device to page-locked memory, and of copies to the device.

    The best of a few samples: what the link can do, rather than what was left of it just then.
    """
    boundary = boundary_of(device)
    host = boundary.allocate(_COPY_BYTES)
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    # The memory may have been another tensor's, which kernels that are queued still use.
    boundary.wait(boundary.now())
    host.zero_()  # touched, before it is timed
    return (
        _copies_gbps(boundary, boundary.fetch, (there, host), clock),
        _copies_gbps(boundary, boundary.send, (host, there), clock),
    )


def update_gbps(
    pool: UpdatePool,
    rule: UpdateRule,
    groups: Sequence[Mapping[str, Any]],
    layout: Layout,
    *,
    clock: Clock = time.perf_counter,
) -> float:
    """Return GB/s of state, read and written, at which a CPU updates chunks like those of a layout.

    It is the step itself, digests included, on memory of its own: up to `_TRIAL_ELEMENTS` of a
    parameter such as the layout's largest one. The best of a few passes.

    Args:
        pool: Runs it; nothing else may use it meanwhile.
        rule: What is stepped.
        groups: ``param_groups``.
        layout: Says how state is stored; there must be some.
        clock: Read before and after each pass.
    """
    largest = max(layout.parameters, key=lambda p: (bool(p.arrays), p.num_elements))
    # As long as in the store: memory that fits in a cache would be faster than it ever is there.
    num = min(layout.chunk_elements, _TRIAL_ELEMENTS)
    spec = dataclasses.replace(largest, name="trial", shape=(num,), group=0)
    trial = Layout(
        parameters=(spec,),
        model=(ModelTensor(spec.name, spec.dtype, spec.shape),),
        chunk_elements=layout.chunk_elements,
        state_dtype=layout.state_dtype,
        counts_from=layout.counts_from,
    )
    dtype = DTYPES[spec.dtype]
    parameter = torch.full((num,), 0.5, dtype=dtype, device="cpu")
    gradient = torch.full((num,), 0.01, dtype=dtype, device="cpu")
    arrays = {
        name: torch.zeros(
            trial.array_range(name, 0, num)[1], dtype=DTYPES[form.dtype], device="cpu"
        )
        for name, form in trial.formats.items()
    }
    views = {name: array.view(torch.uint8).numpy().data for name, array in arrays.items()}
    context = DigestContext("trial", 0)
    scalars = None
    spent_s = 0.0
    best_s = float("inf")
    with torch.no_grad(), pool.all_threads():
        # The first pass makes the state, and touches memory and threads; it is not counted.
        for number in range(1 + _MOST_TRIALS):
            updater = ChunkUpdater(
                rule,
                pool,
                StepInputs(
                    layout=trial,
                    groups=[groups[largest.group]],
                    parameters=[parameter],
                    gradients=[gradient],
                    scalars=[scalars],
                    step=number + 1,
                ),
            )
            digests = ChunkDigests(views)
            began_s = clock()
            updater.update(0, arrays, digests)
            digests.finish(context, 0, pool.map)
            took_s = clock() - began_s
            (scalars,) = updater.finish()
            spent_s += took_s
            if number:
                best_s = min(best_s, took_s)
                if spent_s > _TRIAL_S:
                    break
    return 2 * trial.state_bytes / best_s / 1e9


def conditions_of(site: Site) -> dict[str, Any]:
    """Return what must be the same for rates to be believed again, as JSON values."""
    names = {p.dtype: list(p.arrays) for p in site.layout.parameters}
    return {
        "device": _device_name(site.device),
        "drive_gbps": site.drive_gbps,
        "kernel": os.uname().release,
        "drivers": [_first_line(path) for path in _PLATFORM_FILES],
        "cores": len(os.sched_getaffinity(0)),
        "optimizer": site.rule.class_name,
        "arrays": names,
        "state_dtype": site.layout.state_dtype,
    }


def save_rates(path: str, conditions: Mapping[str, Any], rates: Rates) -> None:
    """Write rates to a file, whole or not at all; not synced.

    Raises:
        StorageError: The file could not be written.
    """
    content = {
        "format_version": _FORMAT_VERSION,
        "conditions": dict(conditions),
        "rates": dataclasses.asdict(rates),
    }
    write_small_file(path, json.dumps(content, indent=2).encode() + b"\n", "measured rates")


def load_rates(path: str, conditions: Mapping[str, Any]) -> Rates | None:
    """Return the rates in a file, if they are any, and were measured under the same conditions.

    Never raises: whatever is wrong with the file, the remedy is to measure again.
    """
    try:
        content = json.loads(read_small_file(path))
        if content["format_version"] != _FORMAT_VERSION or content["conditions"] != conditions:
            return None
        return Rates(**content["rates"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _why_not(site: Site) -> str:
    """Say why nothing need be measured; empty where it has to be."""
    if site.device.type not in BOUNDARIES:
        return f"there is no way between {site.device} and host memory"
    for backend in site.backends:
        if not isinstance(backend, MovesDeviceMemory):
            return f"the {backend.name} backend does not move device memory"
    if not site.layout.state_bytes:
        return "there is no state"
    if not site.drive_gbps > 0:
        return "the drives have not been measured: they are for a state of 1 GiB or more"
    return ""


def _copies_gbps(
    boundary: Boundary,
    move: Callable[..., Any],
    pair: tuple[torch.Tensor, torch.Tensor],
    clock: Clock,
) -> float:
    best_s = float("inf")
    for _ in range(_SAMPLES):
        began_s = clock()
        boundary.wait(move([pair] * _COPIES, []))
        best_s = min(best_s, clock() - began_s)
    return _COPIES * pair[0].nbytes / best_s / 1e9


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return str(torch.cuda.get_device_properties(device).name)


def _first_line(path: str) -> str:
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return ""
