"""Start of several ranks, as `torchrun` starts them, and collection of what each one says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.dying import dying
from tests.limits import HANG_S


class Ended(NamedTuple):
    """Outcome of one rank."""

    said: dict[str, Any]
    """JSON document that the rank printed last; empty if it printed none."""

    status: int
    """Exit status; negative for the signal that killed it."""

    errors: str
    """Standard error."""


def start(
    num_ranks: int, module: str, arguments: Sequence[str], **environment: str
) -> list[subprocess.Popen[str]]:
    """Start a module on several ranks of this host.

    Args:
        num_ranks: Number of ranks.
        module: Module that each rank runs.
        arguments: Its command line.
        environment: Further environment variables.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",  # as torchrun sets it
        **environment,
    }
    return [
        subprocess.Popen(
            dying([sys.executable, "-m", module, *arguments]),
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def wait(ranks: Sequence[subprocess.Popen[str]], timeout_s: float = HANG_S) -> list[Ended]:
    """Wait until all ranks have ended; ranks that hang are killed."""
    ended = []
    for process in ranks:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
            errors += f"\nkilled after {timeout_s} s"
        lines = [line for line in out.splitlines() if line.startswith("{")]
        said = json.loads(lines[-1]) if lines else {}
        ended.append(Ended(said, process.returncode, errors))
    return ended


def run(num_ranks: int, module: str, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """Run a module on several ranks, all of which must succeed; return what each one said."""
    ended = wait(start(num_ranks, module, arguments, **environment))
    failed = [(rank, e.errors) for rank, e in enumerate(ended) if e.status or not e.said]
    assert not failed, "\n\n".join(f"rank {rank}:\n{errors}" for rank, errors in failed)
    return [e.said for e in ended]
