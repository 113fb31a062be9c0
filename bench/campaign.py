"""Run one campaign in full, for an hour at most, and record what it has tried and found.

    python -m bench.campaign crash
    python -m bench.campaign --list

A campaign enumerates what the tests run a sample of. Its result has the date, the revision and a
digest of the library, the seed, how much was tried, how the machine was loaded, and what was found:
`bench/results/<date>-<name>.json`. A finding becomes a test of its own. A result is of its day:
nothing has to be recorded again because the library has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from bench._harness import RESULTS, BenchError, run, say
from bench._machine import describe_machine, describe_versions
from tests.dying import dying

_ROOT: Final = Path(__file__).parent.parent
_SAID_LINES: Final = 40
_GRACE_S: Final = 120.0
"""For the end of what is interrupted."""


@dataclass(frozen=True)
class Campaign:
    """What a campaign runs: tests in full, then programs that have a command line of their own."""

    about: str
    tests: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the tests read. ``SEED`` in a value stands for the seed."""
    commands: tuple[tuple[str, ...], ...] = ()
    """Modules with arguments. ``SEED`` and ``FOLDER`` stand for the seed and a scratch folder, and
    ``SECONDS`` for half of the time that is left."""


_BENCH: Final = ("--directory", "FOLDER", "--output", "FOLDER")

CAMPAIGNS: Final = {
    "crash": Campaign(
        "power lost, and an error, at every file operation of a run",
        (
            "tests/crash/test_crash_points.py",
            "tests/crash/test_io_errors.py",
            "tests/crash/test_environment_errors.py",
            "tests/crash/test_frozen_parameters.py",
        ),
        {"CRASH_SEED": "SEED"},
    ),
    "state-machine": Campaign(
        "random sequences of training, checkpoints, crashes, faults and flipped bits",
        ("tests/crash/test_state_machine.py",),
        {"STATE_MACHINE_SEED": "SEED", "STATE_MACHINE_MINUTES": "8"},
    ),
    "kills": Campaign(
        "processes killed at random moments, and system calls that fail",
        (
            "tests/crash/test_sigkill.py",
            "tests/crash/test_beside_training.py",
            "tests/integrations/test_ranks.py",
            "tests/kernel",
        ),
    ),
    "damage": Campaign(
        "bits flipped and pages lost in every file of a checkpoint, and hostile files",
        (
            "tests/crash/test_flipped_bits.py",
            "tests/attacks",
        ),
        {"FLIPS_EVERY": "7"},
        (("tests.attacks.fuzz", "--seconds", "420", "--seed", "SEED"),),
    ),
    "programs": Campaign(
        "random training programs, compared to the bit with plain torch",
        commands=(
            ("tests.fuzz", "--seed", "SEED", "--count", "100", "--record", "FOLDER/fuzz.json"),
        ),
    ),
    "ranks": Campaign(
        "ranks killed or stopped at every step of their protocol, and at random moments",
        (
            "tests/ranks_training/test_every_operation.py",
            "tests/ranks_training/test_elastic.py",
            "tests/ranks_training/test_killed_recuts.py",
        ),
        commands=(
            (
                "bench.ranks_campaign",
                *("--parts", "steps,random,stopped", "--times", "1", "--seconds", "SECONDS"),
                *("--kills", "40", "--ranks", "2,3"),
                "--seed",
                "SEED",
                *_BENCH,
            ),
        ),
    ),
    "tiers": Campaign(
        "uploads and downloads killed at random moments, alone and with ranks",
        ("tests/tiers",),
        commands=(
            ("bench.tier_kills", "--kills", "20", "--seed", "SEED", *_BENCH),
            ("bench.tier_rank_kills", *_BENCH),
        ),
    ),
    "near": Campaign(
        "a server that updates next to the drives, and its clients, killed",
        ("tests/near",),
        {"NEAR_SEED": "SEED"},
        (
            ("bench.near_kills", "--seed", "SEED", *_BENCH),
            ("bench.near_kills", "--ranks", "--seed", "SEED", *_BENCH),
            ("bench.beyond_kills", "--seed", "SEED", *_BENCH),
        ),
    ),
    "mutations": Campaign(
        "the library without one of its syncs, locks, digests or orders: a test must notice",
        commands=(("tests.mutation", "--output", "FOLDER/mutations.json"),),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a campaign; the exit status is 1 if it has found anything or was stopped by its limit."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.campaign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=CAMPAIGNS, nargs="?", help="which one")
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--seconds", type=float, default=3600.0, help="in all (%(default)s)")
    parser.add_argument("--directory", default=".", help="where scratch files are written")
    parser.add_argument("--output", default=str(RESULTS), help="folder for the JSON file")
    args = parser.parse_args(arguments)
    if args.list:
        for name, campaign in CAMPAIGNS.items():
            say(f"{name:14} {campaign.about}")
        return
    if args.name is None:
        raise BenchError(f"name a campaign, one of: {', '.join(CAMPAIGNS)}")
    # A shell has commands in the background ignore it, which the tests would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="offload-campaign-", dir=args.directory) as folder:
        result = carry_out(args.name, args.seed, args.seconds, Path(folder))
    path = Path(args.output) / f"{result['date']}-{args.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    say(f"{args.name}: {result['counts']}; findings: {len(result['findings'])}; written to {path}")
    raise SystemExit(bool(result["findings"]) or not result["complete"])


def carry_out(name: str, seed: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Run a campaign and return its result.

    Args:
        name: One of `CAMPAIGNS`.
        seed: Of all that is drawn.
        seconds: After which nothing more is begun, and what runs is ended.
        folder: For scratch files.
    """
    campaign = CAMPAIGNS[name]
    began, until = datetime.now(UTC), time.monotonic() + seconds
    machine = describe_machine()
    counts: Counter[str] = Counter()
    findings: list[str] = []
    parts: list[dict[str, Any]] = []
    places = {"SEED": str(seed), "FOLDER": str(folder)}
    if campaign.tests:
        report = folder / "tests.xml"
        command = ["pytest", "--tier", "all", "-n", "auto", "--dist", "worksteal", "-q"]
        command += ["-p", "no:cacheprovider", f"--junit-xml={report}", *campaign.tests]
        environment = {"FULL_TESTS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        environment["PYTEST_ADDOPTS"] = "-o faulthandler_timeout=0"  # the campaign has a limit
        environment |= {key: _filled(value, places) for key, value in campaign.environment.items()}
        parts.append(_ran(command, os.environ | environment, until, folder))
        if report.exists():
            failed = _read_report(report, counts)
            findings += failed
            parts[-1]["findings"] = failed
    for one in campaign.commands:
        places["SECONDS"] = f"{max((until - time.monotonic()) / 2, 1.0):.0f}"
        before = {*folder.glob("*.json")}
        parts.append(_ran([_filled(word, places) for word in one], os.environ, until, folder))
        written = {*folder.glob("*.json")} - before
        parts[-1]["results"] = [json.loads(path.read_text()) for path in sorted(written)]
    findings += [
        f"{part['command']}: exit status {part['status']}"
        for part in parts
        if part["status"] and not part.get("findings") and not part["stopped"]
    ]
    return {
        "bench": "campaign",
        "what": name,
        "about": campaign.about,
        "date": began.strftime("%Y-%m-%d"),
        "started": began.isoformat(timespec="seconds"),
        "elapsed_s": round((datetime.now(UTC) - began).total_seconds()),
        "command": f"make campaign NAME={name} SEED={seed}",
        "seed": seed,
        "sources": digest_of_sources(),
        "versions": describe_versions(),
        "machine": machine | {"load_average_after": list(os.getloadavg())},
        "complete": not any(part["stopped"] for part in parts),
        "counts": dict(sorted(counts.items())),
        "findings": findings,
        "parts": parts,
    }


def digest_of_sources() -> str:
    """Return a digest of the Python and C++ sources of the library."""
    digest = hashlib.sha256()
    for package in ("offload", "gds"):
        for path in sorted((_ROOT / package).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".cu") and path.is_file():
                digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _filled(word: str, places: dict[str, str]) -> str:
    for name, value in places.items():
        word = word.replace(name, value)
    return word


def _ran(
    command: list[str], environment: dict[str, str] | os._Environ[str], until: float, folder: Path
) -> dict[str, Any]:
    """Run a module until it ends or the time is over; return what became of it."""
    shown = " ".join(command).replace(str(folder), "FOLDER")
    say(f"running {shown}")
    said = folder / "said"
    stopped, status = False, 0
    left_s = until - time.monotonic()
    if left_s <= 0:
        return {"command": shown, "status": 0, "stopped": True, "said": []}
    with said.open("w") as output:
        process = subprocess.Popen(
            dying([sys.executable, "-m", *command]),
            cwd=_ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(left_s)
        except subprocess.TimeoutExpired:
            stopped = True
            process.send_signal(signal.SIGINT)  # pytest then reports what it has tried so far
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_GRACE_S)
        finally:
            process.kill()
    lines = said.read_text(errors="replace").replace(str(folder), "FOLDER").splitlines()
    say("\n".join(lines[-_SAID_LINES:]))
    lines = [line.replace(f"{_ROOT}/", "") for line in lines[-_SAID_LINES:]]
    return {"command": shown, "status": status, "stopped": stopped, "said": lines}


def _read_report(report: Path, counts: Counter[str]) -> list[str]:
    """Add up what the tests have recorded, and return the names of those that failed."""
    failed = []
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        counts["tests"] += case.find("skipped") is None
        for one in case.iter("property"):
            value = one.get("value", "")
            if value.isdecimal() and not one.get("name", "").endswith("seed"):
                counts[one.get("name", "")] += int(value)
    return failed


if __name__ == "__main__":
    run(main)
