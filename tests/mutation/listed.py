"""The mutations that were written by hand: whether a test notices each of them, and the table."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from tests.mutation import MUTATIONS
from tests.mutation.generated.results import source_digests
from tests.mutation.mutation import ROOT, Mutation, MutationError
from tests.mutation.workplace import Workplace

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


def judge(
    mutation: Mutation,
    workplace: Workplace,
    *,
    timeout_s: float | None = None,
    trust: bool = False,
    fresh: bool = False,
) -> Judged:
    """Find out whether a test notices a mutation.

    Args:
        mutation: One of the list.
        workplace: Where its tests are run.
        timeout_s: For a run of its tests.
        trust: Do not look whether the test that noticed passes without the mutation.
        fresh: As of `Workplace.run`.
    """
    edits = [f"{edit}" for edit in mutation.edits]
    key = f"{mutation.name}-{hashlib.sha256(repr(edits).encode()).hexdigest()[:8]}"
    known = workplace.known(key, mutation.tests)
    if known is not None:
        return Judged(**known)  # type: ignore[arg-type]
    started = time.monotonic()
    outcome, by = _outcome(mutation, workplace, timeout_s, trust, fresh)
    one = Judged(mutation.name, mutation.lost, outcome, by, round(time.monotonic() - started, 1))
    if outcome in ("killed", "hung", "survived") and not trust:
        workplace.keep(key, mutation.tests, asdict(one))
    return one


def _outcome(
    mutation: Mutation, workplace: Workplace, timeout_s: float | None, trust: bool, fresh: bool
) -> tuple[Outcome, str]:
    try:
        run = workplace.run([mutation], mutation.tests, timeout_s=timeout_s, fresh=fresh)
    except MutationError as error:
        return "not run", str(error)
    if run.how == "broken":  # not a test that failed, but one that could not be run
        return "not run", run.by
    if run.how == "passed":
        return ("redundant", mutation.redundant) if mutation.redundant else ("survived", "")
    if trust:
        return ("killed" if run.how == "failed" else "hung"), run.by
    # What failed must pass without the mutation; a hang is held against all of them.
    noticed = [run.by] if run.how == "failed" else list(mutation.tests)
    key = "plain-" + hashlib.sha256("\n".join(noticed).encode()).hexdigest()[:16]
    plain = workplace.known(key, noticed)
    if plain is None:
        found = workplace.run([], noticed)
        plain = {"how": found.how, "by": found.by}
        if found.how in ("passed", "failed"):
            workplace.keep(key, noticed, plain)
    if plain["how"] != "passed":
        return "tests fail without it", str(plain["by"])
    return ("killed" if run.how == "failed" else "hung"), run.by


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
    """Write the result of a complete run, with a digest of each file that a mutation edits."""
    noticed = sum(one.outcome in ("killed", "hung") for one in judged)
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "mutations": len(judged),
        "noticed": noticed,
        "redundant": sum(one.outcome == "redundant" for one in judged),
        "sources": source_digests(file for mutation in MUTATIONS for file in mutation.files),
        "judged": [asdict(one) for one in judged],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {path}")


def touched(path: Path, root: Path = ROOT) -> set[str]:
    """Return the files that mutations edit and that are not as they were when the result was made.

    Args:
        path: Of the result; without one all count.
        root: The checkout.
    """
    now = source_digests((file for mutation in MUTATIONS for file in mutation.files), root)
    then: Mapping[str, str] = {}
    if path.exists():
        then = json.loads(path.read_text()).get("sources", {})
    return {file for file, digest in now.items() if then.get(file) != digest}
