"""Runs programs, each in a forked process with a time limit, and shortens those that fail."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import offload
from tests.dying import let_forks_die
from tests.fuzz.interpret import Outcome, run
from tests.fuzz.program import Program

LIMIT_S = 120.0
# What programs import when they first need it: once here, instead of in each child.
LATER = ("torch._dynamo", "torch.func", "sympy")


def prepare() -> None:
    """Import what programs will import; no tensor is touched, as children are forked from this."""
    let_forks_die()
    for name in LATER:
        importlib.import_module(name)
    for name in offload.__all__:
        getattr(offload, name)


def isolated(program: Program, limit_s: float = LIMIT_S) -> Outcome:
    """Run a program in a child, which may crash or hang: either is a finding.

    Args:
        program: What to run.
        limit_s: Seconds after which it hangs.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        faulthandler.dump_traceback_later(limit_s - 2, exit=False)
        try:
            text = json.dumps(asdict(run(program))).encode()
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(text)
        finally:
            os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + limit_s
    received = bytearray()
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([reading], [], [], left)[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return Outcome(program.name, finding=f"hangs: no end after {limit_s} s")
            block = os.read(reading, 1 << 16)
            if not block:
                break
            received += block
    finally:
        os.close(reading)
    status = os.waitpid(child, 0)[1]
    if not received:
        return Outcome(program.name, finding=f"crashes: status {status}")
    return Outcome(**json.loads(received))


def kind_of(finding: str) -> str:
    """Return what two findings of one cause have in common, roughly."""
    lines = [line for line in finding.splitlines() if line.strip()]
    last = lines[-1] if len(lines) > 1 else lines[0]
    head = re.sub(r"/\S+", "PATH", lines[0].split("[")[0].split(":")[0])
    words = re.sub(r"\d+", "", re.sub(r"/\S+", "PATH", last))
    return f"{head}|{words[:90]}"


def shorten(
    program: Program, outcome: Outcome, budget_s: float, say: Callable[[str], None]
) -> tuple[Program, Outcome]:
    """Drop operations for as long as the same kind of finding remains."""
    wanted = kind_of(outcome.finding or "").split("|")[0]
    deadline = time.monotonic() + budget_s
    operations = list(program.operations)
    if outcome.at is not None:
        operations = operations[: outcome.at + 1]
    best, found = program.shortened(operations), outcome
    size = max(1, len(operations) // 2)
    while time.monotonic() < deadline:
        start, dropped = 0, False
        while start < len(operations) and time.monotonic() < deadline:
            shorter = operations[:start] + operations[start + size :]
            trial = isolated(program.shortened(shorter))
            if trial.finding and kind_of(trial.finding).split("|")[0] == wanted:
                operations, dropped = shorter, True
                best, found = program.shortened(operations), trial
            else:
                start += size
        if size == 1 and not dropped:
            break
        size = max(1, size // 2)
    say(f"shortened from {len(program.operations)} to {len(operations)} operations")
    return best, found
