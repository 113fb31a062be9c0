"""Comparison with fio: the same requests by gds and fio in turns, with the ratio of the rates."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from gds.bench.fio import FioError, FioRunner
from gds.bench.measure import OpenBackend, measure
from gds.bench.statistics import MIN_PAIRS, Verdict, alternate, judge, ratios
from gds.bench.target import Target
from gds.bench.workload import Workload

AGREEMENT: Final = 0.15
"""Largest difference between 1 and the median of the ratios that counts as agreement."""

_FIO_RW: Final = {"mixed": "rw", "randmixed": "randrw"}
"""Patterns whose names differ in fio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Pairs of rates of gds and fio, with a verdict."""

    workload: Workload
    """Workload of both programs."""

    engine: str
    """I/O engine that fio used."""

    huge_bytes: int
    """Largest amount of fio's memory that was seen on huge pages, in bytes."""

    gds_bytes_per_s: list[float]
    """Rates of gds in bytes per second, in the order of the pairs."""

    fio_bytes_per_s: list[float]
    """Rates of fio in bytes per second, in the order of the pairs."""

    @property
    def verdict(self) -> Verdict:
        """Median and interval of the ratios: the rate of gds divided by that of fio."""
        return judge(ratios(self.gds_bytes_per_s, self.fio_bytes_per_s), None)

    @property
    def agrees(self) -> bool | None:
        """Whether the interval of the ratio overlaps 1 ± `AGREEMENT`; None if pairs are too few."""
        if len(self.gds_bytes_per_s) < MIN_PAIRS:
            return None
        return self.verdict.low <= 1 + AGREEMENT and self.verdict.high >= 1 - AGREEMENT

    @property
    def words(self) -> str:
        """Verdict in words, for people."""
        if self.agrees is None:
            return f"too few pairs to say ({len(self.gds_bytes_per_s)} of {MIN_PAIRS})"
        middle = self.verdict.median
        if abs(middle - 1) <= AGREEMENT:
            return f"agrees within {AGREEMENT:.0%}"
        faster = "gds is faster" if middle > 1 else "gds is slower"
        if self.agrees:
            return f"agrees within {AGREEMENT:.0%} and noise ({faster})"
        return f"does NOT agree within {AGREEMENT:.0%}: {faster}"

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values. Later versions only add keys."""
        verdict = self.verdict
        return {
            "workload": dataclasses.asdict(self.workload),
            "engine": self.engine,
            "fio_huge_page_bytes": self.huge_bytes,
            "gds_bytes_per_s": self.gds_bytes_per_s,
            "fio_bytes_per_s": self.fio_bytes_per_s,
            "ratio_median": verdict.median,
            "ratio_interval90": [verdict.low, verdict.high],
            "agrees": self.agrees,
            "verdict": self.words,
        }


def compare(
    workload: Workload,
    target: Target,
    runner: FioRunner,
    open_backend: OpenBackend,
    *,
    pairs: int = MIN_PAIRS,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> Comparison:
    """Run a workload alternately by gds and by fio, each time over the whole of the same file.

    A workload that writes destroys the content of the scratch file. Neither rate includes syncs.

    Args:
        workload: Requests to run; its passes and seconds are ignored, and nothing is verified.
        target: File to transfer to and from.
        runner: fio, in the directory of the file.
        open_backend: Function that makes the backend of gds; see `measure`.
        pairs: Number of pairs; fewer than `MIN_PAIRS` give no verdict.
        seed: Seed of the random order of requests.
        say: Function that is called with a line for people after each pair.

    Raises:
        FioError: fio failed, or did not move the expected number of bytes.
    """
    once = dataclasses.replace(workload, passes=1, seconds=0.0, ramp_s=0.0)
    arguments = fio_arguments(once, os.path.basename(target.path), runner.engine)
    most_huge = 0

    def ours() -> float:
        """Return the rate of gds, in bytes per second."""
        return measure(once, [[target]], open_backend, seed=seed).bytes_per_s

    def theirs() -> float:
        """Return the rate of fio, in bytes per second."""
        nonlocal most_huge
        target.sync()
        if once.cache == "cold":
            target.drop_cache()
        elif once.cache == "warm":
            target.warm_cache()
        report, huge_bytes = runner.run(arguments)
        most_huge = max(most_huge, huge_bytes)
        rate = _rate(report["jobs"][0], once)
        target.sync()  # otherwise the next measurement would include this sync
        return rate

    samples = alternate(
        {"gds": ours, "fio": theirs}, pairs, report=say, show=lambda rate: f"{rate / 1e9:.3f} GB/s"
    )
    return Comparison(
        workload=once,
        engine=runner.engine if once.path == "direct" else "psync",
        huge_bytes=most_huge,
        gds_bytes_per_s=samples["gds"],
        fio_bytes_per_s=samples["fio"],
    )


def fio_arguments(workload: Workload, name: str, engine: str) -> list[str]:
    """Return the arguments of the fio job that is equivalent to a workload.

    fio keeps as many requests in the kernel as the backend would. Asynchronous engines are not
    asynchronous through the page cache. So a buffered job has threads instead, each with its own
    part of the file.
    """
    in_kernel = min(
        workload.in_flight, workload.threads * (2 if workload.reads and workload.writes else 1)
    )
    total = workload.num_requests * workload.size
    if workload.path == "direct":
        shape = ["--direct=1", f"--ioengine={engine}", f"--iodepth={in_kernel}", f"--size={total}"]
    elif workload.path == "buffered":
        share = workload.num_requests // in_kernel * workload.size
        if not share:
            raise FioError("there are fewer requests than threads, so nothing can be compared")
        shape = [
            "--direct=0",
            "--ioengine=psync",
            f"--numjobs={in_kernel}",
            f"--size={share}",
            f"--offset_increment={share}",
            "--group_reporting",
        ]
    else:
        raise FioError(f"fio does not know the path {workload.path!r}")
    mix = [f"--rwmixread={workload.mix}"] if workload.reads and workload.writes else []
    return [
        *shape,
        *mix,
        f"--bs={workload.size}",
        "--iomem_align=2m",  # otherwise huge pages would not begin at the start of a buffer
        "--overwrite=1",
        "--fallocate=none",
        "--allow_file_create=0",
        "--invalidate=0",
        "--randrepeat=0",
        *([] if workload.writes else ["--readonly"]),
        "--name=job",
        "--filename=" + name.replace(":", "\\:"),
        f"--rw={_FIO_RW.get(workload.rw, workload.rw)}",
    ]


def _rate(job: dict[str, Any], workload: Workload) -> float:
    """Return the rate in a report of fio, in bytes per second; checks the bytes moved."""
    moved = int(job["read"]["io_bytes"]) + int(job["write"]["io_bytes"])
    least = (workload.num_requests - workload.in_flight * 2) * workload.size
    if not max(least, 1) <= moved <= workload.num_requests * workload.size:
        raise FioError(
            f"fio was to move {workload.num_requests * workload.size} bytes, and moved {moved}"
        )
    milliseconds = max(int(job["read"]["runtime"]), int(job["write"]["runtime"]), 1)
    return moved * 1000 / milliseconds
