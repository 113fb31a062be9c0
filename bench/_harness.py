"""Common parts of all scripts: arguments, a directory on the drive, and the result as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench._machine import describe_machine, describe_storage, describe_versions
from bench._statistics import MIN_PAIRS, Verdict, judge, median
from gds import probe

RESULTS = Path(__file__).parent / "results"
_QUICK_ROUNDS = 3
_PLACES = ("directory", "output", "before", "deepspeed_python", "deepspeed_extensions")
"""Arguments that name a place on the machine. Results record whether they were given, but not
their values."""


class BenchError(Exception):
    """A measurement cannot be made on this machine. The message says why, and what to do."""


class Parser(argparse.ArgumentParser):
    """Command line of a script, with the arguments that all scripts have."""

    def __init__(self, bench: str, description: str) -> None:
        super().__init__(
            prog=f"python -m bench.{bench}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.bench = bench
        self.add_argument(
            "--directory",
            default=".",
            help="where to measure: a scratch directory is made in it and removed afterwards; it "
            "must be on the drive to be measured, not in memory (default: %(default)s)",
        )
        self.add_argument("--output", default=str(RESULTS), help="folder for the JSON file")
        self.add_argument("--what", default="", help="label of the run in the file's name")
        self.add_argument("--notes", default="", help="a sentence to record with the result")
        self.add_argument(
            "--rounds", type=int, default=MIN_PAIRS, help="pairs to measure (default: %(default)s)"
        )
        self.add_argument(
            "--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing"
        )

    def read(self, arguments: Sequence[str] | None, *, quick: dict[str, Any]) -> argparse.Namespace:
        """Parse the command line. With ``--quick``, the values of `quick` replace the defaults."""
        if arguments is None:
            arguments = sys.argv[1:]
        if "--quick" in arguments:
            self.set_defaults(**{"rounds": _QUICK_ROUNDS, **quick})
        return self.parse_args(arguments)


@contextlib.contextmanager
def scratch(directory: str) -> Iterator[str]:
    """Yield a new directory within `directory`, and remove it with all its files.

    Raises:
        BenchError: The directory does not exist, is in memory, or does not support direct I/O, so
            that there is no drive to measure.
    """
    if not os.path.isdir(directory):
        raise BenchError(f"--directory {directory}: there is no such directory")
    mount = probe.mount_of(directory)
    if mount.volatile:
        raise BenchError(
            f"--directory {directory} is in memory ({mount.filesystem}), and a drive is to be "
            "measured: name a directory on it"
        )
    direct = probe.direct_io(directory)
    if not direct.supported:
        raise BenchError(
            f"--directory {directory}: no direct I/O there ({direct.reason}), so the page cache "
            "would be measured: name a directory on a local drive"
        )
    path = tempfile.mkdtemp(prefix="offload-bench-", dir=directory)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def require_space(directory: str, nbytes: int) -> None:
    """Refuse to begin if the free space is less than `nbytes` and a tenth.

    Raises:
        BenchError: The disk has too little space.
    """
    free = shutil.disk_usage(directory).free
    if free < nbytes * 1.1:
        raise BenchError(
            f"{size(nbytes)} are needed and {size(free)} are free: give another --directory or "
            "measure fewer --parameters"
        )


class Result:
    """Collected samples, facts, and claims with verdicts of one run, to be written as JSON."""

    def __init__(self, bench: str, args: argparse.Namespace, directory: str) -> None:
        self.bench = bench
        self._args = args
        self._began = datetime.now(UTC)
        self._machine = describe_machine()
        self._storage = describe_storage(directory)
        self.versions = describe_versions()
        self.samples: dict[str, list[float]] = {}
        self.facts: dict[str, Any] = {}
        self.claims: list[dict[str, Any]] = []
        self.skipped: list[str] = []

    def add_samples(self, samples: dict[str, list[float]]) -> None:
        """Record raw samples by name. A name ends in the unit."""
        for name, values in samples.items():
            self.samples.setdefault(name, []).extend(values)

    def fact(self, name: str, value: Any) -> None:
        """Record a value without a limit. The name of a number ends in the unit."""
        self.facts[name] = value

    def skip(self, reason: str) -> None:
        """Record and print that something was not measured, and why."""
        self.skipped.append(reason)
        say(f"skipped: {reason}")

    def claim(
        self,
        text: str,
        values: Sequence[float],
        *,
        numerator: str,
        denominator: str,
        limit: float | None,
        **details: Any,
    ) -> Verdict:
        """Judge a ratio, print it, and record it.

        Args:
            text: The claim in words; a small ratio is good.
            values: One ratio for every adjacent pair of samples.
            numerator: Name of the dividend.
            denominator: Name of the divisor, measured in the same run.
            limit: Largest ratio that meets the claim; None if nothing is promised.
            details: Further numbers to record with the claim.

        Raises:
            BenchError: No value is finite.
        """
        values = [value for value in values if math.isfinite(value)]
        if not values:
            raise BenchError(f"{text}: no pair gave a ratio")
        verdict = judge(values, limit)
        enough = len(values) >= MIN_PAIRS
        self.claims.append(
            {
                "claim": text,
                "numerator": numerator,
                "denominator": denominator,
                "ratios": values,
                "median": verdict.median,
                "interval90": [verdict.low, verdict.high],
                "limit": limit,
                "met": verdict.met if enough else None,
                "verdict": verdict.words if enough else "too few pairs",
                **details,
            }
        )
        bound = "" if limit is None else f", limit {limit:g}"
        words = verdict.words if enough else f"too few pairs ({len(values)} of {MIN_PAIRS})"
        interval = f"{verdict.low:.3f} to {verdict.high:.3f}"
        say(f"{text}: {verdict.median:.3f} ({interval}{bound}): {words}")
        return verdict

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        settings = {k: v for k, v in vars(self._args).items() if k not in ("notes", "quick")}
        for name in _PLACES:
            if settings.get(name):
                settings[name] = f"({name})"
        return {
            "bench": self.bench,
            "what": self.what,
            "date": self._began.strftime("%Y-%m-%d"),
            "started": self._began.isoformat(timespec="seconds"),
            "elapsed_s": round((datetime.now(UTC) - self._began).total_seconds(), 1),
            "quick": bool(self._args.quick),
            "command": self._command(),
            "settings": settings,
            "machine": self._machine | {"load_average_after": list(os.getloadavg())},
            "storage": self._storage,
            "versions": self.versions,
            "notes": self._args.notes,
            "claims": self.claims,
            "facts": self.facts,
            "skipped": self.skipped,
            "medians": {name: median(values) for name, values in self.samples.items()},
            "samples": self.samples,
        }

    @property
    def what(self) -> str:
        """Label of the measurement, used in the file's name."""
        return str(self._args.what)

    def write(self) -> Path:
        """Write ``<date>-<bench>-<what>.json`` and return its path."""
        folder = Path(self._args.output)
        folder.mkdir(parents=True, exist_ok=True)
        date = self._began.strftime("%Y-%m-%d")
        path = folder / f"{date}-{self.bench}-{self.what}.json"
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        say(f"written to {path}")
        return path

    def _command(self) -> str:
        words = []
        for name, value in vars(self._args).items():
            if value in (None, "", False) or name == "notes":
                continue
            flag = "--" + name.replace("_", "-")
            if value is True:
                words.append(flag)
            elif name == "output":
                continue
            elif name in _PLACES:
                words.append(f"{flag} {name.upper()}")
            else:
                plain = ",".join(map(str, value)) if isinstance(value, list) else value
                words.append(f"{flag} {plain}")
        return " ".join((f"python -m bench.{self.bench}", *words))


def run(main: Callable[[], None]) -> None:
    """Run a script's main function; a `BenchError` ends the process with its message and status 2.

    The warning of a closed optimizer about steps without a checkpoint is suppressed.
    """
    logging.getLogger("offload").addFilter(
        lambda record: "steps are lost" not in record.getMessage()
    )
    try:
        main()
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def say(line: str) -> None:
    """Print a line, and flush it, since the output may be a pipe."""
    print(line, flush=True)


def numbers(text: str) -> list[float]:
    """Parse numbers with commas between them: ``0.25,0.5``."""
    return [float(word) for word in words(text)]


def words(text: str) -> list[str]:
    """Parse words with commas between them: ``chunk,ring``."""
    return [word.strip() for word in text.split(",") if word.strip()]


def mebi(count: int) -> str:
    """Return a number of parameters as a label: ``256Mi``, ``64Ki``."""
    for unit, factor in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if count % factor == 0:
            return f"{count // factor}{unit}"
    return str(count)


def count(text: str) -> int:
    """Parse a number of parameters: ``256Mi``, ``64Ki``, ``1000``."""
    for unit, factor in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


def size(nbytes: float) -> str:
    """Return a size in bytes as text: ``1.50 GiB``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"
