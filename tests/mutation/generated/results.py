"""The record of the full run, as far as it has come, and reasons to survive: both in git."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tests.mutation.generated.judging import Judged
from tests.mutation.generated.mutants import Mutant
from tests.mutation.generated.recording import Recorded
from tests.mutation.mutation import ROOT, MutationError

FOLDER: Final = ROOT / "tests" / "mutation" / "generated"
RECORD: Final = FOLDER / "result.json"
REASONS: Final = FOLDER / "reasons"

_MOST_TESTS: Final = 24
"""That are kept for a function: what a run without recordings goes by."""


@dataclass
class Record:
    """What a full run has found."""

    judged: dict[str, Judged] = field(default_factory=dict)
    """By name of the mutant."""

    tests: dict[str, list[str]] = field(default_factory=dict)
    """By function: tests that run it, the most promising first."""

    seconds: dict[str, float] = field(default_factory=dict)
    """That a test took, by its name."""

    test_files: dict[str, str] = field(default_factory=dict)
    """Digest of each test file, by path."""

    sources: dict[str, str] = field(default_factory=dict)
    """Digest of each source file, by path."""

    is_complete: bool = False
    """Whether every mutant that there was has been judged."""

    def is_settled(self, mutant: Mutant) -> bool:
        """Return whether a mutant is to be noticed, as far as is known.

        If the record is complete, every mutant is, unless its survival has a reason. Before that,
        those are that were noticed when their function was as it is now.
        """
        if self.is_complete:
            return True
        known = self.judged.get(mutant.name)
        return known is not None and known.code == mutant.code and known.outcome != "survived"


def reasons(folder: Path = REASONS) -> dict[str, str]:
    """Return why nothing need notice some mutants, by name.

    The folder has a file for each module, ``store.toml`` for `store`, with tables of the form::

        [[reason]]
        mutants = ["Store.f/true/123456"]
        why = "What the mutant does instead, and why that is as good."

    Raises:
        MutationError: A reason has no words, or a mutant has two.
    """
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["reason"]:
            why = " ".join(entry["why"].split())
            for name in entry["mutants"]:
                if not why:
                    raise MutationError(f"{path}: no reason is given for {name}")
                if f"{path.stem}.{name}" in found:
                    raise MutationError(f"{path}: {name} has two reasons")
                found[f"{path.stem}.{name}"] = why
    return found


def source_digests(files: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """Return a digest of each of some files, given as paths within the checkout."""
    return {
        file: hashlib.sha256((root / file).read_bytes()).hexdigest()[:16]
        for file in sorted(set(files))
    }


def read_record(path: Path = RECORD) -> Record:
    """Return the record; an empty one if there is none."""
    record = Record()
    if not path.exists():
        return record
    found = json.loads(path.read_text())
    names = [*found["tests"]]
    record.seconds = found["tests"]
    record.sources, record.test_files = found["sources"], found["test_files"]
    record.is_complete = found["judged"] == found["mutants"]
    for function, entry in found["functions"].items():
        record.tests[function] = [names[number] for number in entry["tests"]]
        for rest, (outcome, by, seconds) in entry["mutants"].items():
            name = f"{function}/{rest}"
            known = names[by] if isinstance(by, int) else by
            record.judged[name] = Judged(name, entry["code"], outcome, known, seconds)
    return record


def write_record(
    path: Path,
    mutants: Sequence[Mutant],
    judged: Mapping[str, Judged],
    tests: Mapping[str, Sequence[Recorded]],
    test_files: Sequence[str],
) -> None:
    """Write the record: of all mutants, or of those that have been judged so far.

    Args:
        path: Of the record.
        mutants: All.
        judged: What became of each, by name.
        tests: For each function the tests that run it, in the order in which they are tried.
        test_files: That have been looked at.
    """
    seconds = {test.name: test.seconds for several in tests.values() for test in several}
    numbers: dict[str, int] = {}
    functions: dict[str, Any] = {}
    known = [mutant for mutant in mutants if mutant.name in judged]
    for mutant in known:
        one = judged[mutant.name]
        entry = functions.setdefault(
            mutant.function, {"code": mutant.code, "tests": [], "mutants": {}}
        )
        by: int | str = one.by
        if one.outcome != "survived":
            by = numbers.setdefault(one.by, len(numbers))
        entry["mutants"][mutant.name.removeprefix(f"{mutant.function}/")] = [
            one.outcome,
            by,
            one.seconds,
        ]
    for function, entry in functions.items():
        best = [test.name for test in tests.get(function, ())[:_MOST_TESTS]]
        entry["tests"] = [numbers.setdefault(test, len(numbers)) for test in best]
    noticed = sum(judged[m.name].outcome != "survived" for m in known)
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "mutants": len(mutants),
        "judged": len(known),
        "noticed": noticed,
        "sources": source_digests(mutant.file for mutant in mutants),
        "test_files": source_digests(test_files),
        "functions": functions,
        "tests": {test: seconds.get(test, 0.0) for test in numbers},
    }
    path.write_text(_lines(found) + "\n")


def _lines(value: Any, depth: int = 0) -> str:
    """Return JSON with a line for each mutant and each test, so that changes can be read."""
    flat = not isinstance(value, dict) and depth >= 3
    if flat or not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    inner = " " * (depth + 1)
    if isinstance(value, list):
        body = ",\n".join(inner + _lines(item, depth + 1) for item in value)
        return f"[\n{body}\n{' ' * depth}]"
    body = ",\n".join(f"{inner}{json.dumps(k)}: {_lines(v, depth + 1)}" for k, v in value.items())
    return f"{{\n{body}\n{' ' * depth}}}"
