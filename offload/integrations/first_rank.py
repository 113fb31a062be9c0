"""Decisions that the first of several ranks makes for all of them.

Libraries write, rotate and remove their files on one rank, while the calls of an optimizer are made
on all ranks. So what these calls are to do is decided where the files are seen to change, and
nowhere else. With one process nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

import offload
from offload import OffloadedOptimizer, OffloadError

T = TypeVar("T")


def rank_of(optimizer: OffloadedOptimizer) -> int:
    """Return the rank of this process; 0 if it trains alone."""
    return dist.get_rank() if optimizer.num_ranks > 1 else 0


def decide(optimizer: OffloadedOptimizer, find: Callable[[], T]) -> T:
    """Return on every rank what a function returns or raises on the first one. Collective.

    The others raise an error with the same message, of the same class if it is one of this package.
    """
    if optimizer.num_ranks == 1:
        return find()
    said: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            said = [(find(), "", "")]
        except Exception as error:  # noqa: BLE001  (raised below, when all ranks know of it)
            failure = error
            said = [(None, type(error).__name__, str(error))]
    dist.broadcast_object_list(said, src=0)
    if failure is not None:
        raise failure
    found, name, message = said[0]
    if name:
        raise _class_of(name)(f"rank 0: {message}")
    result: T = found
    return result


def all_arrived(optimizer: OffloadedOptimizer) -> None:
    """Wait until all ranks have made this call. Collective."""
    if optimizer.num_ranks > 1:
        dist.barrier()


def require_ranks(
    optimizer: OffloadedOptimizer, num_processes: int, num_hosts: int, library: str
) -> None:
    """Refuse an optimizer that does not train with all processes of a library, or several hosts."""
    if optimizer.num_ranks != num_processes:
        raise OffloadError(
            f"{library} trains with {num_processes} processes, and the optimizer in "
            f"{optimizer.directories[0]} with {optimizer.num_ranks}: construct it in each process, "
            "with the same directory=, and leave out process_group="
        )
    require_one_host(num_hosts, library)


def require_one_host(num_hosts: int, library: str) -> None:
    """Refuse several hosts."""
    if num_hosts > 1:
        raise OffloadError(
            f"{library} trains on {num_hosts} hosts, and its folders have been tried with several "
            "processes of one host only: use one host, or a loop of your own (docs/ranks.md)"
        )


def num_hosts_of_launcher() -> int:
    """Return the number of hosts, as torchrun and launchers like it state the processes of each."""
    size, local = (os.environ.get(n, "") for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not (size.isdecimal() and local.isdecimal() and int(local)):
        return 1
    return -(-int(size) // int(local))


def _class_of(name: str) -> type[Exception]:
    """Return the class of this package with a name, if a message is all that it takes."""
    found = getattr(offload, name, OffloadError)
    if issubclass(found, OSError) or not issubclass(found, OffloadError):
        return OffloadError
    return found
