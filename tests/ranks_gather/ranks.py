"""Real processes that are the ranks of a group, started from one that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.limits import HANG_S

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "tests.dying_forkserver",
        "tests.ranks_gather.scenes",
        "tests.ranks_gather.test_step_agreement",
        "torch._dynamo",
    ]
)

LIMIT_S = HANG_S
"""Longest time for all ranks of one run; only a hang takes as long."""


class Gone(Exception):  # noqa: N818
    """A rank's process ended without a result."""


def run(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``function(rank, *arguments)`` on each rank, within a default group of gloo.

    Returns:
        For each rank, the result; or the exception that the function raised; or `Gone`.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            _context.Process(
                target=_main,
                args=(rank, num_ranks, os.path.join(folder, "ranks"), pipe, function, arguments),
                daemon=True,
            )
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, pipe in pipes:
            pipe.close()
        deadline = time.monotonic() + LIMIT_S
        try:
            return [_result(pipe, deadline) for pipe, _ in pipes]
        finally:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join()


def values(results: list[Any]) -> list[Any]:
    """Return results none of which is an exception."""
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed:
        raise BaseExceptionGroup("ranks failed", failed)
    return results


def _result(pipe: Connection, deadline: float) -> Any:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise AssertionError("a rank hangs")
    try:
        return pipe.recv()
    except EOFError:
        return Gone()


def _main(
    rank: int,
    num_ranks: int,
    path: str,
    pipe: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = dist.FileStore(path, num_ranks)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    try:
        result = function(rank, *arguments)
    except BaseException as error:  # noqa: BLE001
        result = error
        error.add_note(traceback.format_exc())
    try:
        data = pickle.dumps(result)
    except Exception:  # noqa: BLE001
        data = pickle.dumps(RuntimeError(f"{type(result).__name__}: {result}"))
    pipe.send_bytes(data)
    pipe.close()
    os._exit(0)  # without waiting for ranks that have been killed
