"""Rates of `gds bench` beside those of fio, along each axis: pattern, size, threads and path.

Each point changes one property of a base: reads of 1 MiB in order by two threads with direct I/O.
gds and fio run the same requests on the same file in turns, both with buffers on huge pages, and
each run moves the whole file once. Neither time includes syncs. The ratio is the time of gds
divided by the time of fio.

    python -m bench.fio_axes --directory DIR                    # gds / fio, for every point
    python -m bench.fio_axes --directory DIR --points read,write,read-64K
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench._harness import BenchError, Parser, Result, require_space, run, say, scratch, size, words
from bench._statistics import ratios
from gds.bench.compare import AGREEMENT, FioError, FioRunner, compare
from gds.bench.target import targets_at
from gds.bench.workload import PATTERNS, Workload, parse_size
from gds.opening import open_path

_SIZES = ("64K", "256K", "4M", "16M", "32M")
_THREADS = (1, 4)


def points(file_bytes: int) -> dict[str, Workload]:
    """Return all workloads, by name."""
    base = Workload(file_bytes=file_bytes)

    def changed(**values: object) -> Workload:
        """Return the base with other values."""
        return dataclasses.replace(base, **values)  # type: ignore[arg-type]

    return {
        **{rw: changed(rw=rw) for rw in PATTERNS},
        **{
            f"{rw}-{text}": changed(rw=rw, size=parse_size(text))
            for rw in ("read", "write")
            for text in _SIZES
        },
        **{
            f"{rw}-{count}-threads": changed(rw=rw, threads=count)
            for rw in ("read", "write")
            for count in _THREADS
        },
        **{f"{rw}-buffered": changed(rw=rw, path="buffered") for rw in ("read", "write")},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    parser = Parser("fio_axes", __doc__ or "")
    parser.add_argument("--file-mib", type=int, default=1024, help="size of the file in MiB")
    parser.add_argument("--points", type=words, help="names of points, with commas (default: all)")
    args = parser.read(arguments, quick={"file_mib": 64})
    file_bytes = args.file_mib << 20
    args.what = args.what or size(file_bytes).replace(" ", "").replace(".00", "")
    known = points(file_bytes)
    if unknown := [name for name in args.points or () if name not in known]:
        raise BenchError(f"--points {unknown[0]}: there are {', '.join(known)}")
    with scratch(args.directory) as directory:
        require_space(directory, file_bytes)
        try:
            runner = FioRunner(directory)
        except FioError as error:
            raise BenchError(str(error)) from error
        result = Result("fio_axes", args, directory)
        result.fact("fio_engine", runner.engine)
        result.fact("agreement", AGREEMENT)
        with targets_at(directory, file_bytes, seed=0, allow_small=True) as (target,):
            for name, workload in known.items():
                if args.points and name not in args.points:
                    continue
                say(f"{name}:")
                found = compare(workload, target, runner, open_path, pairs=args.rounds, say=say)
                fio, gds = f"{name}_fio_bytes_per_s", f"{name}_gds_bytes_per_s"
                result.add_samples({fio: found.fio_bytes_per_s, gds: found.gds_bytes_per_s})
                result.claim(
                    f"{name}: time of gds beside fio",
                    ratios(found.fio_bytes_per_s, found.gds_bytes_per_s),
                    numerator=fio,
                    denominator=gds,
                    limit=1 + AGREEMENT,
                    fio_huge_page_bytes=found.huge_bytes,
                    agrees=found.agrees,
                    agreement=found.words,
                )
        result.write()


if __name__ == "__main__":
    run(main)
