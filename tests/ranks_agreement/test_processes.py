"""Ranks as processes over a real `TCPStore`: killed, and stopped for longer than the limit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.dying import dying
from tests.eventually import eventually
from tests.limits import AGREEMENT_S, SHORT_AGREEMENT_S
from tests.mutation.mutation import ROOT


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported torch, and forks ranks."""
    process = subprocess.Popen(
        dying([sys.executable, "-m", "tests.ranks_agreement.child"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    yield process
    process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The store's folder."""
    return tmp_path / "run"


class Child:
    """A rank in a process of its own."""

    def __init__(self, server: subprocess.Popen[str], asked: dict[str, Any], pipes: Path) -> None:
        pipes.mkdir()
        stdin, stdout = pipes / "stdin", pipes / "stdout"
        os.mkfifo(stdin)
        os.mkfifo(stdout)
        assert server.stdin is not None
        assert server.stdout is not None
        asked |= {"stdin": str(stdin), "stdout": str(stdout)}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        self._pid = int(server.stdout.readline())
        self._said: list[dict[str, Any]] = []
        self._stdin = stdin.open("w")
        self._stdout = stdout.open()

    def next(self) -> dict[str, Any]:
        """Return what the rank says next."""
        line = self._stdout.readline()
        assert line, f"the process has ended after {self._said}"
        found: dict[str, Any] = json.loads(line)
        self._said.append(found)
        return found

    def until(self, what: str) -> dict[str, Any]:
        """Read until the rank says something of a kind."""
        while what not in (found := self.next()):
            pass
        return found

    def go_on(self) -> None:
        """End a pause."""
        self._stdin.write("\n")
        self._stdin.flush()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, and wait until it has had its effect."""
        os.kill(self._pid, number)
        if number in _STATES:
            assert eventually(lambda: self._state() in _STATES[number])

    def close(self) -> None:
        """End the process."""
        if self._state():
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._stdout.close()
        with suppress(BrokenPipeError):
            self._stdin.close()

    def _state(self) -> str:
        """Return the letter for the process's state; empty if it has ended."""
        try:
            status = Path(f"/proc/{self._pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return status.rpartition(")")[2].split()[0]


_STATES = {signal.SIGKILL: ("", "Z", "X"), signal.SIGSTOP: ("T",)}


@contextmanager
def ranks(
    server: subprocess.Popen[str],
    size: int,
    folder: Path,
    *,
    seals: int = 1,
    pauses: dict[int, list[str]] | None = None,
    serves: bool = False,
    timeout_s: float = AGREEMENT_S,
) -> Iterator[list[Child]]:
    """Start ranks; the key-value store is served by this process, or by rank 0."""
    store = None
    if serves:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    else:
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port = store.port
    asked = {
        "size": size,
        "port": port,
        "serves": serves,
        "folder": str(folder),
        "timeout_s": timeout_s,
        "hurry": str(folder.parent / "hurry"),
        "seals": seals,
    }
    folder.mkdir(exist_ok=True)
    pipes = Path(tempfile.mkdtemp(dir=folder.parent))
    children: list[Child] = []
    try:
        for rank in range(size):
            own = {"rank": rank, "pauses": (pauses or {}).get(rank, [])}
            children.append(Child(server, asked | own, pipes / str(rank)))
        # Connecting may take seconds, and the store answers nobody meanwhile: its server looks up
        # the name of each process that connects.
        for child in children:
            assert child.next() == {"at": "connected"}
        for child in children:
            child.go_on()
        yield children
    finally:
        for child in children:
            child.close()


def hurry(folder: Path) -> None:
    """Let the limit, which is long until now, pass in a moment."""
    (folder.parent / "hurry").touch()


def checkpoints(folder: Path) -> list[str]:
    """Return the checkpoints, after a check that each part has what the manifest says."""
    for path in folder.glob("step-*/manifest.json"):
        for owner, name, content in json.loads(path.read_text())["parts"]:
            assert (folder / f"owner-{owner}" / name).read_text() == content
    return sorted(path.name for path in folder.glob("step-*"))


def reopened(server: subprocess.Popen[str], size: int, folder: Path) -> list[Any]:
    """Start the job anew and return the generation from which each rank goes on."""
    (folder.parent / "hurry").unlink()
    with ranks(server, size, folder, seals=0) as children:
        return [child.until("opened")["opened"] for child in children]


def test_three_ranks_seal_again_and_again(server: subprocess.Popen[str], folder: Path) -> None:
    with ranks(server, 3, folder, seals=4) as children:
        for child in children:
            assert [child.until("told")["told"] for _ in range(4)] == ["published"] * 4
            assert child.next() == {"ended": "well"}
    assert checkpoints(folder) == ["step-1", "step-2", "step-3", "step-4"]


@pytest.mark.parametrize("killed", [1, 2], ids=lambda rank: f"rank-{rank}")
def test_a_rank_killed_after_its_report_does_not_stop_the_checkpoint(
    killed: int, server: subprocess.Popen[str], folder: Path
) -> None:
    pauses = {0: ["complete"], killed: ["reported"]}
    with ranks(server, 3, folder, pauses=pauses) as children:
        children[killed].until("at")
        children[0].until("at")
        children[killed].send(signal.SIGKILL)
        hurry(folder)
        children[0].go_on()
        told = [children[r].until("told")["told"] for r in range(3) if r != killed]
    assert told == ["published"] * 2
    assert checkpoints(folder) == ["step-1"]


def test_a_writer_killed_before_the_rename_leaves_the_others_in_doubt(
    server: subprocess.Popen[str], folder: Path
) -> None:
    with ranks(server, 2, folder, seals=2, pauses={0: ["sealed", "complete"]}) as children:
        assert children[0].until("at") == {"at": "complete"}
        children[0].go_on()
        children[0].until("at")  # sealed once
        children[0].go_on()
        children[0].until("at")
        children[0].send(signal.SIGKILL)
        assert children[1].until("told") == {"told": "published"}
        hurry(folder)
        assert children[1].until("told")["told"] == "in doubt"
        ended = children[1].until("ended")
    assert ended["ended"] == "InDoubtError"
    assert "it is not known whether step 1 is a checkpoint" in ended["why"]
    assert checkpoints(folder) == ["step-1"]
    assert reopened(server, 2, folder) == [[1, 1]] * 2


@pytest.mark.parametrize("serves", [False, True], ids=["store-elsewhere", "store-stopped-as-well"])
@pytest.mark.parametrize("point", ["complete", "rename"])
def test_a_writer_stopped_until_the_others_gave_up(
    point: str, serves: bool, server: subprocess.Popen[str], folder: Path
) -> None:
    """It goes on after SIGCONT, and publishes only if it could not know that they had given up."""
    # A store that does not answer is given up by the clock of the system, which cannot run faster.
    limit_s = SHORT_AGREEMENT_S if serves else AGREEMENT_S
    with ranks(
        server, 3, folder, pauses={0: [point]}, serves=serves, timeout_s=limit_s
    ) as children:
        children[0].until("at")
        children[0].send(signal.SIGSTOP)
        hurry(folder)
        for child in children[1:]:
            assert child.until("told")["told"] == "in doubt"
        before = {path: path.read_text() for path in folder.glob("owner-*/*")}
        children[0].go_on()
        children[0].send(signal.SIGCONT)
        told = children[0].until("told")
        knows = point == "complete" and not serves
        assert told["told"] == ("aborted" if knows else "published")
        assert not knows or "gave up" in told["why"]
        for child in children[1:]:
            assert child.until("ended")["ended"] == "InDoubtError"
    assert {path: path.read_text() for path in folder.glob("owner-*/*")} == before
    assert checkpoints(folder) == ([] if knows else ["step-1"])
    assert reopened(server, 3, folder) == ([None] * 3 if knows else [[1, 1]] * 3)
