"""Comparison with fio: the same requests by gds and fio in turns, with the ratio of the rates."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gds.bench.measure import OpenBackend, measure
from gds.bench.statistics import MIN_PAIRS, Spread, alternate, ratios, spread
from gds.bench.target import Target
from gds.bench.workload import Workload
from gds.errors import RefusedError

_POLL_S: Final = 0.02


class FioError(RefusedError):
    """fio failed, or cannot run a job."""


class FioMissingError(FioError):
    """fio is not installed."""


class FioRunner:
    """Runs fio in a directory, with memory on huge pages like that of `gds`, if the kernel agrees.

    The kernel may refuse huge pages, so their amount is read from ``/proc`` while fio runs.
    """

    def __init__(self, directory: str) -> None:
        """Find fio, and an asynchronous engine that works in `directory`."""
        path = shutil.which("fio")
        if path is None:
            raise FioMissingError("fio is not installed (apt-get install fio)")
        self._path = path
        self._directory = directory
        self.engine = self._choose_engine()

    def run(self, arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
        """Run jobs of fio; return its report, and the most bytes of its memory on huge pages."""
        process = subprocess.Popen(
            [
                self._path,
                "--output-format=json",
                "--name=global",
                "--thread",
                "--mem=malloc",
                *arguments,
            ],
            cwd=self._directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        )
        watch = _HugePages(process.pid)
        try:
            out, error = process.communicate()
        except BaseException:  # after an interrupt, fio must not keep writing to a removed file
            process.kill()
            process.wait()
            raise
        finally:
            huge_bytes = watch.stop()
        begin = out.find("{")
        if process.returncode != 0 or begin < 0:
            raise FioError(f"fio failed ({process.returncode}): {(error or out).strip()[-300:]}")
        report: dict[str, Any] = json.loads(out[begin:])
        return report, huge_bytes

    def _choose_engine(self) -> str:
        """Return the first asynchronous engine that works, tried with a small file."""
        said = ""
        name = f".gds-bench-fio-{os.getpid()}"
        for engine in ("io_uring", "libaio"):
            try:
                self.run(
                    [
                        "--direct=1",
                        f"--ioengine={engine}",
                        f"--filename={name}",
                        "--size=64k",
                        "--name=probe",
                        "--rw=write",
                    ]
                )
            except FioError as error:
                said = str(error)
                continue
            finally:
                Path(self._directory, name).unlink(missing_ok=True)
            return engine
        raise FioError(f"fio runs here with neither io_uring nor libaio: {said}")


class _HugePages:
    """Watches how much memory of a process is on huge pages, and keeps the largest value."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/smaps_rollup")
        self._largest = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return self._largest

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            try:
                text = self._path.read_text()
            except OSError:
                continue
            found = re.search(r"^AnonHugePages:\s+(\d+) kB", text, re.MULTILINE)
            if found:
                self._largest = max(self._largest, int(found[1]) << 10)


AGREEMENT: Final = 0.15
"""Largest difference between 1 and the median of the ratios that counts as agreement."""

_FIO_RW: Final = {"mixed": "rw", "randmixed": "randrw"}
"""Patterns whose names differ in fio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Pairs of rates of gds and fio, with a verdict."""

    workload: Workload
    engine: str
    huge_bytes: int
    """Largest amount of fio's memory that was seen on huge pages, in bytes."""

    gds_bytes_per_s: list[float]
    fio_bytes_per_s: list[float]

    @property
    def ratio(self) -> Spread:
        """Median and interval of the rate of gds divided by that of fio."""
        return spread(ratios(self.gds_bytes_per_s, self.fio_bytes_per_s))

    @property
    def agrees(self) -> bool | None:
        """Whether the interval of the ratio overlaps 1 ± `AGREEMENT`; None if pairs are too few."""
        if len(self.gds_bytes_per_s) < MIN_PAIRS:
            return None
        return self.ratio.low <= 1 + AGREEMENT and self.ratio.high >= 1 - AGREEMENT

    @property
    def words(self) -> str:
        """Verdict in words, for people."""
        if self.agrees is None:
            return f"too few pairs to say ({len(self.gds_bytes_per_s)} of {MIN_PAIRS})"
        middle = self.ratio.median
        if abs(middle - 1) <= AGREEMENT:
            return f"agrees within {AGREEMENT:.0%}"
        faster = "gds is faster" if middle > 1 else "gds is slower"
        if self.agrees:
            return f"agrees within {AGREEMENT:.0%} and noise ({faster})"
        return f"does NOT agree within {AGREEMENT:.0%}: {faster}"

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values. Later versions only add keys."""
        return {
            "workload": dataclasses.asdict(self.workload),
            "engine": self.engine,
            "fio_huge_page_bytes": self.huge_bytes,
            "gds_bytes_per_s": self.gds_bytes_per_s,
            "fio_bytes_per_s": self.fio_bytes_per_s,
            "ratio_median": self.ratio.median,
            "ratio_interval90": list(self.ratio[1:]),
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

    A workload that writes destroys the content of the scratch file. Its passes and seconds are
    ignored, and nothing is verified. Neither rate includes syncs. Fewer than `MIN_PAIRS` pairs give
    no verdict.

    Raises:
        FioError: fio failed, or did not move the expected number of bytes.
    """
    once = dataclasses.replace(workload, passes=1, seconds=0.0, ramp_s=0.0)
    arguments = fio_arguments(once, os.path.basename(target.path), runner.engine)
    most_huge = 0

    def ours() -> float:
        return measure(once, [[target]], open_backend, seed=seed).bytes_per_s

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

    Asynchronous engines are not asynchronous through the page cache, so a buffered job has threads
    instead, each with its own part of the file.
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
