"""All tests and measurements that need a GPU, one after another, with time limits: 30 minutes.

    python -m bench.gpu --directory DIR
    python -m bench.gpu --directory DIR --seconds 540    # and again, until nothing is left

A step that fails or takes too long does not stop later steps. The output of each step is kept
beside the results, in ``<date>-gpu-<what>/``. ``<date>-gpu-<what>.json`` has the outcome of each
step, and the results of `gds check` and `gds bench`. The other scripts write their own results.

With ``--seconds`` a call runs as many steps as fit, and the next call goes on with the steps that
are left. A step that was interrupted because the time was over is run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench._harness import RESULTS, BenchError, say
from bench._machine import describe_machine, describe_storage, describe_versions
from offload.demo import SCENARIOS, DemoError, require_modules
from tests.dying import dying

_ROOT = Path(__file__).parent.parent
_PATHS = ("gds", "compat", "bounce", "direct")
TESTS = {"device": 180, "contract": 180, "placement": 60, "gds_cli": 60, "bench": 60}
"""Folders with tests of a GPU, each with its limit in seconds. Other folders are left out, since
packages that their tests import may be missing on the machine."""

_DEPRECATIONS = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")

_KILL_S = 10.0
_LEAST_S = 5.0
"""Seconds that have to be left for one more step to begin."""

_LAST_LINES = 3


@dataclass(frozen=True, slots=True)
class Step:
    """One command of the run."""

    name: str
    arguments: tuple[str, ...]
    """Arguments for the Python that runs this script."""

    limit_s: float
    """Seconds after which the command is killed, with all its children."""

    accepted: tuple[int, ...] = (0,)
    """Exit statuses that do not count as failures."""

    is_json: bool = False
    """Whether the output is JSON, to be kept as such."""

    scratch: str = ""
    """Folder that is removed when the command has ended; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of one command."""

    name: str
    command: str
    status: int | None
    """Exit status; None if the command was killed at its limit."""

    succeeded: bool
    seconds: float
    limit_s: float
    last_lines: list[str]
    output: str
    """Path of the file with the whole output, relative to the summary."""

    was_interrupted: bool = False
    """Whether the time of the whole call was over before the step had ended or reached its limit.
    The next call runs it again."""

    found: Any = None
    """Value that the command printed as JSON; None if there is none."""


def steps(directory: str, output: str, *, quick: bool) -> list[Step]:
    """Return all commands, the most informative ones first.

    Args:
        directory: Directory on the drive to be measured.
        output: Folder for results.
        quick: Whether only to show that the commands run, with tiny sizes.
    """
    bench = ("--directory", directory, "--output", output, *(("--quick",) if quick else ()))
    # On a drive of 1 GB/s that is three minutes.
    parameters = () if quick else ("--parameters", "64Mi")
    model = () if quick else ("--model", _model())
    sizes = ("--file-size", "64M") if quick else ("--file-size", "2G")
    sweep = ("--sweep", "rw=read,write", "--sweep", f"size={'1M' if quick else '1M,16M'}")
    listed = [
        # 3 to 5: something less than GPUDirect Storage would be used, which is a finding.
        Step("check", ("-m", "gds.cli", "check", directory, "--json"), 60, (0, 3, 4, 5), True),
        Step("kernel", ("-m", "bench.kernel", *bench), 240),
        _tests("device", directory),
        Step("device", ("-m", "bench.device", *bench, *parameters), 420),
        Step("training", ("-m", "bench.gpu_training", *bench, *model), 160),
        Step("beside", ("-m", "bench.beside_training", *bench), 120),
        *(_tests(folder, directory) for folder in TESTS if folder != "device"),
    ]
    listed += [
        Step(
            f"bench-{path}",
            (
                *("-m", "gds.cli", "bench", directory, "--path", path, "--threads", "4"),
                *(*sizes, *sweep, "--repeat", "1" if quick else "3", "--json"),
                *("--seconds", "0", "--ramp", "0"),
                *(("--allow-small",) if quick else ()),
            ),
            65,
            (0, 1) if path == "gds" else (0,),  # 1: there is none here, and the rest says why
            is_json=True,
        )
        for path in _PATHS
    ]
    return listed


def _model() -> str:
    """Return the model to train: SmolLM2-135M if what it needs is installed."""
    try:
        require_modules(SCENARIOS["smollm2"])
    except DemoError:
        return "tiny"
    return "smollm2"


def _tests(folder: str, directory: str) -> Step:
    """Return the tests of a GPU in a folder.

    Their files are on the drive: where there is no direct I/O, as in a /tmp of memory, tests skip
    themselves.
    """
    scratch = os.path.join(directory, f"offload-gpu-tests-{folder}-{os.getpid()}")
    arguments = (
        *("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"),
        *("--continue-on-collection-errors", "--basetemp", scratch),
        # What other versions of torch and CuPy find deprecated is no error of these tests.
        *(word for name in _DEPRECATIONS for word in ("-W", f"default::{name}")),
        str(_ROOT / "tests" / folder),
    )
    return Step(f"tests-{folder}", arguments, TESTS[folder], scratch=scratch)


def perform(step: Step, folder: Path, hidden: dict[str, str], left_s: float = math.inf) -> Outcome:
    """Run a step to its end or its limit. A failure of the step raises nothing.

    Args:
        step: Step to run.
        folder: Folder for its output.
        hidden: Replacements for words in everything that is recorded, by the word.
        left_s: Seconds that are left for the whole call.
    """
    limit_s = min(step.limit_s, left_s)
    log = folder / f"{step.name}.txt"
    began = time.monotonic()
    with open(log, "w+b") as out, open(folder / f"{step.name}.err", "w+b") as err:
        process = subprocess.Popen(
            dying([sys.executable, *step.arguments]),
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # so that its children end with it
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        status: int | None = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            say(f"  {step.name} is ended after {limit_s:.0f} s")
        finally:
            _end(process)
            if step.scratch:
                shutil.rmtree(step.scratch, ignore_errors=True)
        seconds = time.monotonic() - began
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(_without(file.read().decode(errors="replace"), hidden))
    log.write_text("".join(texts))
    Path(err.name).unlink()
    succeeded = status in step.accepted
    found = None
    if step.is_json:
        try:
            found = json.loads(texts[0])
        except ValueError:
            succeeded = succeeded and status != 0  # it refused, and was allowed to
    return Outcome(
        name=step.name,
        command=_without(" ".join(("python", *step.arguments)), hidden),
        status=status,
        succeeded=succeeded,
        seconds=round(seconds, 1),
        limit_s=round(limit_s, 1),
        last_lines=[line for text in texts for line in text.splitlines()[-_LAST_LINES:]]
        if found is None
        else [],
        output=f"{folder.name}/{log.name}",
        was_interrupted=status is None and limit_s < step.limit_s,
        found=found,
    )


def perform_all(
    listed: Sequence[Step],
    output: Path,
    what: str,
    directory: str,
    *,
    quick: bool,
    seconds: float = math.inf,
) -> list[Outcome]:
    """Run all steps, and write a summary after each step, since the machine itself may end.

    If `seconds` is finite, and the newest summary of the same label and commit lacks steps, it is
    continued: steps that have ended are not run again.

    Args:
        listed: Steps to run.
        output: Folder for results.
        what: Label for the names of files.
        directory: Directory on the drive that is measured. Its storage is recorded, not its path.
        quick: Whether sizes are tiny, to be recorded.
        seconds: Seconds that this call may take.

    Returns:
        The outcomes of all steps that have been run, in earlier calls too. A step that the end of
        the time interrupted has `Outcome.was_interrupted`; steps that have not begun are missing.
    """
    began, clock = datetime.now(UTC), time.monotonic()
    versions = describe_versions()
    name, outcomes = f"{began:%Y-%m-%d}-gpu-{what}", list[Outcome]()
    if seconds < math.inf:
        name, outcomes = _continued(output, what, versions.get("commit"), quick=quick) or (name, [])
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    hidden = {str(output): "OUTPUT", str(_ROOT): "ROOT"}
    if os.path.dirname(directory) != directory:
        hidden[directory] = "DIRECTORY"
    summary: dict[str, Any] = {
        "bench": "gpu",
        "what": what,
        "date": f"{began:%Y-%m-%d}",
        "started": began.isoformat(timespec="seconds"),
        "quick": quick,
        "machine": describe_machine(),
        "storage": describe_storage(directory),
        "versions": versions,
        "steps": [],
    }
    ended = {outcome.name for outcome in outcomes}
    is_first = True
    for step in listed:
        if step.name in ended:
            continue
        left = seconds - (time.monotonic() - clock)
        if left < _LEAST_S and not is_first:
            break
        say(f"{step.name}, at most {min(step.limit_s, left):.0f} s")
        one = perform(step, folder, hidden, left)
        if is_first:  # it had all of the time, and would have no more in the next call
            one = replace(one, was_interrupted=False)
        is_first = False
        outcomes.append(one)
        status = "killed" if one.status is None else f"status {one.status}"
        say(f"  {'succeeded' if one.succeeded else 'FAILED'} ({status}) in {one.seconds:g} s")
        for line in one.last_lines:
            say(f"  | {line}")
        summary["steps"] = [asdict(outcome) for outcome in outcomes]
        (output / f"{name}.json").write_text(json.dumps(summary, indent=1) + "\n")
    return outcomes


def _continued(
    output: Path, what: str, commit: str | None, *, quick: bool
) -> tuple[str, list[Outcome]] | None:
    """Return the name of the newest summary of a label, and its outcomes that are final.

    None if there is no summary, or if the newest one is of another commit or other sizes.
    """
    found = max(output.glob(f"*-gpu-{what}.json"), default=None)
    if found is None:
        return None
    summary = json.loads(found.read_text())
    if (summary["versions"].get("commit"), summary["quick"]) != (commit, quick):
        return None
    outcomes = [Outcome(**step) for step in summary["steps"]]
    return found.stem, [outcome for outcome in outcomes if not outcome.was_interrupted]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps, or as many as fit into the time.

    Returns:
        0 if all succeeded, 1 if one failed, 2 if there is no GPU, 3 if steps are left.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--directory", required=True, help="on the drive to be measured; 8 GB are needed there")
    add("--output", default=str(RESULTS), help="folder for results (default: %(default)s)")
    add("--what", default="", help="label in the files' names (default: the GPU's name)")
    add("--only", default="", help="steps to run, with commas (default: all)")
    add(
        "--seconds",
        type=float,
        default=math.inf,
        help="end after so many seconds; the next call goes on (default: no limit)",
    )
    add("--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    args = parser.parse_args(arguments)
    directory, output = os.path.abspath(args.directory), os.path.abspath(args.output)
    if not os.path.isdir(directory):
        parser.error(f"--directory {args.directory}: there is no such directory")
    listed = steps(directory, output, quick=args.quick)
    wanted = {word.strip() for word in args.only.split(",") if word.strip()}
    unknown = wanted - {step.name for step in listed}
    if unknown:
        names = ", ".join(step.name for step in listed)
        parser.error(f"--only: no {', '.join(sorted(unknown))}; there are {names}")
    try:
        device = _device_name()  # without one, tests that are skipped would count as passed
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chosen = [step for step in listed if not wanted or step.name in wanted]
    outcomes = perform_all(
        chosen,
        Path(output),
        args.what or device,
        directory,
        quick=args.quick,
        seconds=args.seconds,
    )
    ended = [outcome for outcome in outcomes if not outcome.was_interrupted]
    failed = [outcome.name for outcome in ended if not outcome.succeeded]
    say(f"{len(ended) - len(failed)} of {len(ended)} succeeded")
    if failed:
        say(f"failed: {', '.join(failed)}; what they printed is in {output}")
    finished = {outcome.name for outcome in ended}
    if left := [step.name for step in chosen if step.name not in finished]:
        say(f"left for the next call: {', '.join(left)}")
        return 3
    return 1 if failed else 0


def _device_name() -> str:
    """Return the GPU's name as a label.

    Raises:
        BenchError: There is no GPU.
    """
    from bench._device import require_device  # takes seconds to import torch

    require_device()
    import torch

    return str(torch.cuda.get_device_properties(0).name).lower().replace(" ", "-")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process of a step, and children that outlived it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_KILL_S)
    except subprocess.TimeoutExpired:
        say("  it does not end even so (stuck in a driver), and is left behind")


def _without(text: str, hidden: dict[str, str]) -> str:
    # The longest first: one may lie within another.
    for word in sorted(hidden, key=len, reverse=True):
        text = text.replace(word, hidden[word])
    return text


if __name__ == "__main__":
    sys.exit(main())
