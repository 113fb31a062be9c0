"""Time of a streamed step, beside the drive's own time for the same bytes.

Three measurements alternate: the same transfers without arithmetic (`bench.replay`), the step, and
fio moving as many bytes each way. All begin and end with nothing in flight. A sample is several
steps back to back, since the writes of one step continue into the next.

    python -m bench.step --directory DIR                          # step / replay, step / fio
    python -m bench.step --directory DIR --sweep chunk            # or ring, threads
    python -m bench.step --directory DIR --resident 0,0.25,0.5    # kept in memory
    python -m bench.step --directory DIR --master split --state-dtype bfloat16,int8
    python -m bench.step --record --resident 1 --parameters 32Mi --steps 50 --rounds 20

A variant alternates with the exact FP32 step that streams all state, in adjacent pairs. Its time
should fall in proportion to its bytes, as long as the step waits for the drive. If the drive is
faster than the processor can update, ``--drive-gbps`` simulates a slower drive.

With ``--record``, steps of a run that is recorded for ``offload top`` alternate with steps of one
that is not; with all state resident, no drive hides the cost. A sample should last some seconds,
because the record is written once a second.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import offload
from bench._fio import Fio
from bench._harness import (
    BenchError,
    Parser,
    Result,
    count,
    mebi,
    numbers,
    require_space,
    run,
    say,
    scratch,
    size,
    words,
)
from bench._model import make_gradients, make_parameters
from bench._statistics import alternate, median, ratios
from bench._streamed import STATE_ARRAYS, Streamed, exact_state_bytes
from bench._throttle import ThrottledBackend
from bench.replay import Plan, Replay
from gds import PosixBackend

_SWEEPS = {"chunk": "8,16,32,64", "ring": "2,3,4,8", "threads": "1,2,4"}
_SLACK_BYTES = 8 << 10
_PROPORTION_LIMIT = 1.15
"""Largest ratio of a variant's time per byte to the exact step's: within 15 % of proportional."""

_RECORD_LIMIT = 1.002

_STATE_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    with scratch(args.directory) as directory, ExitStack() as stack:
        # At most two stores at a time, each of two slots, and the files of the replay.
        require_space(directory, 5 * exact_state_bytes(args.parameters))
        result = Result("step", args, directory)
        result.fact("state_bytes", exact_state_bytes(args.parameters))
        if args.record:
            _against_no_record(args, result, directory)
            result.write()
            return
        baseline = stack.enter_context(_streamed(args, directory, "exact"))
        result.fact("ring_bytes", baseline.optimizer.stats().ring_bytes)
        variants = _variants(args)
        if variants:
            for number, (label, options) in enumerate(variants):
                path = os.path.join(directory, f"variant-{number}")
                with _streamed(args, path, label, **options) as variant:
                    _compare(args, result, baseline, variant)
                shutil.rmtree(path)
        else:
            _against_the_drive(args, result, baseline, directory)
        result.write()


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("step", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default="256Mi", help="bf16 parameters (default: %(default)s)")
    add("--tensors", type=int, default=8, help="parameter tensors (default: %(default)s)")
    add("--chunk-mib", type=float, default=32, help="of one FP32 array (default: %(default)s)")
    add("--ring", type=int, default=6, help="chunks in memory (default: %(default)s)")
    add("--threads", type=int, default=3, help="of reads, and of writes (default: %(default)s)")
    add("--steps", type=int, default=3, help="steps in one sample (default: %(default)s)")
    add("--fio-depth", type=int, default=4, help="transfers in flight each way, in fio")
    add("--drive-gbps", type=float, help="slow the drive down to so many GB/s, of both directions")
    add("--limit", type=float, default=1.10, help="of step / fio (default: %(default)s)")
    add("--replay-limit", type=float, default=1.05, help="of step / replay (default: %(default)s)")
    add("--sweep", choices=sorted(_SWEEPS), help="measure other values of one setting")
    add("--values", default="", help="values to sweep over, with commas")
    add("--resident", default="", help="fractions of the state kept in memory, with commas")
    add("--master", default="fp32", choices=("fp32", "split"), help="format of the master")
    add("--state-dtype", default="fp32", help="formats of the moments: fp32, bf16, int8")
    add("--combine", action="store_true", help="also --master with each --state-dtype")
    add("--record", action="store_true", help="measure what recording the run costs")
    quick = {
        "parameters": "128Ki",
        "tensors": 3,
        "chunk_mib": 0.125,
        "steps": 2,
    }
    args = parser.read(arguments, quick=quick)
    if not args.what:
        args.what = "-".join(filter(None, (mebi(args.parameters), _kind(args))))
    return args


def _kind(args: argparse.Namespace) -> str:
    """Return the label of the settings that differ from a plain run, for the file's name."""
    if args.record:
        return "record"
    if args.sweep:
        return f"sweep-{args.sweep}"
    if args.resident:
        return f"resident-drive-{args.drive_gbps:g}-gbps" if args.drive_gbps else "resident"
    dtype = "" if args.state_dtype == "fp32" else "state"
    slowed = f"drive-{args.drive_gbps:g}-gbps" if args.drive_gbps else ""
    return "-".join(filter(None, ("master" if args.master != "fp32" else "", dtype, slowed)))


def _streamed(args: argparse.Namespace, directory: str, label: str, **options: Any) -> Streamed:
    parameters = make_parameters(args.parameters, args.tensors)
    threads = options.pop("threads", args.threads)
    settings: dict[str, Any] = {
        "chunk_bytes": int(args.chunk_mib * (1 << 20)),
        "ring_chunks": args.ring,
        "backend": PosixBackend(read_threads=threads, write_threads=threads),
        **options,
    }
    if args.drive_gbps:
        settings["backend"] = ThrottledBackend(settings["backend"], args.drive_gbps)
    say(f"preparing {label}: {size(exact_state_bytes(args.parameters))} of FP32 state")
    return Streamed(
        os.path.join(directory, "store"), parameters, make_gradients(parameters), label, settings
    )


def _variants(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Return the variants to compare with the exact FP32 step, as labels and options."""
    if args.sweep:
        values = numbers(args.values or _SWEEPS[args.sweep])
        return [(f"{args.sweep} {value:g}", _swept(args.sweep, value)) for value in values]
    out = [(f"resident {part:g}", _resident(args, part)) for part in numbers(args.resident)]
    names = [_STATE_DTYPES.get(name, name) for name in words(args.state_dtype)]
    moments = [{"state_dtype": name} for name in names if name != "float32"]
    out += [(f"state {options['state_dtype']}", dict(options)) for options in moments]
    if args.master == "split":
        out.append(("master split", {"master": "split"}))
        if args.combine:
            out += [
                (f"master split, state {options['state_dtype']}", {"master": "split", **options})
                for options in moments
            ]
    return out


def _resident(args: argparse.Namespace, fraction: float) -> dict[str, Any]:
    """Return the option that keeps a fraction of the state in memory."""
    chunks = -(-args.parameters * 4 // int(args.chunk_mib * (1 << 20)))
    # Memory of a chunk is a little larger than the chunk, for its alignment.
    room = exact_state_bytes(args.parameters) + chunks * STATE_ARRAYS * _SLACK_BYTES
    nbytes = int(fraction * room)
    return {"host_memory": nbytes} if nbytes else {}


def _swept(setting: str, value: float) -> dict[str, Any]:
    if setting == "chunk":
        return {"chunk_bytes": int(value * (1 << 20))}
    return {"ring_chunks" if setting == "ring" else "threads": int(value)}


def _against_the_drive(
    args: argparse.Namespace, result: Result, step: Streamed, directory: str
) -> None:
    """Measure the step beside a replay of its transfers, and beside fio if it is installed."""
    chunk_bytes = int(args.chunk_mib * (1 << 20))
    plan = Plan(
        num_files=STATE_ARRAYS,
        array_bytes=args.parameters * 4,
        chunk_bytes=chunk_bytes // 4096 * 4096,
    )
    backend = PosixBackend(read_threads=args.threads, write_threads=args.threads)
    replay = Replay(backend, directory, plan, args.ring)
    replay.run(1)
    moved = step.bytes_of(args.steps)
    result.fact("step_read_bytes", moved[0] // args.steps)
    result.fact("step_written_bytes", moved[1] // args.steps)
    measure: dict[str, Callable[[], float]] = {
        "replay_s": partial(replay.run, args.steps),
        "step_s": partial(step.sample, args.steps),
    }
    try:
        fio = Fio(directory)
    except BenchError as error:
        result.skip(str(error))
    else:
        measure["fio_s"] = _fio_sample(args, result, fio, replay)
    for name in measure.keys() - {"step_s"}:
        measure[name]()  # once untimed: caches of the host, memory, the other engine's queues
    # The step stands in the middle, so that it is next to either of the others in every round.
    before = step.optimizer.stats()
    samples = alternate(measure, args.rounds, report=say)
    after = step.optimizer.stats()
    for name in ("step_s", "compute_s", "wait_read_s", "wait_write_s"):
        seconds = getattr(after, name) - getattr(before, name)
        result.fact(f"mean_inside_step_{name}", seconds / (after.steps - before.steps))
    replay.close()
    backend.close()
    result.add_samples(samples)
    result.fact("state_gbps", sum(moved) / args.steps / median(samples["step_s"]) / 1e9)
    if "fio_s" in samples:
        result.claim(
            "a streamed step, beside fio moving as many bytes",
            ratios(samples["step_s"], samples["fio_s"]),
            numerator="step_s",
            denominator="fio_s",
            limit=args.limit,
        )
    result.claim(
        "a streamed step, beside its transfers without the arithmetic",
        ratios(samples["step_s"], samples["replay_s"]),
        numerator="step_s",
        denominator="replay_s",
        limit=args.replay_limit,
    )


def _against_no_record(args: argparse.Namespace, result: Result, directory: str) -> None:
    """Measure steps of a run that is recorded, beside those of one that is not.

    Each sample has an optimizer of its own, so that nothing is recorded beside the other samples.
    """
    parameters = make_parameters(args.parameters, args.tensors)
    gradients = make_gradients(parameters)
    settings = {
        "chunk_bytes": int(args.chunk_mib * (1 << 20)),
        "ring_chunks": args.ring,
        "drives": offload.DriveTuning(threads=args.threads, calibrate=False),
        **_resident(args, sum(numbers(args.resident))),
    }
    shares: list[float] = []

    def sample(*, record: bool) -> float:
        """Return the seconds of a step, and note the processor time of the recorder's thread."""
        options = {**settings, "record": record}
        store = os.path.join(directory, "store")
        with Streamed(store, parameters, gradients, "record" if record else "none", options) as one:
            clocks = [
                time.pthread_getcpuclockid(thread.ident or 0)
                for thread in threading.enumerate()
                if thread.name == "offload-record"
            ]
            before_s = sum(map(time.clock_gettime, clocks))
            step_s = one.sample(args.steps)
            if record:
                busy_s = sum(map(time.clock_gettime, clocks)) - before_s
                shares.append(busy_s / (step_s * args.steps))
        return step_s

    samples = alternate(
        {"recorded_s": partial(sample, record=True), "plain_s": partial(sample, record=False)},
        args.rounds,
        report=say,
    )
    result.add_samples(samples)
    result.fact("recorder_cpu_share", median(shares))
    say(f"the recorder's thread takes {median(shares):.3%} of the time of a core")
    result.claim(
        "a step of a run that is recorded, beside one of a run that is not",
        ratios(samples["recorded_s"], samples["plain_s"]),
        numerator="recorded_s",
        denominator="plain_s",
        limit=_RECORD_LIMIT,
    )


def _fio_sample(
    args: argparse.Namespace, result: Result, fio: Fio, replay: Replay
) -> Callable[[], float]:
    """Return a function that measures fio, scaled up for bytes beyond whole requests."""
    plan = replay.plan
    request = min(plan.chunk_bytes, plan.array_bytes)
    file_bytes = plan.array_bytes // request * request
    result.fact("fio_engine", fio.engine)
    result.fact("fio_request_bytes", request)
    result.fact("fio_moved_share", file_bytes / plan.array_bytes)

    def sample() -> float:
        """Run fio once, and return its seconds for the bytes of one step."""
        found = fio.mixed(
            replay.names,
            file_bytes=file_bytes,
            request_bytes=request,
            depth=args.fio_depth,
            loops=args.steps,
        )
        seen = max(found.huge_bytes, result.facts.get("fio_huge_page_bytes", 0))
        result.fact("fio_huge_page_bytes", seen)
        share: float = file_bytes / plan.array_bytes
        return found.seconds / int(args.steps) / share

    return sample


def _compare(args: argparse.Namespace, result: Result, exact: Streamed, variant: Streamed) -> None:
    """Measure a variant in adjacent pairs with the exact step."""
    of_exact, of_variant = (sum(s.bytes_of(args.steps)) for s in (exact, variant))
    bytes_ratio = of_variant / of_exact
    key = variant.label.replace(", ", "_").replace(" ", "_")
    samples = alternate(
        {
            "exact_s": partial(exact.sample, args.steps),
            f"{key}_s": partial(variant.sample, args.steps),
        },
        args.rounds,
        report=say,
    )
    result.add_samples({f"{key}_exact_s": samples["exact_s"], f"{key}_s": samples[f"{key}_s"]})
    stats = variant.optimizer.stats()
    times = ratios(samples[f"{key}_s"], samples["exact_s"])
    details = {
        "bytes_ratio": bytes_ratio,
        "ring_bytes": stats.ring_bytes,
        "resident_bytes": stats.resident_bytes,
    }
    say(f"{variant.label}: {bytes_ratio:.3f} of the bytes, {median(times):.3f} of the time")
    if args.sweep or not 0 < bytes_ratio < 1:
        result.claim(
            f"step with {variant.label}, beside the exact FP32 step",
            times,
            numerator=f"{key}_s",
            denominator=f"{key}_exact_s",
            limit=None,
            **details,
        )
        return
    result.claim(
        f"time of a step with {variant.label} per byte, beside the exact step",
        [value / bytes_ratio for value in times],
        numerator=f"{key}_s / {key}_exact_s",
        denominator="bytes moved / bytes moved by the exact step",
        limit=_PROPORTION_LIMIT,
        time_ratio=median(times),
        **details,
    )


if __name__ == "__main__":
    run(main)
