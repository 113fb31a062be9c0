"""Apply every mutation to a copy of the checkout, and run the tests that must notice.

    python -m tests.mutation                         # all that are not known yet, then the table
    python -m tests.mutation --only seal-no-data-sync,open-shared-lock
    python -m tests.mutation --check                 # does every edit still fit? (a second)

A mutation that no test notices *survives*: the step is untested, or not needed. A run takes about
15 minutes of one core. What is known is kept beside the copy, for as long as neither the library
nor the tests of that mutation change; several runs may share a scratch directory, each on its
`--share`. Before anything is believed of a mutation, the test that noticed must pass without it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, NoReturn

import pytest
import safetensors.torch  # noqa: F401  (with torch: imported once, for all forks)
import torch._dynamo  # noqa: F401  (which an optimizer imports, and takes seconds)

from tests.mutation import MUTATIONS
from tests.mutation.mutation import RESULT, ROOT, Mutation, MutationError

_COPIED: Final = ("offload", "gds", "tests", "bench", "pyproject.toml")
_TIMEOUT_S: Final = 300.0
_POLL_S: Final = 0.05
_PAUSE_S: Final = 5.0
"""Who sleeps so much too long was stopped, with the tests: what they then say does not count."""

_IMPORT: Final = re.compile(r"^from (tests\.[\w.]+) import", re.MULTILINE)

Outcome = Literal["killed", "hung", "survived", "redundant", "not run", "tests fail without it"]


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of a mutation."""

    name: str
    lost: str
    outcome: Outcome

    by: str
    """The test that noticed; or why nothing can."""

    seconds: float


class Workplace:
    """A scratch directory with a copy of the checkout, and what is known about this state of it.

    Mutations are applied to the copy and taken back, so that Python need not compile the rest anew.
    """

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True)
        self._library = _fingerprint()
        self._copy = self._directory / f"copy.{os.getpid()}"
        shutil.rmtree(self._copy, ignore_errors=True)
        self._copy.mkdir()
        for part in _COPIED:
            if (ROOT / part).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "results")
                shutil.copytree(ROOT / part, self._copy / part, ignore=ignored)
            else:
                shutil.copy(ROOT / part, self._copy / part)

    def close(self) -> None:
        """Remove the copy."""
        shutil.rmtree(self._copy, ignore_errors=True)

    def known(self, name: str, tests: Sequence[str]) -> dict[str, object] | None:
        """Return what an earlier run of the same tests on the same library has found."""
        path = self._path(name, tests)
        return json.loads(path.read_text()) if path.exists() else None

    def keep(self, name: str, tests: Sequence[str], found: object) -> None:
        """Keep what has been found, for other runs."""
        path = self._path(name, tests)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(found))
        partial.rename(path)

    def _path(self, name: str, tests: Sequence[str]) -> Path:
        digest = hashlib.sha256(f"{self._library}\0{tests}".encode())
        for file in sorted(_with_imports({ROOT / test.partition("::")[0] for test in tests})):
            digest.update(file.read_bytes())
        return self._directory / f"{name}-{digest.hexdigest()[:16]}.json"

    def run(self, mutations: Sequence[Mutation], tests: Sequence[str]) -> tuple[str, str]:
        """Run tests on the copy with these mutations.

        Returns:
            ``passed``, ``failed`` or ``hung``; and the first test that failed, or what pytest said.
        """
        files = {self._copy / edit.file for mutation in mutations for edit in mutation.edits}
        before = {file: file.read_bytes() for file in files}
        try:
            for mutation in mutations:
                mutation.apply(self._copy)
            _forget_compiled(files)
            return self._pytest(self._copy, tests)
        finally:
            for file, content in before.items():
                file.write_bytes(content)
            _forget_compiled(files)

    def _pytest(self, copy: Path, tests: Sequence[str]) -> tuple[str, str]:
        said = copy / "said"
        while (status := self._ended(copy, said, tests)) == "stopped":
            shutil.rmtree(copy / "tmp", ignore_errors=True)
        if status is None:
            return "hung", f"no end within {self._timeout_s:g} s"
        if status == 0:
            return "passed", ""
        text = said.read_text()
        failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - |$)", text, re.MULTILINE)
        if os.waitstatus_to_exitcode(status) != 1 or failed is None:
            # Not a test that failed, but one that could not be run: nothing is known.
            raise MutationError(f"pytest ended with status {status:#x}:\n{text[-3000:]}")
        return "failed", failed[1]

    def _ended(
        self, copy: Path, said: Path, tests: Sequence[str]
    ) -> int | Literal["stopped"] | None:
        """Return a status; None if there was no end; ``stopped`` if there may be another."""
        child = os.fork()
        if child == 0:
            _become_pytest(copy, said, tests)
        until = time.monotonic() + self._timeout_s
        before = time.monotonic()
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            now = time.monotonic()
            if now > until or now - before > _PAUSE_S:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "stopped" if now - before > _PAUSE_S else None
            before = now
            time.sleep(_POLL_S)
        return "stopped" if time.monotonic() - before > _PAUSE_S else ended[1]


def _become_pytest(copy: Path, said: Path, tests: Sequence[str]) -> NoReturn:
    """Run pytest in this process, which has been forked, on the modules of a copy; then exit.

    A fork has imported torch and pytest already, which takes longer than most tests.
    """
    status = 3
    try:
        os.setpgid(0, 0)
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy), "OMP_WAIT_POLICY": "PASSIVE"}
        own = ("tests", "offload", "gds", "bench")
        for name in [name for name in sys.modules if name.partition(".")[0] in own]:
            del sys.modules[name]
        sys.path = [str(copy), *(path for path in sys.path if Path(path or ".") != ROOT)]
        offload = importlib.import_module("offload")
        if not str(offload.__file__).startswith(str(copy)):
            raise MutationError(f"tests would run with {offload.__file__}, not with {copy}")
        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", "-rfE"]
        status = pytest.main([*options, f"--basetemp={copy / 'tmp'}", *tests])
    except BaseException as error:  # noqa: BLE001  (whatever it is, this process must not go on)
        os.write(2, repr(error).encode())
    finally:
        sys.stdout.flush()
        os._exit(int(status))


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge mutations, print and write the result; 1 if one survives."""
    args = _arguments(arguments)
    chosen = [m for m in MUTATIONS if not args.only or m.name in args.only.split(",")]
    if args.check:
        check_all()
        print(f"{len(MUTATIONS)} mutations fit")
        return 0
    index, _, num_shares = args.share.partition("/")
    chosen = chosen[int(index) - 1 :: int(num_shares)]
    judged = []
    with closing(Workplace(Path(args.scratch), args.timeout)) as workplace:
        for number, mutation in enumerate(chosen, 1):
            one = judge(mutation, workplace)
            judged.append(one)
            print(
                f"{number}/{len(chosen)} {one.name}: {one.outcome} ({one.seconds:.0f} s) {one.by}",
                flush=True,
            )
    score = summary(judged)
    print(score)
    if len(chosen) == len(MUTATIONS):
        write(judged, Path(args.output))
    return int(any(one.outcome not in ("killed", "hung", "redundant") for one in judged))


def judge(mutation: Mutation, workplace: Workplace) -> Judged:
    """Find out whether a test notices a mutation."""
    edits = [f"{edit}" for edit in mutation.edits]
    key = f"{mutation.name}-{hashlib.sha256(repr(edits).encode()).hexdigest()[:8]}"
    known = workplace.known(key, mutation.tests)
    if known is not None:
        return Judged(**known)  # type: ignore[arg-type]
    started = time.monotonic()
    outcome, by = _outcome(mutation, workplace)
    one = Judged(mutation.name, mutation.lost, outcome, by, round(time.monotonic() - started, 1))
    if outcome in ("killed", "hung", "survived"):
        workplace.keep(key, mutation.tests, asdict(one))
    return one


def _outcome(mutation: Mutation, workplace: Workplace) -> tuple[Outcome, str]:
    try:
        how, by = workplace.run([mutation], mutation.tests)
    except MutationError as error:
        return "not run", str(error)
    if how == "passed":
        return ("redundant", mutation.redundant) if mutation.redundant else ("survived", "")
    # What failed must pass without the mutation; a hang is held against all of them.
    noticed = [by] if how == "failed" else list(mutation.tests)
    key = "plain-" + hashlib.sha256("\n".join(noticed).encode()).hexdigest()[:16]
    plain = workplace.known(key, noticed)
    if plain is None:
        found = workplace.run([], noticed)
        plain = {"how": found[0], "by": found[1]}
        if found[0] != "hung":
            workplace.keep(key, noticed, plain)
    if plain["how"] != "passed":
        return "tests fail without it", str(plain["by"])
    return ("killed" if how == "failed" else "hung"), by


def check_all() -> None:
    """Check that every edit fits and that every name is given once.

    Raises:
        MutationError: One does not; says which.
    """
    names = [mutation.name for mutation in MUTATIONS]
    if len(set(names)) != len(names):
        raise MutationError(
            f"names are given twice: {sorted(n for n in names if names.count(n) > 1)}"
        )
    for mutation in MUTATIONS:
        sources: dict[str, str] = {}
        for edit in mutation.edits:
            source = sources.get(edit.file) or (ROOT / edit.file).read_text()
            sources[edit.file] = edit.apply(source)
        for file, source in sources.items():
            compile(source, f"{mutation.name}: {file}", "exec")


def summary(judged: Sequence[Judged]) -> str:
    """Return the score in a line, and what survived."""
    noticed = sum(one.outcome in ("killed", "hung") for one in judged)
    needed = sum(one.outcome != "redundant" for one in judged)
    lines = [f"mutation score: {noticed} of {needed}"]
    lines += [
        f"  {one.outcome}: {one.name} (without {one.lost}) {one.by}"
        for one in judged
        if one.outcome not in ("killed", "hung")
    ]
    return "\n".join(lines)


def write(judged: Sequence[Judged], path: Path) -> None:
    """Write the result of a complete run."""
    noticed = sum(one.outcome in ("killed", "hung") for one in judged)
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "mutations": len(judged),
        "noticed": noticed,
        "redundant": sum(one.outcome == "redundant" for one in judged),
        "judged": [asdict(one) for one in judged],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {path}")


def _forget_compiled(files: Iterable[Path]) -> None:
    """Remove what was compiled of files: within a second, Python takes an edit for no edit."""
    for file in files:
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()


def _fingerprint() -> str:
    """Return a digest of the library."""
    digest = hashlib.sha256()
    for part in ("offload", "gds"):
        for file in sorted((ROOT / part).rglob("*.py")):
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _with_imports(files: set[Path]) -> set[Path]:
    """Return test files, and all files of `tests` that they import."""
    found, new = set[Path](), files
    while new:
        found |= new
        modules = {ROOT / "tests/crash/children.py"} if new == files else set[Path]()
        for module in {name for file in new for name in _IMPORT.findall(file.read_text())}:
            modules.add(ROOT / f"{module.replace('.', '/')}.py")
        new = {module for module in modules if module.exists()} - found
    return found


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", default="", help="names of mutations, with commas")
    add("--check", action="store_true", help="only check that every edit fits")
    add("--share", default="1/1", help="of the mutations, for several runs at once: 1/2, 2/2")
    add("--scratch", default="/var/tmp/offload-mutation", help="where to work (%(default)s)")
    add("--timeout", type=float, default=_TIMEOUT_S, help="seconds for one (%(default)s)")
    add("--output", default=str(RESULT), help="file for the result of a complete run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
