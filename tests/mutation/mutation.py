"""What a mutation is: a tiny edit of the library that takes out, or swaps, one step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent.parent
"""Of the checkout."""


RESULT: Final = ROOT / "tests" / "mutation" / "result.json"
"""Of the last complete run."""


class MutationError(Exception):
    """A mutation does not fit the source any more; the message says which, and how."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One exact text, found once in a file, and what takes its place."""

    file: str
    """Path within the checkout."""

    find: str
    replace: str

    def apply(self, source: str) -> str:
        """Return the edited text of the file.

        Raises:
            MutationError: The text is not there exactly once.
        """
        num_found = source.count(self.find)
        if num_found != 1:
            raise MutationError(
                f"{self.file}: the text to edit is there {num_found} times, expected once: follow "
                f"the change of the module in tests/mutation:\n{self.find}"
            )
        return source.replace(self.find, self.replace)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A protocol without one of its steps."""

    name: str
    """Short, unique, usable as the name of a directory."""

    lost: str
    """The step that is taken out, for people."""

    edits: tuple[Edit, ...]

    tests: tuple[str, ...]
    """What pytest is to run, in this order and up to the first failure: cheapest first."""

    redundant: str = ""
    """Why nothing can notice, where that has been shown; it is then expected to survive."""

    @property
    def files(self) -> tuple[str, ...]:
        """Paths within the checkout of the files that it changes."""
        return tuple(dict.fromkeys(edit.file for edit in self.edits))

    def apply(self, root: Path) -> None:
        """Edit a copy of the checkout.

        Raises:
            MutationError: An edit does not fit.
        """
        for edit in self.edits:
            path = root / edit.file
            path.write_text(edit.apply(path.read_text()))


def gone(file: str, find: str) -> Edit:
    """Return an edit that removes whole lines."""
    return Edit(file, find, "")


def power(*cases: str) -> tuple[str, ...]:
    """Name cases of the loss of power."""
    test = "tests/crash/test_crash_points.py::test_power_lost_after_any_operation"
    return tuple(f"{test}[{case}]" for case in cases)


def killed(*cases: str) -> tuple[str, ...]:
    """Name cases of the loss of power in the process after a killed one."""
    test = "tests/crash/test_crash_points.py"
    test += "::test_power_lost_in_the_process_that_follows_a_killed_one"
    return tuple(f"{test}[{case}]" for case in cases)


def faults(*cases: str) -> tuple[str, ...]:
    """Name cases of failing operations, such as ``sync-once-keep=1``."""
    test = "tests/crash/test_io_errors.py::test_any_operation_may_fail"
    return tuple(f"{test}[{case}]" for case in cases)
