"""What a mutation is: a tiny edit of the library that takes out, or swaps, one step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent.parent
"""Of the checkout."""


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
                f"the change of the module:\n{self.find}"
            )
        return source.replace(self.find, self.replace)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A protocol without one of its steps."""

    name: str
    """Short and unique."""

    lost: str
    """The step that is taken out, for people."""

    edits: tuple[Edit, ...]

    tests: tuple[str, ...]
    """Files of tests, one of which has to notice: cheapest first."""

    def edited(self, root: Path) -> dict[Path, str]:
        """Return the files of a checkout that it changes, and what they become.

        Raises:
            MutationError: An edit does not fit.
        """
        found: dict[Path, str] = {}
        for edit in self.edits:
            path = root / edit.file
            found[path] = edit.apply(found.get(path) or path.read_text())
        return found
