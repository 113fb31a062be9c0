"""Forks children that train, kills them at random moments, and reports how it went.

Run by a server of children, because whoever forks them must be a process that is safe to fork: it
has imported torch, uses one thread, and has opened no store.

    python -m tests.crash.killing       # serves children, as tests.forking says
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from offload import DriveTuning, EverySteps, LastK, ParametersOnly, Retention, SealHandle
from tests.forking import serve
from tests.stores.training import Model, backward, optimizer_for, options

PLAN = "killing.json"
"""What is to be done: ``keep``, ``drives``, ``only``, ``num_kills``, ``seed``, ``parameters``."""

SEAL_EVERY = 3
ONLY_EVERY = 2 * SEAL_EVERY
"""With ``only``, the parameters of each checkpoint at a multiple of it are kept."""

SHARES = (1, 1, 2)
STEPS_OF_A_LIFE = 9
"""The longest life ends where opening, restoring and so many steps have come to."""

LONGER_S = 0.01
"""It is killed up to so long after it has said where it is: anywhere before it says so again."""

STEPS_AFTER_LAST_KILL = 10
OPENING, RESTORING, RESTORED, STEPPING, SEALING, ACKNOWLEDGED = b"o", b"r", b"R", b"s", b"c", b"A"
_MESSAGE = struct.Struct("=cq")


def policy_of(keep: int, *, only: bool) -> Retention:
    """Return what a child keeps."""
    newest = LastK(keep)
    return newest | ParametersOnly(EverySteps(ONLY_EVERY)) if only else newest


def train(
    directories: list[str],
    keep: Retention,
    last_step: int,
    pipe: int,
    parameters: Literal["drive"] | None = None,
) -> None:
    """Open the store, restore, train to the last step, sealing behind training; say so."""

    def tell(what: bytes, step: int = 0) -> None:
        os.write(pipe, _MESSAGE.pack(what, step))

    model = Model()
    tell(OPENING)
    tuning = DriveTuning(shares=SHARES[: len(directories)])
    settings = options(drives=tuning, parameters=parameters)
    optimizer = optimizer_for(model, directories, settings, keep=keep)
    tell(RESTORING)
    found = optimizer.restore()
    step = found.step if found else 0
    tell(RESTORED, step)
    handle: SealHandle | None = None
    while step < last_step:
        step += 1
        tell(STEPPING, step)
        backward(model, step)
        optimizer.step()
        if handle is not None and handle.done():
            tell(ACKNOWLEDGED, handle.result().step)
            handle = None
        if step % SEAL_EVERY == 0 or step == last_step:
            tell(SEALING, step)
            handle = optimizer.checkpoint({"step": step})
    if handle is not None:
        tell(ACKNOWLEDGED, handle.result().step)
    optimizer.close()


class Killer:
    """Forks children one after the other and kills them at moments that a seed chooses."""

    def __init__(
        self,
        directory: str,
        keep: Retention,
        drives: int,
        seed: int,
        parameters: Literal["drive"] | None,
    ) -> None:
        self.directories = [directory, *(f"{directory}-{k}" for k in range(1, drives))]
        self.keep = keep
        self.parameters = parameters
        self.rng = random.Random(seed)
        self.acknowledged = 0
        self.phases: Counter[str] = Counter()
        self.restored: list[int] = []

    def live(self, last_step: int, *, kill_after: int = -1) -> tuple[bool, int]:
        """Let one child live, and kill it when it has told so much.

        Returns:
            Whether it was killed, and how often it had said where it was.
        """
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            try:
                train(self.directories, self.keep, last_step, writing, self.parameters)
            except BaseException:  # noqa: BLE001  (a fork must not run its parent's code)
                traceback.print_exc()
                os._exit(3)
            os._exit(0)
        os.close(writing)
        number, what = 0, OPENING
        for number, (what, step) in enumerate(messages(reading), 1):
            if what == RESTORED:
                self.restored.append(step)
                if step < self.acknowledged:
                    raise RuntimeError(f"restored {step}, but {self.acknowledged} was acknowledged")
            if what in (RESTORED, ACKNOWLEDGED):  # what a process was given back is a promise, too
                self.acknowledged = max(self.acknowledged, step)
            if number == kill_after:
                time.sleep(self.rng.uniform(0, LONGER_S))
                os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not killed and status != 0:
            raise RuntimeError(f"a child failed with status {status}")
        if killed:
            self.phases[what.decode()] += 1
        return killed, number


def messages(pipe: int) -> Iterator[tuple[bytes, int]]:
    """Yield what a child says, until it has ended."""
    while message := os.read(pipe, _MESSAGE.size):  # each is written at once
        yield _MESSAGE.unpack(message)
    os.close(pipe)


def kill_at_random_moments(parent: str) -> None:
    """Do what the plan says, let the last child reach the end, and print how it went, as JSON."""
    directory = f"{parent}/stores"
    plan = json.loads(Path(parent, PLAN).read_text())
    drives, num_kills, *others = (plan[k] for k in ("drives", "num_kills", "seed", "parameters"))
    keep = policy_of(plan["keep"], only=plan["only"])
    os.mkdir(directory)
    killer = Killer(f"{directory}/killed", keep, drives, *others)
    measured = Killer(f"{directory}/measured", keep, drives, *others)
    _, longest = measured.live(STEPS_OF_A_LIFE)
    num_killed = 0
    while num_killed < num_kills:
        killed, _ = killer.live(1 << 40, kill_after=killer.rng.randint(1, longest))
        num_killed += killed
    killer.live(0)  # the last one killed may have sealed more than it could tell of
    last_step = killer.acknowledged + STEPS_AFTER_LAST_KILL
    killer.live(last_step)
    result = {
        "killed": num_killed,
        "phases": killer.phases,
        "last_step": last_step,
        "acknowledged": killer.acknowledged,
        "restored": killer.restored,
        "left": [sorted(p.name for p in Path(d).iterdir()) for d in killer.directories],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    serve(globals())
