"""Command ``offload verify``: read every byte of checkpoints, even beside a training process.

Nothing heavy is imported before the command runs.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.options import Json, Parts, one_line, print_json, progress_bar
from offload.cli.tiers import verify_url
from offload.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    OffloadError,
    RecycledError,
    StoreBusyError,
)
from offload.tiers.services.address import is_tier_url
from offload.units import grouped, part_options, size

if TYPE_CHECKING:
    from offload.checkpoint.checkpoint import Checkpoint
    from offload.checkpoint.verify import VerifyReport

_BUSY_S = 60.0
"""Longest wait in seconds for a checkpoint that a writer is about to recycle or to replace."""

_BUSY_POLL_S = 0.1

_MOST_ROUNDS = 100
"""Largest number of attempts to open the newest checkpoint of a store before it is recycled."""


@dataclass(slots=True)
class _Verified:
    """Result for one checkpoint, or for a store that could not be examined."""

    path: str
    report: VerifyReport
    lifted: bool = False
    """Whether a mark was removed."""
    recorded: list[str] = field(default_factory=list)
    """Directories on further drives that were read because the manifest names them."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        found = dataclasses.asdict(self.report)
        del found["damaged_parts"], found["whole_parts"]
        own = {"lifted": self.lifted, "recorded": self.recorded}
        return {"path": self.path, "ok": self.report.ok, **found, **own}


def verify(
    path: Annotated[
        str,
        typer.Argument(help="Checkpoint, or store or URL of a tier: all checkpoints in it."),
    ],
    below: Annotated[
        bool, typer.Option("--all", help="Verify every store in this directory and below it.")
    ] = False,
    quarantine: Annotated[
        bool,
        typer.Option(
            "--quarantine",
            help="Mark damaged checkpoints, so that nothing uses them, and lift the marks of "
            "whole ones.",
        ),
    ] = False,
    part: Parts = None,
    as_json: Json = False,
) -> None:
    """Compare every byte of checkpoints with digests.

    If a store is on several drives, --part names its further directories. Without --part, the
    directories in the manifest are read. In a copy of a store, those still belong to the
    original, so --quarantine marks nothing because of damage in them, and lifts no mark.

    This command may run beside training. A checkpoint that training recycles in the meantime
    does not count as damaged. The URL of a tier (s3://bucket/folder), or of one copy in it,
    reads the complete copies there.
    """
    if is_tier_url(path):
        if below or quarantine or part:
            raise typer.BadParameter("a tier has no --all, --quarantine or --part")
        verify_url(path, as_json=as_json)
        return
    work = _Work(part or None, mark=quarantine, quiet=as_json)
    if below:
        work.verify_below(path)
    else:
        work.verify(path, may_be_empty=False)
    work.results.sort(key=lambda result: result.path)
    ok = all(result.report.ok for result in work.results)
    if as_json:
        found = [result.to_json() for result in work.results]
        print_json({"ok": ok, "checkpoints": found, "recycled": work.recycled})
    else:
        unread = [r for r in work.results if not r.report.bytes_checked]
        for text in grouped([(r.path, problem) for r in unread for problem in r.report.problems]):
            typer.secho(one_line(text), fg="red", err=True)
        for result in work.results:
            _show(result, mark=quarantine)
        for name in work.recycled:
            typer.echo(f"{one_line(name)}: recycled in the meantime, so it was not checked")
    if not ok:
        raise typer.Exit(1)


class _Work:
    """Verifies paths one after the other, and collects the results."""

    def __init__(self, parts: list[str] | None, *, mark: bool, quiet: bool) -> None:
        self._parts = parts
        self._mark = mark
        self._quiet = quiet
        self.results: list[_Verified] = []
        self.recycled: list[str] = []
        """Paths of checkpoints that were recycled before they could be opened."""

    def verify_below(self, directory: str) -> None:
        """Verify all stores in and below a directory. An error in one does not stop the others."""
        unlisted: list[OSError] = []
        stores = list(_stores_below(directory, unlisted))
        if not stores and not unlisted:
            raise CheckpointError(f"{directory}: no store in this directory or below it")
        for error in unlisted:
            name = os.fsdecode(error.filename or directory)
            self._add(name, unreadable=(f"{name}: {error.strerror}",))
        for store in stores:
            try:
                self.verify(store, may_be_empty=True)
            except (OffloadError, OSError) as error:
                self._add(store, unreadable=(str(error),))

    def verify(self, path: str, *, may_be_empty: bool) -> None:
        """Verify a checkpoint, or all checkpoints of a store."""
        from offload.format.names import MANIFEST_NAME, is_checkpoint_path

        # A directory with a manifest, or with the name of a checkpoint, is a checkpoint. Any other
        # directory may be a store.
        if is_checkpoint_path(path) or os.path.exists(os.path.join(path, MANIFEST_NAME)):
            self._verify_checkpoint(path)
            return
        names: list[str] = []
        for _ in range(_MOST_ROUNDS):
            names = _checkpoints_of(path)
            # Start with the newest: if it has been recycled all the same, list the store again.
            if not names or not self._is_recycled_at(names[-1]):
                break
        if not names and not may_be_empty:
            raise CheckpointError(f"{path}: holds no checkpoint")
        for name in names[:-1]:
            self._is_recycled_at(name)

    def _is_recycled_at(self, name: str) -> bool:
        """Verify a listed checkpoint; return whether it was recycled before it could be opened."""
        before = len(self.recycled)
        try:
            self._verify_checkpoint(name)
        except CheckpointNotFoundError:
            self.recycled.append(name)
        return len(self.recycled) > before

    def _verify_checkpoint(self, name: str) -> None:
        from offload.store.quarantine import verify_and_mark

        try:
            opened = self._open(name)
        except RecycledError:
            self.recycled.append(name)
            return
        except StoreBusyError as error:
            self._add(name, unreadable=(f"{name}: {error.strerror}",))
            return
        except CheckpointError as error:  # so damaged that it cannot even be opened
            self._add(name, problems=(str(error),))
            return
        recorded = opened.parts if opened.parts_are_only_recorded else []
        with opened, progress_bar(name, quiet=self._quiet) as progress:
            was_quarantined = bool(opened.quarantined)
            report = verify_and_mark(opened, progress) if self._mark else opened.verify(progress)
        self.results.append(
            _Verified(
                name,
                report,
                lifted=was_quarantined and not report.quarantined,
                recorded=[os.path.dirname(part) for part in recorded],
            )
        )

    def _add(
        self, path: str, *, problems: tuple[str, ...] = (), unreadable: tuple[str, ...] = ()
    ) -> None:
        """Add the result for a checkpoint of which nothing was read, or for a store."""
        from offload.checkpoint.verify import VerifyReport

        self.results.append(_Verified(path, VerifyReport(problems, 0, unreadable)))

    def _open(self, name: str) -> Checkpoint:
        """Open a checkpoint. Wait if a writer is about to recycle or to replace it."""
        from offload.checkpoint.opening import open_checkpoint

        deadline = time.monotonic() + _BUSY_S
        while True:
            try:
                return open_checkpoint(name, parts=self._parts, even_quarantined=True)
            except RecycledError:
                raise
            except StoreBusyError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_BUSY_POLL_S)


def _checkpoints_of(store: str) -> list[str]:
    from gds import PosixBackend
    from offload.checkpoint.listing import checkpoints_of

    with PosixBackend() as backend:
        return checkpoints_of(backend, os.path.abspath(store))


def _stores_below(directory: str, unlisted: list[OSError]) -> Iterator[str]:
    """Yield every store in and below a directory, which may itself be a store."""
    from offload.format.names import LOCK_NAME, owner_number

    for folder, folders, names in os.walk(directory, onerror=unlisted.append):
        if LOCK_NAME in names or any(name.startswith("step-") for name in folders):
            yield folder
        parts_of_a_store = ("step-", ".slot-", "part-")
        # lost+found holds files that fsck has recovered. It belongs to root, and is not a store.
        folders[:] = sorted(
            f
            for f in folders
            if not f.startswith(parts_of_a_store)
            and f != "lost+found"
            and not (LOCK_NAME in names and owner_number(f) is not None)
        )


def _show(result: _Verified, *, mark: bool) -> None:
    name, report = one_line(result.path), result.report
    problems = report.problems if report.bytes_checked else ()  # others are printed in groups
    for problem in (*problems, *report.unreadable):
        typer.secho(one_line(problem), fg="red", err=True)
    for path in report.not_seen:
        typer.echo(
            f"{name}: not seen here, so not checked: {one_line(path)}. Verify it on its node, or "
            "give the directory of the store in which it is now with --part"
        )
    places = one_line(", ".join(result.recorded))
    options = one_line(part_options(result.recorded))
    if report.problems:
        marked = "; marked as damaged, so that no reader uses it" if report.quarantined else ""
        if mark and not marked and places:
            marked = (
                f"; not marked, because its other directories ({places}) are known from its "
                "manifest only, and the manifest of a copy names the directories of the original. "
                f"If they belong to this checkpoint, add {options}; otherwise add the same "
                "options with its own directories"
            )
        # Nothing is read of a checkpoint that cannot be opened, for example if a drive is missing.
        found = "damaged" if report.bytes_checked else "not usable; its content was not read"
        typer.secho(f"{name}: {found}{marked}", fg="red")
    elif report.unreadable:
        typer.secho(f"{name}: not everything could be read", fg="red")
    elif report.quarantined:
        lifting = f"offload verify --quarantine {options}".rstrip()
        typer.secho(
            f"{name}: {size(report.bytes_checked)}, all as written, but still quarantined: "
            f"{lifting} lifts the "
            f"quarantine{', if these directories are its own' if places else ''}",
            fg="yellow",
        )
    else:
        lifted = "; its quarantine is lifted" if result.lifted else ""
        read = f" (read in {places} as well, which its manifest names)" if places else ""
        typer.secho(
            f"{name}: {size(report.bytes_checked)}, all as written{read}{lifted}", fg="green"
        )
