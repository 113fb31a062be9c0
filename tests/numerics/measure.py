"""Measurements that need a process of their own; each prints one JSON document.

``python -m tests.numerics.measure`` serves children, as tests.forking says: `count_bytes` asks the
kernel what steps, checkpoints and restores read and write, and `count_frozen` what checkpoints do
of a model that is mostly frozen, from where the process before has ended.

``python -m tests.numerics.measure <directory> <parameters>`` asks for the peak of memory. That
process is not forked, so that no memory of another process counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import offload
from bench._frozen_child import train
from gds import PosixBackend, StorageError
from tests.forking import serve
from tests.process_memory import reset_peak, resident_bytes

MIB = 1 << 20
REPEATS = 4

FROZEN_MIB = 64
NUM_SLOTS = 3
"""Number of slots of a store that keeps two checkpoints."""

NUM_FULL = 100_003
"""Elements of an FP32 parameter: it has no master, so that nothing in that file is aligned."""

SIZES = (3_000_017, 4_999_999, 1)
"""Elements of the bfloat16 parameters of the byte counts."""


def kernel_io() -> tuple[int, int]:
    """Return the bytes that this process has fetched from and sent to storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return counts["read_bytes"], counts["write_bytes"]


def why_not_counted(directory: str) -> str:
    """Return why bytes cannot be measured here; an empty string if they can."""
    if not Path("/proc/self/io").exists():
        return "there is no /proc/self/io"
    backend = PosixBackend(direct=True)
    try:
        buffer = backend.allocate(4 * MIB)
        before = kernel_io()
        file = backend.create(f"{directory}/calibration", buffer.nbytes)
        file.write(buffer, 0).result()
        file.read(buffer, 0).result()
        file.close()
        backend.remove(f"{directory}/calibration")
    except StorageError as error:
        return f"no direct I/O: {error}"
    finally:
        backend.close()
    counted = [after - start for after, start in zip(kernel_io(), before, strict=True)]
    if min(counted) < buffer.nbytes:
        return f"/proc/self/io counted {counted} of {buffer.nbytes} bytes read and written"
    return ""


def model_of(*sizes: int, full: int = 0, buffer: int = 0) -> torch.nn.Module:
    """Make a model of vectors, and gradients for them."""
    model = torch.nn.Module()
    for index, size in enumerate(sizes):
        model.register_parameter(
            f"vector{index}", torch.nn.Parameter(torch.full((size,), 0.5, dtype=torch.bfloat16))
        )
    if full:
        model.register_parameter("full", torch.nn.Parameter(torch.ones(full)))
    if buffer:
        model.register_buffer("statistics", torch.ones(buffer))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    return model


class Counter:
    """What the kernel and the optimizer say that an action moved: the least and the average.

    The kernel counts more where memory is short: a program's own pages are read again then.
    """

    def __init__(self, optimizer: offload.OffloadedOptimizer) -> None:
        self.optimizer = optimizer
        self.samples: list[list[float]] = []

    def count(self, action: Callable[[], Any], num: int = 1) -> None:
        """Do something, which is `num` occurrences of what is counted."""
        self.optimizer.synchronize()
        before = self._now()
        action()
        self.optimizer.synchronize()
        moved = zip(self._now(), before, strict=True)
        self.samples.append([(after - start) / num for after, start in moved])

    def found(self) -> dict[str, float]:
        read, written, *own = zip(*self.samples, strict=True)
        stats_read, stats_written = (sum(counts) / len(counts) for counts in own)
        return {
            "read": min(read),
            "written": min(written),
            "stats_read": stats_read,
            "stats_written": stats_written,
        }

    def _now(self) -> tuple[int, ...]:
        stats = self.optimizer.stats()
        return (*kernel_io(), stats.bytes_read, stats.bytes_written)


def measure_bytes(directory: str, **settings: Any) -> dict[str, Any]:
    if reason := why_not_counted(directory):
        return {"skip": reason}
    model = model_of(*SIZES, full=NUM_FULL, buffer=70_001)
    options = offload.Options(chunk_bytes=4 * MIB, ring_chunks=3, **settings)
    optimizer = offload.AdamW(
        model.parameters(), lr=0.01, model=model, directory=f"{directory}/run", options=options
    )
    for _ in range(3):  # every slot has been written once, and everything has been imported
        optimizer.step()
        optimizer.checkpoint({"epoch": 1}).result()
    optimizer.restore()
    optimizer.step()

    steps = Counter(optimizer)
    for _ in range(REPEATS):
        steps.count(lambda: [optimizer.step() for _ in range(2)], 2)
    seals, first_steps, restores = Counter(optimizer), Counter(optimizer), Counter(optimizer)
    for repeat in range(REPEATS):
        seals.count(lambda: optimizer.checkpoint({"epoch": repeat}).result())  # noqa: B023
        first_steps.count(optimizer.step)
    optimizer.checkpoint().result()
    for _ in range(REPEATS):
        restores.count(optimizer.restore)
    state_bytes = optimizer.stats().state_bytes
    optimizer.close()
    return {
        "step": steps.found(),
        "first_step": first_steps.found(),
        "checkpoint": seals.found(),
        "restore": restores.found(),
        "parameters": sum(p.nbytes for p in model.parameters()),
        "buffers": sum(b.nbytes for b in model.buffers()),
        "train_state": options.train_state_bytes,
        "state": state_bytes,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_chunks": -(-sum(p.numel() for p in model.parameters()) // MIB),
    }


def measure_frozen(directory: str) -> dict[str, Any]:
    """Measure checkpoints of a model of which 64 MiB are frozen and 1 MiB is not."""
    if reason := why_not_counted(directory):
        return {"skip": reason}
    num_seals = NUM_SLOTS + 3
    return train(f"{directory}/run", FROZEN_MIB * MIB, MIB, num_seals, "bfloat16", "")


def measure_memory(directory: str, num_parameters: int) -> dict[str, Any]:
    def train(model: torch.nn.Module, name: str) -> tuple[offload.Stats, int]:
        optimizer = offload.AdamW(
            model.parameters(),
            lr=0.01,
            model=model,
            directory=f"{directory}/{name}",
            keep=1,
            options=offload.Options(chunk_bytes=MIB, ring_chunks=3),
        )
        optimizer.step()
        optimizer.checkpoint({"step": 1})
        optimizer.step()
        optimizer.checkpoint({"step": 2}).result()
        optimizer.restore()
        optimizer.step()
        stats = optimizer.stats()
        optimizer.close()
        return stats, resident_bytes("VmHWM")

    train(model_of(MIB), "warm")  # what is imported at the first step is not the step's
    sizes = [num_parameters // 4 + 1, num_parameters // 2 + 3, num_parameters // 4 - 4]
    model = model_of(*sizes)
    if not reset_peak():
        return {"skip": "the kernel does not reset the peak of resident memory"}
    before = resident_bytes("VmRSS")
    held = sum(p.nbytes + p.grad.nbytes for p in model.parameters())
    stats, peak = train(model, "run")
    return {
        "parameters_and_gradients": held,
        "before": before,
        "peak_above": peak - before,
        "ring": stats.ring_bytes,
        "state": stats.state_bytes,
    }


def count_bytes(directory: str) -> None:
    """Print what steps, checkpoints and restores read and write."""
    print(json.dumps(measure_bytes(directory)))


def count_bytes_on_drive(directory: str) -> None:
    """Print the same where steps write parameters."""
    print(json.dumps(measure_bytes(directory, parameters="drive")))


def count_frozen(directory: str) -> None:
    """Print what checkpoints of a model that is mostly frozen read and write."""
    print(json.dumps(measure_frozen(directory)))


def main(directory: str, num_parameters: str) -> None:
    """Print the peak of memory."""
    torch.set_num_threads(1)
    print(json.dumps(measure_memory(directory, int(num_parameters))))


if __name__ == "__main__":
    main(*sys.argv[1:]) if sys.argv[1:] else serve(globals())
