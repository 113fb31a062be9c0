"""Take each step of the protocol out of a copy of the library, and see whether a test notices.

    python -m tests.mutation                                  # all of them
    python -m tests.mutation --only seal-no-data-sync         # some, with commas
    python -m tests.mutation --check                          # whether every edit still fits

A mutation that no test notices *survives*: the step is untested, or it is not needed. The exit
status is 1 unless all are noticed, and 2 if an edit does not fit the library any more.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.dying import dying
from tests.mutation import opening, ranks, seals, slots, state_removal
from tests.mutation.mutation import ROOT, Mutation, MutationError

MUTATIONS: Final = (
    *seals.MUTATIONS,
    *slots.MUTATIONS,
    *state_removal.MUTATIONS,
    *opening.MUTATIONS,
    *ranks.MUTATIONS,
)
_COPIED: Final = ("offload", "gds", "tests", "bench", "docs", "pyproject.toml", "Makefile")


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge mutations, print and write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="only check that every edit fits")
    parser.add_argument("--only", default="", help="names, with commas")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run of tests")
    parser.add_argument("--output", type=Path, help="file for the result, as JSON")
    args = parser.parse_args(arguments)
    chosen = [m for m in MUTATIONS if not args.only or m.name in args.only.split(",")]
    try:
        for mutation in chosen:
            mutation.edited(ROOT)
    except MutationError as error:
        print(f"{mutation.name}: {error}", file=sys.stderr)
        return 2
    if args.check:
        print(f"{len(chosen)} mutations fit")
        return 0
    judged = judge_all(chosen, args.timeout)
    counts = Counter(one["outcome"] for one in judged)
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    if args.output:
        result = {"counts": dict(counts), "judged": judged}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return int(set(counts) != {"noticed"})


def judge_all(mutations: Sequence[Mutation], timeout_s: float) -> list[dict[str, str]]:
    """Judge mutations on as many copies of the checkout as there are cores."""
    waiting: queue.SimpleQueue[Mutation] = queue.SimpleQueue()
    for mutation in mutations:
        waiting.put(mutation)
    judged: list[dict[str, str]] = []

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="offload-mutation-") as folder:
            copy = Path(folder) / "copy"
            for name in _COPIED:
                if (ROOT / name).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__", "results")
                    shutil.copytree(ROOT / name, copy / name, ignore=ignored)
                else:
                    shutil.copy(ROOT / name, copy / name)
            while not waiting.empty():
                mutation = waiting.get()
                began = time.monotonic()
                outcome, by = judge(mutation, copy, timeout_s)
                judged.append({"name": mutation.name, "outcome": outcome, "by": by})
                seconds = time.monotonic() - began
                print(f"{mutation.name}: {outcome} ({seconds:.0f} s) {by}", flush=True)

    workers = [threading.Thread(target=work) for _ in range(len(os.sched_getaffinity(0)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sorted(judged, key=lambda one: one["name"])


def judge(mutation: Mutation, copy: Path, timeout_s: float) -> tuple[str, str]:
    """Return whether a test notices a mutation of a copy of the checkout, and which one.

    The samples that CI runs come first: most mutations are noticed there, in seconds. Only what
    survives them meets the full enumerations. A test that fails has to pass without the mutation,
    and tests that do not end have to end without it: otherwise nothing is decided.
    """
    edited = mutation.edited(copy)
    before = {path: path.read_text() for path in edited}
    try:
        for path, text in edited.items():
            path.write_text(text)
        full = False
        failed = _failed(copy, mutation.tests, timeout_s, full=full)
        if failed == "":
            full = True
            failed = _failed(copy, mutation.tests, timeout_s, full=full)
    finally:
        for path, text in before.items():
            path.write_text(text)
    if failed == "":
        return "survived", ""
    if failed is None:
        ends = _failed(copy, mutation.tests, timeout_s, full=full) == ""
        return "noticed" if ends else "undecided", f"no end within {timeout_s:g} s"
    if _failed(copy, [failed], timeout_s, full=full) == "":
        return "noticed", failed
    return "fails without it, too", failed


def _failed(copy: Path, tests: Sequence[str], timeout_s: float, *, full: bool) -> str | None:
    """Return the first test that fails; an empty text if all pass, None if they do not end."""
    # Without compiled files: within a second, Python takes an edit for no edit.
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["FULL_TESTS"] = "1" if full else ""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "-rfE"]
    command += ["-p", "no:cacheprovider", f"--basetemp={copy.parent / 'tmp'}", *tests]
    with subprocess.Popen(
        dying(command),
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    if process.returncode == 0:
        return ""
    for line in said.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ")[1] if "[" not in line else line.split(" - ")[0].split(" ", 1)[1]
    raise RuntimeError(f"pytest ended with {process.returncode}:\n{said[-3000:]}")


if __name__ == "__main__":
    raise SystemExit(main())
