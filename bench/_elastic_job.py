"""The elastic example under torchrun, whose ranks, or a node of it, are killed while it runs."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from safetensors.torch import load_file

import offload
from tests.dying import dying
from tests.numerics.reference import bits

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs/examples/elastic.py"

TIMEOUT_S = 240.0
"""Seconds without a line after which a job counts as hung. A restart takes a few seconds."""

_QUICK = "join_timeout=120,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Torchrun then notices within seconds that a node is lost."""


class HungError(RuntimeError):
    """A job has said nothing for too long."""


class ElasticJob:
    """The example under one torchrun, or under one for each of several nodes on this host.

    The first node serves the others, as the endpoint of their rendezvous.

    Args:
        directory: Directory of the store.
        steps: Steps in all.
        every: Steps from checkpoint to checkpoint.
        ranks: Ranks of each node.
        nodes: Number of nodes at the beginning.
        lost_after_s: Seconds without a sign of a rank until it counts as lost.
    """

    def __init__(
        self,
        directory: Path,
        *,
        steps: int,
        every: int,
        ranks: int = 2,
        nodes: int = 1,
        lost_after_s: float = 100.0,
    ) -> None:
        self.directory = directory
        self.lines: list[str] = []
        """What rank 0 has printed so far."""
        self.killed: dict[int, int] = {}
        """Newest checkpoint that was there when ranks were killed, by the number of restarts before
        their start."""
        common = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=1000"]
        common += [f"--nproc-per-node={ranks}", "--monitor-interval=0.05"]
        launch = [["--standalone"]] if nodes == 1 else _rendezvous(nodes)
        example = [sys.executable, "-u", str(EXAMPLE), f"--directory={directory}"]
        example += [f"--steps={steps}", f"--every={every}", f"--lost-after={lost_after_s}"]
        # As torchrun starts it, but that ranks die with their torchrun.
        command = ["--no-python", *dying(example, parent=0)]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self._errors = directory.with_name(f"{directory.name}.errors")
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        with self._errors.open("a") as errors:
            self.nodes = [
                subprocess.Popen(
                    dying([*common, *own, *command]), cwd=ROOT, env=environment, text=True,
                    stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                )
                for own in launch
            ]  # fmt: skip
        self._listeners = [
            threading.Thread(target=self._listen, args=(node,), daemon=True) for node in self.nodes
        ]
        for listener in self._listeners:
            listener.start()
        self._num_speaking = nodes

    def _listen(self, node: subprocess.Popen[str]) -> None:
        for line in node.stdout or ():
            self._said.put(line.rstrip("\n"))
        self._said.put(None)

    def next(self) -> str | None:
        """Return the next line of rank 0; None if all nodes have ended.

        Raises:
            HungError: There was none for too long.
        """
        while self._num_speaking:
            try:
                line = self._said.get(timeout=TIMEOUT_S)
            except queue.Empty:
                raise HungError(f"no line after {self.lines[-3:]}: {self.errors()}") from None
            if line is not None:
                self.lines.append(line)
                return line
            self._num_speaking -= 1
        return None

    def until(self, is_wanted: Callable[[str], bool]) -> bool:
        """Read to a line, and return whether it came."""
        while (line := self.next()) is not None:
            if is_wanted(line):
                return True
        return False

    def ranks(self) -> dict[int, int]:
        """Return the processes of the ranks that run now, by rank."""
        found = {}
        for node in self.nodes:
            for pid in _children(node.pid):
                rank = _environment(pid).get("RANK")
                if rank is not None:
                    found[int(rank)] = pid
        return found

    def kill(self, ranks: Sequence[int], number: int = signal.SIGKILL) -> int:
        """Send a signal to ranks; return how many of them were there."""
        newest, running, num = self.newest(), self.ranks(), 0
        for rank in ranks:
            with suppress(KeyError, ProcessLookupError):
                restart = int(_environment(running[rank])["TORCHELASTIC_RESTART_COUNT"])
                os.kill(running[rank], number)
                num += 1
                self.killed[restart] = max(newest, self.killed.get(restart, 0))
        return num

    def lose_node(self, number: int) -> None:
        """Kill torchrun and all ranks of a node. The others go on without any but the first."""
        node = self.nodes[number]
        pids = [node.pid, *_children(node.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self) -> list[int]:
        """Read to the end; return the exit status of each node."""
        while self.next() is not None:
            pass
        return [node.wait() for node in self.nodes]

    def close(self) -> None:
        """Kill what still runs."""
        for number in range(len(self.nodes)):
            self.lose_node(number)
        for node, listener in zip(self.nodes, self._listeners, strict=True):
            node.wait()
            listener.join()
            if node.stdout is not None:
                node.stdout.close()

    def losses(self) -> dict[int, set[str]]:
        """Return the losses that were printed for each step, by all starts."""
        found: dict[int, set[str]] = {}
        for line in self.lines:
            if match := re.fullmatch(r"step (\d+) loss of rank 0 (\S+)", line):
                found.setdefault(int(match[1]), set()).add(match[2])
        return found

    def starts(self) -> list[tuple[int, int, int | None]]:
        """Return the starts of the ranks, in order.

        Returns:
            For each one the number of restarts before it, the number of ranks, and the step after
            which it went on; None if it began anew or was killed before.
        """
        found: list[tuple[int, int, int | None]] = []
        for line in self.lines:
            if match := re.fullmatch(r"starting (\d+) ranks after (\d+) restarts", line):
                found.append((int(match[2]), int(match[1]), None))
            elif match := re.fullmatch(r"continuing after step (\d+)", line):
                found[-1] = (*found[-1][:2], int(match[1]))
        return found

    def lost(self) -> list[str]:
        """Return the starts that went on before a checkpoint that had been there, in words."""
        found = []
        for restart, _, step in self.starts():
            newest = max((n for one, n in self.killed.items() if one < restart), default=0)
            if step is not None and step < newest:
                found.append(f"restart {restart} goes on after step {step}, not {newest}")
        return found

    def errors(self) -> str:
        """Return the end of what was written to standard error."""
        return self._errors.read_text()[-3000:]

    def newest(self) -> int:
        """Return the step of the newest checkpoint in the store; 0 if there is none."""
        found = [path.name.removeprefix("step-") for path in self.directory.glob("step-*")]
        return max((int(step) for step in found if step.isdigit()), default=0)


def contents(directory: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return all values of the newest checkpoint, by name, and what is wrong with it."""
    with offload.open_checkpoint(directory) as checkpoint:
        problems = [str(problem) for problem in checkpoint.verify().problems]
        found = {"train state": repr(checkpoint.train_state).encode()}
        for name, tensor in load_file(f"{checkpoint.path}/model.safetensors").items():
            found[name] = bits(tensor).numpy().tobytes()
            for array, state in offload.read_state(checkpoint, name).items():
                found[f"{name}, {array}"] = bits(state).numpy().tobytes()
    return found, problems


def _rendezvous(nodes: int) -> list[list[str]]:
    """Return the options of torchrun on each of several nodes; the first one serves the others."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = [f"--nnodes=1:{nodes}", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
    common += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    return [
        [*common, f"--rdzv-conf={_QUICK},is_host={'true' if node == 0 else 'false'}"]
        for node in range(nodes)
    ]


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _environment(pid: int) -> dict[str, str]:
    with suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return {}
