"""A training that is killed, near: the client, its server, or both, within a step, seal or restore.

A client says what it begins and what it has: ``begins step 3``, ``has 3 DIGEST``, ``sealed 3``. It
goes on by itself when it loses its server. `Killing` starts both, kills at a given line, starts
again what is dead, and compares each digest with that of a training without kills.

    python -m tests.near.kills URL LAST
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Final

import torch
import xxhash

from offload.errors import BrokenOptimizerError, NearError, SealError
from tests.dying import dying
from tests.near.servers import Server
from tests.near.training import backward, copied, expected, make_model, make_optimizer

WHO: Final = ("client", "server", "both")
WHEN: Final = ("step", "seal", "restore")

_LONGEST_S: Final = {"step": 0.03, "seal": 0.05, "restore": 0.03}
"""Longest time after the beginning of each at which something is killed."""


def digest(values: dict[str, torch.Tensor]) -> str:
    """Return a digest of all values of a model."""
    found = xxhash.xxh3_64()
    for tensor in values.values():
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def digests(directory: Path, last: int) -> list[str]:
    """Return the digest after each number of steps of a training without kills."""
    return [digest(values) for values in expected(directory, last)]


def train(url: str, last: int) -> None:
    """Train to a step, with a checkpoint after every second one; go on after whatever happens."""
    torch.set_num_threads(1)
    model, optimizer, step, has_gone_back = make_model(), None, -1, False
    while step < last:
        try:
            if optimizer is None:
                optimizer = make_optimizer(model, url, timeout_s=60.0)
            if step < 0:
                _say("begins restore")
                found = optimizer.restore()
                if found is None:  # nothing was sealed yet: from the beginning
                    model.load_state_dict(make_model().state_dict())
                step = 0 if found is None else found.step
                _say(f"has {step} {digest(copied(model))}")
                continue  # it may have been killed after its last step
            backward(model, step + 1)
            _say(f"begins step {step + 1}")
            optimizer.step()
            step += 1
            _say(f"has {step} {digest(copied(model))}")
            if step % 2 == 0:
                _say(f"begins seal {step}")
                optimizer.checkpoint({"step": step}).result()
                _say(f"sealed {step}")
            elif step > last // 2 and not has_gone_back:
                step, has_gone_back = -1, True
        except (NearError, SealError, BrokenOptimizerError) as error:
            _say(f"lost {type(error).__name__}")
            time.sleep(0.05)
            if isinstance(error, BrokenOptimizerError) and step < 0:
                optimizer = None  # nothing was sealed yet, and what was begun cannot go on
            step = -1
    if optimizer is not None:
        optimizer.close()
    _say("ended")


def _say(line: str) -> None:
    print(line, flush=True)


class Killing:
    """Trainings on one server, which is started again when it is killed.

    Args:
        directory: Directory for the runs.
        chance: Source of times.
        last: Number of steps of a training.
    """

    def __init__(self, directory: Path, chance: Random, last: int = 8) -> None:
        self._wanted = digests(directory / "local", last)
        self._chance, self._last = chance, last
        self.server = Server(directory)
        self.kills = 0

    def train(self, run: str, who: str, when: str, times: int = 1) -> None:
        """Train in a new run, and kill a number of times, or fewer if it ends before.

        Raises:
            AssertionError: Something that was sealed is lost, or a bit is another one.
        """
        sealed, left, after_restore = 0, times, False
        client = self._start(run)
        while True:
            assert client.stdout is not None
            line = client.stdout.readline().split()
            match line:
                case ["has", step, found]:
                    assert found == self._wanted[int(step)], (run, who, when, line)
                    if after_restore:
                        assert int(step) >= sealed, (run, who, when, line, sealed)
                case ["sealed", step]:
                    sealed = int(step)
                case ["ended"]:
                    break
                case []:
                    raise AssertionError(f"{run}: the client has ended with {client.wait()}")
            after_restore = line == ["begins", "restore"]
            if left and sealed and line[:2] == ["begins", when]:
                time.sleep(self._chance.uniform(0, _LONGEST_S[when]))
                client = self._kill(run, who, client)
                left -= 1
        client.stdout.close()
        assert client.wait() == 0

    def close(self) -> None:
        """End the server."""
        self.server.close()

    def _kill(self, run: str, who: str, client: subprocess.Popen[str]) -> subprocess.Popen[str]:
        self.kills += 1
        if who in ("server", "both"):
            self.server.kill()
            self.server.launch()
        if who in ("client", "both"):
            client.send_signal(signal.SIGKILL)
            client.wait()
            assert client.stdout is not None
            client.stdout.close()
            client = self._start(run)
        if who in ("server", "both"):
            self.server.wait_ready()
        return client

    def _start(self, run: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.near.kills", self.server.url(run), str(self._last)]
        return subprocess.Popen(
            dying(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parents[2],
        )


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
