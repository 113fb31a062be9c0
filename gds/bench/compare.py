"""The same requests by fio, in turns, and how far the two rates are apart."""

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
"""How far the median of the ratios may be from 1."""

_FIO_RW: Final = {"mixed": "rw", "randmixed": "randrw"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Pairs of rates, and what they say."""

    workload: Workload
    engine: str
    huge_bytes: int
    """Memory of fio on huge pages, the most that was seen."""

    gds_bytes_per_s: list[float]
    fio_bytes_per_s: list[float]

    @property
    def verdict(self) -> Verdict:
        """Median and interval of the ratios, ours divided by fio's."""
        return judge(ratios(self.gds_bytes_per_s, self.fio_bytes_per_s), None)

    @property
    def agrees(self) -> bool | None:
        """Whether the interval reaches to within `AGREEMENT` of 1; None: too few pairs to say."""
        if len(self.gds_bytes_per_s) < MIN_PAIRS:
            return None
        return self.verdict.low <= 1 + AGREEMENT and self.verdict.high >= 1 - AGREEMENT

    @property
    def words(self) -> str:
        """The result, for people."""
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
        """Return everything as JSON values; keys are only ever added."""
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
    """Run a workload and fio in turns, each over the whole file once, on the same file.

    Destroys the contents of a scratch file where the workload writes. Syncs are not in either rate.

    Args:
        workload: What to do; passes, seconds and verification are left out.
        target: With which file.
        runner: In the directory of that file.
        open_backend: See `measure`.
        pairs: How many; fewer than `MIN_PAIRS` give no verdict.
        seed: Of the random order.
        say: Called with a line for people after each pair.

    Raises:
        FioError: fio failed, or moved other bytes than it was asked for.
    """
    once = dataclasses.replace(workload, passes=1, seconds=0.0)
    arguments = fio_arguments(once, os.path.basename(target.path), runner.engine)
    most_huge = 0

    def ours() -> float:
        return measure(once, target, open_backend, seed=seed).bytes_per_s

    def theirs() -> float:
        nonlocal most_huge
        target.sync()
        if once.cache == "cold":
            target.drop_cache()
        elif once.cache == "warm":
            target.warm_cache()
        report, huge_bytes = runner.run(arguments)
        most_huge = max(most_huge, huge_bytes)
        rate = _rate(report["jobs"][0], once)
        target.sync()  # or the next one would pay for it
        return rate

    samples = alternate({"gds": ours, "fio": theirs}, pairs, report=say)
    return Comparison(
        workload=once,
        engine=runner.engine if once.path == "direct" else "psync",
        huge_bytes=most_huge,
        gds_bytes_per_s=samples["gds"],
        fio_bytes_per_s=samples["fio"],
    )


def fio_arguments(workload: Workload, name: str, engine: str) -> list[str]:
    """Return the job that does what the workload does.

    As many requests are in the kernel at once as the threads of the backend put there. Through the
    page cache asynchronous engines are not asynchronous, so there each thread has its own part of
    the file.

    Args:
        workload: What to do.
        name: Of an existing file in fio's directory.
        engine: An asynchronous one that works there.

    Raises:
        FioError: fio has no such path.
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
            raise FioError("there are fewer requests than threads: nothing to compare")
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
        "--iomem_align=2m",  # or the huge pages would begin somewhere within its buffers
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
    moved = int(job["read"]["io_bytes"]) + int(job["write"]["io_bytes"])
    least = (workload.num_requests - workload.in_flight * 2) * workload.size
    if not max(least, 1) <= moved <= workload.num_requests * workload.size:
        raise FioError(
            f"fio was to move {workload.num_requests * workload.size} bytes, and moved {moved}"
        )
    milliseconds = max(int(job["read"]["runtime"]), int(job["write"]["runtime"]), 1)
    return moved * 1000 / milliseconds
