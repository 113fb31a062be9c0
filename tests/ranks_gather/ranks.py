"""Real processes that are the ranks of a group: those of `tests.ranks_training.rank_server`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks_training.calls import Calls
from tests.ranks_training.cases import of_each, run_all
from tests.ranks_training.rank_server import Jobs

Run = Callable[..., list[Any]]
"""Calls ``function(rank, *arguments)`` on so many ranks, and returns what each one returned."""


def runner(jobs: Jobs, folder: Path) -> Run:
    """Return what runs a function on ranks that a server forks."""

    def run(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        data = pickle.dumps((function, arguments)).hex()
        calls = [["do", "tests.ranks_gather.ranks:call", data]]
        ranks = run_all(jobs, folder, [calls] * num_ranks, kind="")
        return [pickle.loads(bytes.fromhex(found)) for found in of_each(ranks, "do")]

    return run


def call(calls: Calls, data: str) -> str:
    """Call a function on this rank; it and what it returns are pickles as text."""
    function, arguments = pickle.loads(bytes.fromhex(data))
    return pickle.dumps(function(calls.rank, *arguments)).hex()
