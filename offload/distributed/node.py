"""The running system that this rank is on, and what it calls a directory."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gds import Backend
from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.peers import Json

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Node:
    """A running system."""

    host: str
    token: str
    """Text that is the same for two processes if, and only if, one running system has both."""


def this_node() -> Node:
    """Return the running system of this process."""
    host = socket.gethostname()
    return Node(host, _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else host)


def place_of(backend: Backend, directory: str) -> str:
    """Return a text that is the same for two processes if they mean the same directory.

    It names the running system. So a directory that two hosts share counts as two directories. If
    the directory is missing, the text names its path.
    """
    token = this_node().token
    if backend.stat(directory) is not None:
        try:
            found = os.stat(directory)
        except OSError:  # the backend has directories of its own
            return f"{token}:{directory}"
        return f"{token}:{found.st_dev}:{found.st_ino}"
    return f"{token}:{os.path.realpath(directory)}"


def measure_in_turns(
    agreement: Agreement,
    what: str,
    backend: Backend,
    directory: str,
    state_bytes: int,
    action: Callable[[int], None],
) -> None:
    """Measure the drives of all ranks, each directory on one rank. Collective."""

    def look() -> Json:
        """Return what `turns_of` has to know of this rank."""
        return [*drive_of(backend, directory), state_bytes]

    found = agreement.everywhere(what, look)
    turns, last = turns_of(found)
    own, largest = turns[agreement.peers.rank]
    for number in range(last + 1):
        agreement.together(what, partial(action, largest) if number == own else lambda: None)


def drive_of(backend: Backend, directory: str) -> list[str]:
    """Return texts for the drive of a directory and for the directory itself.

    Each is the same for two ranks if, and only if, they mean the same one.
    """
    token = this_node().token
    try:
        drive = f"{token}:{os.stat(directory).st_dev}"
    except OSError:  # the backend has directories of its own
        drive = token
    return [drive, place_of(backend, directory)]


def turns_of(ranks: Sequence[tuple[str, str, int]]) -> tuple[list[tuple[int, int]], int]:
    """Return, by rank, its turn and the largest state to measure for, and the last turn. Pure.

    The lowest rank that has a directory measures it. Directories on one drive have turns one after
    the other; those on different drives have the same turns. All other ranks have the last turn.
    """
    largest: dict[str, int] = {}
    on_drive: dict[str, list[str]] = {}
    first: dict[str, int] = {}
    for rank, (drive, directory, state_bytes) in enumerate(ranks):
        largest[directory] = max(largest.get(directory, 0), state_bytes)
        if first.setdefault(directory, rank) == rank:
            on_drive.setdefault(drive, []).append(directory)
    last = max(map(len, on_drive.values()))
    turns = [
        (on_drive[drive].index(directory), largest[directory])
        if first[directory] == rank
        else (last, 0)
        for rank, (drive, directory, _) in enumerate(ranks)
    ]
    return turns, last
