"""Processes that train together as the ranks of a group, and that a script asks for measurements.

A script starts `RankProcesses` and asks all ranks at once; each has a `bench._ranks_child.Rank`,
whose method of that name it calls.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from bench._harness import BenchError
from bench._ranks_child import RankSetting, serve

_JOIN_S = 20


class RankProcesses:
    """One process for each rank, with a model and an optimizer that are ready to take steps.

    Args:
        setting: What the ranks train.
        num_ranks: Number of ranks; one is a process without a process group.
    """

    def __init__(self, setting: RankSetting, num_ranks: int) -> None:
        self.setting = setting
        self.num_ranks = num_ranks
        context = multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, setting, rank, num_ranks, port), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        """Return the processes, when all of them are ready."""
        try:
            self.ask("ready")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, call: str, *arguments: Any) -> list[Any]:
        """Let every rank make a call, and return what each one answers, by rank.

        Args:
            call: Name of a method of `bench._ranks_child.Rank`.
            arguments: Its arguments.

        Raises:
            BenchError: A rank has failed.
        """
        try:
            for pipe in self._pipes:
                pipe.send((call, arguments))
            answers = [pipe.recv() for pipe in self._pipes]
        except (EOFError, OSError):
            raise BenchError("a rank has ended; its error is above") from None
        for rank, (error, _) in enumerate(answers):
            if error:
                raise BenchError(f"rank {rank} of {self.num_ranks}, {call}:\n{error}")
        return [value for _, value in answers]

    def slowest(self, call: str, *arguments: Any) -> float:
        """Let every rank make a call that answers with seconds, and return the largest of them."""
        return max(map(float, self.ask(call, *arguments)))

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()


def threads_of(num_ranks: int) -> int:
    """Return the threads that each of several ranks on this machine computes with."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)
