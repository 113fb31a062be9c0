"""Measured rates of moving and updating state, from which `placement.choose` decides.

If `find_rates` measures, its timed copies and updates take under half a second. It stores the
result beside the data, as ``placement.json``, so that a resumed run gets the same placement
whatever the load on the machine: a device's results differ from a CPU's in the last bits
(`docs/device.md`). The file may be removed at any time; everything is then measured again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
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
from offload.sizing.step_time import StepBytes
from offload.update.dtypes import DTYPES
from offload.update.kernel_check import choose_kernel
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule
from offload.update.step_keys import StepInputs
from offload.update.updater import HostUpdater

_FORMAT_VERSION = 2
_TRIAL_ELEMENTS = 8 << 20
"""Elements of the timed update: 96 MiB of FP32 state with Adam, more than caches hold."""

_TRIAL_S = 0.2
_MAX_TRIALS = 5
_COPY_BYTES = 64 << 20
_COPIES = 4
"""Number of successive copies of `_COPY_BYTES` in one sample."""

_MEMORY_BYTES = 128 << 20
"""Bytes of the timed copy within the host's memory; with its target, more than most caches hold."""

_SAMPLES = 3
_MAX_GBPS = 1e6
_PLATFORM_FILES = ("/proc/driver/nvidia/version", "/proc/driver/nvidia-fs/version")

Clock: TypeAlias = Callable[[], float]
"""Returns seconds, as `time.perf_counter` does."""


@runtime_checkable
class MovesDeviceMemory(Protocol):
    """A backend that moves device memory and knows its paths: `gds.kvikio.KvikioBackend`."""

    def paths_in(self, directory: str) -> Mapping[Any, Any]:
        """Return the path of device memory for ``"read"`` and for ``"write"`` in a directory."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured rates, in gigabytes (1e9 bytes) per second."""

    drive_gbps: float
    """Rate of the drives: reads and writes of equal size at the same time, both added up."""

    update_gbps: float
    """Rate of updates on the CPU's cores: bytes of state read and written, both added up."""

    to_host_gbps: float
    """Rate of the link from the device."""

    to_device_gbps: float
    """Rate of the link to the device."""

    memory_gbps: float
    """Rate of the host's memory: bytes read and written, both added up."""

    direct: bool
    """Whether state moves between drive and device without passing through host memory: by
    GPUDirect Storage, not by its compatibility mode."""

    def __post_init__(self) -> None:
        """Check that every value is a rate."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "direct":
                if not isinstance(value, bool):
                    raise ValueError(f"direct must be True or False, got {value!r}")
            elif type(value) not in (int, float) or not 0 < value <= _MAX_GBPS:
                raise ValueError(f"{field.name} must be a rate in GB/s, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementSetup:
    """Hardware and model whose rates are measured."""

    backends: Sequence[Backend]
    """Backends without wrappers, one for each directory."""

    directories: Sequence[str]
    """Directories of the store, one on each drive."""

    drive_gbps: float
    """Rate of all drives together for reads and writes at once, as in `Drives.rates`; 0 if it was
    not measured."""

    device: torch.device
    """Device of the parameters."""

    pool: UpdatePool
    """Pool that updates state on the CPU. Nothing else may use it during a measurement."""

    rule: UpdateRule
    groups: Sequence[Mapping[str, Any]]
    """``param_groups``."""

    layout: Layout


def step_bytes(layout: Layout, *, kept_on_host: int = 0, kept_on_device: int = 0) -> StepBytes:
    """Return the bytes that a step moves, with gradients in the dtypes of their parameters.

    Args:
        layout: Layout of the state.
        kept_on_host: Bytes of state that may stay in host memory with steps on the host.
        kept_on_device: Bytes of state that may stay in device memory with steps on the device.
    """
    parameters = sum(p.num_elements * DTYPE_BYTES[p.dtype] for p in layout.parameters)
    return StepBytes(
        state=layout.state_bytes,
        gradients=parameters,
        parameters=parameters,
        kept_on_host=min(kept_on_host, layout.state_bytes),
        kept_on_device=min(kept_on_device, layout.state_bytes),
    )


def find_rates(setup: MeasurementSetup, *, clock: Clock = time.perf_counter) -> Rates | str:
    """Return the rates stored under the same conditions, or measure and store them."""
    if reason := _why_not_measured(setup):
        return reason
    path = os.path.join(setup.directories[0], RATES_NAME)
    conditions = conditions_of(setup)
    found = load_rates(path, conditions)
    if found is not None:
        return found
    measured = measure_rates(setup, clock=clock)
    if isinstance(measured, Rates):
        try:
            save_rates(path, conditions, measured)
        except StorageError as error:
            logging.getLogger("offload").warning("the measured rates could not be saved: %s", error)
    return measured


def measure_rates(setup: MeasurementSetup, *, clock: Clock = time.perf_counter) -> Rates | str:
    """Measure the link, the CPU and the host's memory, and find the path of device memory."""
    if reason := _why_not_measured(setup):
        return reason
    try:
        direct = all(
            used.path == "gds"
            for backend, directory in zip(setup.backends, setup.directories, strict=True)
            if isinstance(backend, MovesDeviceMemory)
            for used in backend.paths_in(directory).values()
        )
    except StorageError as error:
        return f"device memory cannot be transferred to the drives: {error}"
    try:
        to_host, to_device = link_gbps(setup.device, clock=clock)
    except (RuntimeError, MemoryError) as error:
        # torch raises these if no memory is left. A ring on the device would not fit either.
        return f"the link to {setup.device} could not be measured: {' '.join(str(error).split())}"
    return Rates(
        drive_gbps=setup.drive_gbps,
        update_gbps=update_gbps(setup.pool, setup.rule, setup.groups, setup.layout, clock=clock),
        to_host_gbps=to_host,
        to_device_gbps=to_device,
        memory_gbps=memory_gbps(setup.pool, clock=clock),
        direct=direct,
    )


def link_gbps(device: torch.device, *, clock: Clock = time.perf_counter) -> tuple[float, float]:
    """Return GB/s of copies from a device to page-locked memory, and to the device."""
    boundary = boundary_of(device)
    on_host = boundary.allocate(_COPY_BYTES)
    on_device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    # The memory may have belonged to another tensor, which queued kernels still use.
    boundary.wait(boundary.now())
    on_host.zero_()  # touches the memory before it is timed
    return (
        _copies_gbps(boundary, boundary.fetch, (on_device, on_host), clock),
        _copies_gbps(boundary, boundary.send, (on_host, on_device), clock),
    )


def memory_gbps(pool: UpdatePool, *, clock: Clock = time.perf_counter) -> float:
    """Return the rate of the host's memory in GB/s: bytes read and written by copies, added up.

    All threads of the pool copy at the same time. Drives and devices use the memory without the
    CPU and may reach a higher rate, so this is a lower limit.
    """
    source = torch.ones(_MEMORY_BYTES, dtype=torch.uint8, device="cpu")
    into = torch.zeros(_MEMORY_BYTES, dtype=torch.uint8, device="cpu")
    parts = list(zip(source.chunk(64), into.chunk(64), strict=True))
    best_s = float("inf")
    for number in range(1 + _SAMPLES):  # the first one starts the threads
        began_s = clock()
        pool.run(lambda _, part: part[1].copy_(part[0]), parts)
        if number:
            best_s = min(best_s, clock() - began_s)
    return 2 * _MEMORY_BYTES / best_s / 1e9


def update_gbps(
    pool: UpdatePool,
    rule: UpdateRule,
    groups: Sequence[Mapping[str, Any]],
    layout: Layout,
    *,
    clock: Clock = time.perf_counter,
) -> float:
    """Return the rate of updates on the CPU for a layout, in GB/s of state read and written.

    This times the step itself, with digests, on separate memory: up to `_TRIAL_ELEMENTS` elements
    of a parameter like the layout's largest one.
    """
    largest = max(layout.parameters, key=lambda p: (bool(p.arrays), p.num_elements))
    # The trial has the length of a chunk, since data that fits in a cache would be faster.
    num = min(layout.chunk_elements, _TRIAL_ELEMENTS)
    spec = dataclasses.replace(largest, name="trial", shape=(num,), group=0)
    trial = Layout(
        parameters=(spec,),
        model=(ModelTensor(spec.name, spec.dtype, spec.shape),),
        chunk_elements=layout.chunk_elements,
        state_dtype=layout.state_dtype,
    )
    dtype = DTYPES[spec.dtype]
    parameter = torch.full((num,), 0.5, dtype=dtype, device="cpu")
    gradient = torch.full((num,), 0.01, dtype=dtype, device="cpu")
    arrays = {
        name: torch.zeros(
            trial.array_bytes(name) // form.nbytes, dtype=DTYPES[form.dtype], device="cpu"
        )
        for name, form in trial.formats.items()
    }
    kernel = choose_kernel(rule.optimizer_class, layout.state_dtype).kernel
    views = {name: array.view(torch.uint8).numpy().data for name, array in arrays.items()}
    context = DigestContext("trial", 0)
    scalars = None
    spent_s = 0.0
    best_s = float("inf")
    with torch.no_grad():
        # The first pass creates the state, and touches memory and threads. It is not counted.
        for number in range(1 + _MAX_TRIALS):
            updater = HostUpdater(
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
                kernel=kernel,
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


def conditions_of(setup: MeasurementSetup) -> dict[str, Any]:
    """Return the conditions under which stored rates are valid, as JSON values."""
    names = {p.dtype: list(p.arrays) for p in setup.layout.parameters}
    device = str(setup.device)
    if setup.device.type == "cuda":
        device = str(torch.cuda.get_device_properties(setup.device).name)
    return {
        "device": device,
        "drive_gbps": setup.drive_gbps,
        "kernel": os.uname().release,
        "drivers": [_first_line(path) for path in _PLATFORM_FILES],
        "cores": len(os.sched_getaffinity(0)),
        "optimizer": setup.rule.class_name,
        "update_code": choose_kernel(setup.rule.optimizer_class, setup.layout.state_dtype).code,
        "arrays": names,
        "state_dtype": setup.layout.state_dtype,
    }


def save_rates(path: str, conditions: Mapping[str, Any], rates: Rates) -> None:
    """Write rates to a file, whole or not at all; not synced."""
    content = {
        "format_version": _FORMAT_VERSION,
        "conditions": dict(conditions),
        "rates": dataclasses.asdict(rates),
    }
    write_small_file(path, json.dumps(content, indent=2).encode() + b"\n", "measured rates")


def load_rates(path: str, conditions: Mapping[str, Any]) -> Rates | None:
    """Return the rates in a file; None if they are damaged, or belong to other conditions."""
    try:
        content = json.loads(read_small_file(path))
        if content["format_version"] != _FORMAT_VERSION or content["conditions"] != conditions:
            return None
        return Rates(**content["rates"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _why_not_measured(setup: MeasurementSetup) -> str:
    """Return why a measurement is impossible or unnecessary; empty if it is needed."""
    if setup.device.type not in BOUNDARIES:
        return f"transfers between {setup.device} and host memory are not supported"
    for backend in setup.backends:
        if not isinstance(backend, MovesDeviceMemory):
            return f"the {backend.name} backend does not transfer device memory"
    if not setup.layout.state_bytes:
        return "there is no optimizer state"
    if not setup.drive_gbps > 0:
        return "the drives have not been measured, which is done only for a state of 1 GiB or more"
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


def _first_line(path: str) -> str:
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return ""
