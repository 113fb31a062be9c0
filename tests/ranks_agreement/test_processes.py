"""Ranks as processes over a real `TCPStore`: killed, and stopped for longer than the limit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.mutation.mutation import ROOT

LIMIT_S = 1.5
"""Short, because some of these tests wait for it; only what is waited for decides a test."""


class Child:
    """A rank in a process of its own."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks_agreement.child", json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # torch reports lost connections at length
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )

    def next(self) -> dict[str, Any]:
        """Return what the rank says next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process has ended with {self.process.wait()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def until(self, what: str) -> dict[str, Any]:
        """Read until the rank says something of a kind."""
        while what not in (found := self.next()):
            pass
        return found

    def go_on(self) -> None:
        """End a pause."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait()
        elif number is signal.SIGSTOP:
            os.waitpid(self.process.pid, os.WUNTRACED)


@contextmanager
def ranks(
    size: int,
    folder: Path,
    *,
    seals: int = 1,
    pauses: dict[int, list[str]] | None = None,
    serves: bool = False,
    timeout_s: float = LIMIT_S,
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
        "seals": seals,
    }
    children = [
        Child(asked | {"rank": rank, "pauses": (pauses or {}).get(rank, [])})
        for rank in range(size)
    ]
    try:
        yield children
    finally:
        for child in children:
            child.process.kill()
            child.process.communicate()


def checkpoints(folder: Path) -> list[str]:
    """Return the checkpoints, after a check that each part has what the manifest says."""
    for path in folder.glob("step-*/manifest.json"):
        for owner, name, content in json.loads(path.read_text())["parts"]:
            assert (folder / f"owner-{owner}" / name).read_text() == content
    return sorted(path.name for path in folder.glob("step-*"))


def reopened(size: int, folder: Path) -> list[Any]:
    """Start the job anew and return the generation from which each rank goes on."""
    with ranks(size, folder, seals=0, timeout_s=60) as children:
        return [child.until("opened")["opened"] for child in children]


def test_three_ranks_seal_again_and_again(tmp_path: Path) -> None:
    with ranks(3, tmp_path, seals=4, timeout_s=60) as children:
        for child in children:
            assert [child.until("told")["told"] for _ in range(4)] == ["published"] * 4
            assert child.next() == {"ended": "well"}
    assert checkpoints(tmp_path) == ["step-1", "step-2", "step-3", "step-4"]


@pytest.mark.parametrize("killed", [1, 2], ids=lambda rank: f"rank-{rank}")
def test_a_rank_killed_after_its_report_does_not_stop_the_checkpoint(
    killed: int, tmp_path: Path
) -> None:
    pauses = {0: ["complete"], killed: ["reported"]}
    with ranks(3, tmp_path, pauses=pauses) as children:
        children[killed].until("at")
        children[0].until("at")
        children[killed].send(signal.SIGKILL)
        children[0].go_on()
        told = [children[r].until("told")["told"] for r in range(3) if r != killed]
    assert told == ["published"] * 2
    assert checkpoints(tmp_path) == ["step-1"]


def test_a_writer_killed_before_the_rename_leaves_the_others_in_doubt(tmp_path: Path) -> None:
    with ranks(2, tmp_path, seals=2, pauses={0: ["sealed", "complete"]}) as children:
        assert children[0].until("at") == {"at": "complete"}
        children[0].go_on()
        children[0].until("at")  # sealed once
        children[0].go_on()
        children[0].until("at")
        children[0].send(signal.SIGKILL)
        assert children[1].until("told") == {"told": "published"}
        assert children[1].until("told")["told"] == "in doubt"
        ended = children[1].until("ended")
    assert ended["ended"] == "InDoubtError"
    assert "it is not known whether step 1 is a checkpoint" in ended["why"]
    assert checkpoints(tmp_path) == ["step-1"]
    assert reopened(2, tmp_path) == [[1, 1]] * 2


@pytest.mark.parametrize("serves", [False, True], ids=["store-elsewhere", "store-stopped-as-well"])
@pytest.mark.parametrize("point", ["complete", "rename"])
def test_a_writer_stopped_until_the_others_gave_up(
    point: str, serves: bool, tmp_path: Path
) -> None:
    """It goes on after SIGCONT, and publishes only if it could not know that they had given up."""
    with ranks(3, tmp_path, pauses={0: [point]}, serves=serves) as children:
        children[0].until("at")
        children[0].send(signal.SIGSTOP)
        for child in children[1:]:
            assert child.until("told")["told"] == "in doubt"
        before = {path: path.read_text() for path in tmp_path.glob("owner-*/*")}
        children[0].go_on()
        children[0].send(signal.SIGCONT)
        told = children[0].until("told")
        knows = point == "complete" and not serves
        assert told["told"] == ("aborted" if knows else "published")
        assert not knows or "gave up" in told["why"]
        for child in children[1:]:
            assert child.until("ended")["ended"] == "InDoubtError"
    assert {path: path.read_text() for path in tmp_path.glob("owner-*/*")} == before
    assert checkpoints(tmp_path) == ([] if knows else ["step-1"])
    assert reopened(3, tmp_path) == ([None] * 3 if knows else [[1, 1]] * 3)
