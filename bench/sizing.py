"""Predictions of `offload size`, beside what was measured in the same run.

    python -m bench.sizing --directory DIR
    python -m bench.sizing --figures docs/figures      # draws the figures, measures nothing

Each round measures what `offload.size` needs: the rates of the drive and the time of a sync with
``gds bench``, a step with all state in memory (the rate of the update), and the copies and digests
of parameters on one core, alone and beside transfers (``gds bench --staged``), and how fast the
kernel makes new memory. Then it measures what `offload.size` predicts from these: a streamed step,
a seal and a restore. Predicted bytes are compared with the sizes of the store's files.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import offload
from bench._harness import BenchError, Parser, Result, count, require_space, run, say, scratch, size
from bench._model import make_gradients, make_parameters
from bench._statistics import median, median_interval, ratios
from bench._streamed import Streamed, exact_state_bytes
from gds import ALIGNMENT, PosixBackend
from gds.buffers.host import HostBuffer
from gds.calibration import load_calibration
from offload.format.digests import MODEL_BLOCK_BYTES, leaf_digests
from offload.format.header import build_header
from offload.format.names import CALIBRATION_NAME
from offload.model.model_file import BlockBuffers, ModelImage
from offload.sizing import Machine, Plan, Run, measured_drives
from offload.sizing.checkpoint_time import RESUME_BLOCKS, RESUME_THREADS

_SLACK_BYTES = 8 << 10
_STORES_STATE = 7
"""Space of three stores with two slots each, as a multiple of the FP32 state: a slot also has the
parameters, which take a sixth of it."""

_SYNC_BYTES = 4096
"""Bytes that are written before each sync whose time is measured."""

_SEAL_BLOCKS = 3
"""Blocks of memory through which a seal writes."""

_FREED_BLOCKS = 4 * RESUME_BLOCKS
"""Blocks of memory that are free before a resume; it takes `RESUME_BLOCKS`."""

_AT_REST = "master.safetensors"
"""File of a checkpoint that is as old as its parameters and at least as large. A file that has just
been written may be in a cache of the drive, or of a host below a virtual drive."""

_WARM_UP_SEALS = 2
"""Seals before the first round: one for each slot, whose model file is only reserved until then."""

_LIMIT = 1.10
"""Largest ratio of prediction and measurement, whichever of the two is larger."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result; or draw the figures."""
    args = _arguments(arguments)
    if args.figures:
        from bench._sizing_figures import draw

        for path in draw(Path(args.figures)):
            say(f"written to {path}")
        return
    del args.figures
    with scratch(args.directory) as directory, ExitStack() as stack:
        state = exact_state_bytes(args.parameters)
        require_space(directory, _STORES_STATE * state + args.file_mib * (1 << 20))
        result = Result("sizing", args, directory)
        _measure(args, result, directory, stack)
        result.write()


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("sizing", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default="128Mi", help="bf16 parameters (default: %(default)s)")
    add("--tensors", type=int, default=8, help="parameter tensors (default: %(default)s)")
    add("--chunk-mib", type=int, default=32, help="of one FP32 array (default: %(default)s)")
    add("--threads", type=int, default=3, help="of reads, and of writes (default: %(default)s)")
    add("--steps", type=int, default=3, help="steps in one sample (default: %(default)s)")
    add("--seconds", type=float, default=2.5, help="of each run of gds bench (default: 2.5)")
    add(
        "--file-mib", type=int, default=0, help="file of gds bench (default: as large as the state)"
    )
    add("--syncs", type=int, default=100, help="syncs in one sample (default: %(default)s)")
    add("--figures", default="", help="draw the figures of docs/sizing.md into this folder")
    quick = {
        "parameters": "128Ki",
        "tensors": 3,
        "chunk_mib": 1,
        "steps": 1,
        "file_mib": 2,
        "seconds": 0,
        "syncs": 5,
    }
    args = parser.read(arguments, quick=quick)
    if not args.file_mib:
        args.file_mib = -(-exact_state_bytes(args.parameters) >> 20)
    if not args.what:
        args.what = f"{args.parameters / (1 << 20):g}Mi"
    return args


def _measure(args: argparse.Namespace, result: Result, directory: str, stack: ExitStack) -> None:
    settings: dict[str, Any] = {"chunk_bytes": args.chunk_mib << 20}
    streamed = _streamed(args, f"{directory}/streamed", settings)
    stack.enter_context(streamed)
    chunks = -(-args.parameters * 4 // settings["chunk_bytes"])
    room = exact_state_bytes(args.parameters) + chunks * 3 * _SLACK_BYTES
    resident = _streamed(args, f"{directory}/resident", settings | {"host_memory": room})
    stack.enter_context(resident)
    with _streamed(args, f"{directory}/sealed", settings) as sealed:
        sealed.optimizer.checkpoint().result()
    for _ in range(_WARM_UP_SEALS):
        _seal(streamed)
    samples: dict[str, list[float]] = {}
    for number in range(args.rounds):
        machine = _machine(args, directory, resident)
        step_s, seal_s = streamed.sample(args.steps), _seal(streamed)
        resume_s, new_memory_gbps = _resume(args, f"{directory}/sealed", settings)
        machine = replace(machine, new_memory_gbps=new_memory_gbps)
        plan = offload.size(
            f"{directory}/sealed",
            machine=machine,
            run=Run(keep=1),
            chunk_bytes=args.chunk_mib << 20,
        )
        found = {
            "predicted_step_s": plan.steps[1].seconds,
            "step_s": step_s,
            "predicted_seal_s": plan.seal_s,
            "predicted_writing_s": _seconds(plan.parameter_bytes, machine.write_gbps),
            "seal_s": seal_s,
            "predicted_resume_s": plan.resume_s,
            "predicted_reading_s": _seconds(plan.parameter_bytes, machine.read_gbps),
            "resume_s": resume_s,
            "drive_read_gbps": machine.read_gbps,
            "drive_write_gbps": machine.write_gbps,
            "drive_mixed_gbps": machine.mixed_gbps,
            "update_gbps": machine.update_gbps,
            "copy_gbps": machine.copy_gbps,
            "staged_read_gbps": machine.staged_read_gbps,
            "staged_write_gbps": machine.staged_write_gbps,
            "new_memory_gbps": machine.new_memory_gbps,
            "sync_s": machine.sync_s,
            "flush_gbps": machine.flush_gbps,
        }
        for name, value in found.items():
            samples.setdefault(name, []).append(float(value or 0))
        say(f"round {number + 1} of {args.rounds}: " + _shown(found))
    result.add_samples(samples)
    _claims(result, samples)
    _bytes(result, directory, plan)


def _machine(args: argparse.Namespace, directory: str, resident: Streamed) -> Machine:
    """Measure the drive as a user would, and update and copies with nothing to read or write."""
    whole = ["--file-size", f"{args.file_mib}M"]
    whole += ["--seconds", str(args.seconds), "--ramp", str(min(args.seconds, 0.5))]
    arguments = ["--sweep", "rw=read,write,mixed"]
    arguments += ["--size", f"{args.chunk_mib}M", "--threads", str(args.threads)]
    path = _gds_bench(directory, "drive", arguments + whole)
    staged = ["--staged", "--rw", "write", "--size", str(_block(args)), *whole]
    staged += ["--threads", str(_threads(args, directory)), "--depth", str(_SEAL_BLOCKS)]
    seal = _gds_bench(directory, "staged-write", staged)
    at_rest = next(Path(f"{directory}/sealed").glob(f"step-*/{_AT_REST}"))
    staged = ["--staged", "--rw", "read", "--size", str(_block(args)), "--seconds", "0"]
    staged += ["--ramp", "0", "--threads", str(RESUME_THREADS), "--depth", str(RESUME_BLOCKS)]
    resume = _gds_bench(directory, "staged-read", staged, place=str(at_rest))
    moved = 2 * exact_state_bytes(args.parameters)
    update = moved / resident.sample(args.steps) / 1e9
    return Machine(
        **measured_drives(path).rates,
        **measured_drives(seal).rates,
        **measured_drives(resume).rates,
        update_gbps=update,
        copy_gbps=_copy_gbps(resident.parameters),
        sync_s=_sync_s(args, directory),
    )


def _block(args: argparse.Namespace) -> int:
    """Return the bytes of a block of parameters, fewer for a small model."""
    parameters: int = args.parameters
    return min(MODEL_BLOCK_BYTES, parameters // ALIGNMENT * ALIGNMENT)


def _threads(args: argparse.Namespace, directory: str) -> int:
    """Return the number of threads that write, as the store has measured it."""
    found = load_calibration(f"{directory}/streamed/{CALIBRATION_NAME}")
    threads: int = args.threads if found is None else found.write_threads
    return threads


def _give_memory_back() -> None:
    """Use memory and free it, so that the kernel has as much as the next steps need.

    The host of a virtual machine may take memory back that was free for some seconds. When such
    memory is used again, making it took up to 80 times as long as on other occasions, which is no
    property of a resume.
    """
    buffer = HostBuffer(_FREED_BLOCKS * MODEL_BLOCK_BYTES)
    ctypes.memset(buffer.address, 1, buffer.nbytes)


def _new_memory() -> tuple[HostBuffer, float]:
    """Make memory as a resume does; return it, and the rate in GB/s at which it was made."""
    buffer = HostBuffer(RESUME_BLOCKS * MODEL_BLOCK_BYTES)
    each = buffer.nbytes // RESUME_THREADS
    starts = range(buffer.address, buffer.address + buffer.nbytes, each)
    with ThreadPoolExecutor(RESUME_THREADS) as pool:
        started = time.perf_counter()
        list(pool.map(lambda start: ctypes.memset(start, 1, each), starts))
    return buffer, buffer.nbytes / (time.perf_counter() - started) / 1e9


def _sync_s(args: argparse.Namespace, directory: str) -> float:
    """Return the seconds of a sync after a small write: ``gds bench`` syncs after each pass."""
    arguments = ["--rw", "write", "--size", str(_SYNC_BYTES), "--file-size", str(_SYNC_BYTES)]
    arguments += ["--threads", "1", "--passes", str(args.syncs), "--seconds", "0", "--ramp", "0"]
    report = json.loads(Path(_gds_bench(directory, "sync", arguments)).read_text())
    seconds: float = report["results"][0]["median"]["sync_s"] / args.syncs
    return seconds


def _copy_gbps(parameters: Sequence[torch.Tensor]) -> float:
    """Return the rate in GB/s at which one core copies and digests parameters, as a seal does."""
    tensors = {f"{number}": parameter for number, parameter in enumerate(parameters)}
    header = build_header([(name, "BF16", tuple(p.shape)) for name, p in tensors.items()])
    image = ModelImage(header, tensors)
    with PosixBackend() as backend:
        buffers = BlockBuffers(backend, image.data_bytes)
        seconds = 0.0
        for _ in range(2):  # the first time also makes the memory of the buffers
            started = time.perf_counter()
            for index, start, stop in image.blocks():
                buffer, data = buffers.get(index, stop - start)
                image.gather(start, stop, data, on_one_thread=True)
                leaf_digests(buffer.memoryview())
            seconds = time.perf_counter() - started
    rate: float = image.data_bytes / seconds / 1e9
    return rate


def _seconds(nbytes: float, gbps: float | None) -> float | None:
    """Return the seconds of a transfer if nothing but its bytes counted."""
    return None if gbps is None else nbytes / 1e9 / gbps


def _gds_bench(
    directory: str, name: str, arguments: Sequence[str], *, place: str | None = None
) -> str:
    """Run ``gds bench`` once for each row, and return the path of its JSON output.

    Args:
        directory: Directory of the output, and of the scratch file.
        name: Name of the output.
        arguments: Arguments of the command besides the place.
        place: File that is only read; None for a scratch file.
    """
    from gds.cli import main as gds_main

    path = f"{directory}/{name}.json"
    given = sys.argv
    sys.argv = [
        "gds",
        "bench",
        place or directory,
        *arguments,
        "--allow-small",
        "--repeat",
        "1",
        "--json",
    ]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            gds_main()
    except SystemExit as ended:
        if ended.code:
            raise BenchError("gds bench could not measure the drive") from None
    finally:
        sys.argv = given
    Path(path).write_text(text.getvalue())
    return path


def _streamed(args: argparse.Namespace, directory: str, settings: dict[str, Any]) -> Streamed:
    parameters = make_parameters(args.parameters, args.tensors)
    say(f"preparing {size(exact_state_bytes(args.parameters))} of FP32 state")
    return Streamed(directory, parameters, make_gradients(parameters), "exact", dict(settings))


def _seal(streamed: Streamed) -> float:
    """Return the seconds from the call of a checkpoint, after a step, until it is durable."""
    streamed.sample(1)
    started = time.perf_counter()
    streamed.optimizer.checkpoint().result()
    return time.perf_counter() - started


def _resume(
    args: argparse.Namespace, directory: str, settings: dict[str, Any]
) -> tuple[float, float]:
    """Return the seconds of a restore, until parameters are in place, and the rate of new memory.

    The memory is kept until the restore has ended, so that the restore cannot use it again.
    """
    parameters = make_parameters(args.parameters, args.tensors, seed=0)
    options = offload.Options(**settings)
    with offload.AdamW(parameters, lr=1e-4, directory=directory, options=options) as optimizer:
        _give_memory_back()
        kept, new_memory_gbps = _new_memory()
        started = time.perf_counter()
        optimizer.restore()
        seconds = time.perf_counter() - started
        del kept
        return seconds, new_memory_gbps


def _claims(result: Result, samples: dict[str, list[float]]) -> None:
    step = ratios(samples["predicted_step_s"], samples["step_s"])
    result.claim(
        "predicted time of a step, beside the step",
        step,
        numerator="predicted_step_s",
        denominator="step_s",
        limit=_LIMIT,
    )
    result.claim(
        "a step, beside its predicted time",
        [1 / value for value in step],
        numerator="step_s",
        denominator="predicted_step_s",
        limit=_LIMIT,
    )
    for name, verb in (("seal", "writing"), ("resume", "reading")):
        low, high = median_interval(samples[f"{name}_s"])
        predicted = median(samples[f"predicted_{name}_s"])
        result.claim(
            f"predicted time of a {name}, beside the {name}",
            ratios(samples[f"predicted_{name}_s"], samples[f"{name}_s"]),
            numerator=f"predicted_{name}_s",
            denominator=f"{name}_s",
            limit=None,
            interval90_of_measured_s=[low, high],
            predicted_s=predicted,
            predicted_bytes_alone_s=median(samples[f"predicted_{verb}_s"]),
            is_within=low <= predicted <= high,
        )


def _bytes(result: Result, directory: str, plan: Plan) -> None:
    """Compare predicted bytes with the files of a sealed store, allocated blocks beside them."""
    nbytes = allocated = 0
    for entry in os.scandir(f"{directory}/sealed"):
        if entry.is_dir() and entry.name.startswith(("step-", ".slot-")):
            stats = [file.stat() for file in os.scandir(entry.path)]
            nbytes += sum(stat.st_size for stat in stats)
            allocated += sum(512 * stat.st_blocks for stat in stats)
    slots = nbytes / plan.disk.slot_bytes
    result.fact("predicted_slot_bytes", plan.disk.slot_bytes)
    result.fact("file_bytes", nbytes)
    result.fact("allocated_bytes", allocated)
    say(f"{slots:g} slots predicted exactly: {nbytes} bytes in files, {allocated} allocated")


def _shown(found: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in found.items() if value is not None)


if __name__ == "__main__":
    run(main)
