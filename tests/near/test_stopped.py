"""A client or a server that is stopped: a named error after the time-out, or it goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.errors import NearError, StoreLockedError
from tests.dying import dying
from tests.eventually import eventually
from tests.limits import SHORT_AGREEMENT_S
from tests.near.peers import CALL, PASS, Peer, Recorded
from tests.near.servers import Server
from tests.near.training import are_same, copied, expected, make_model, make_optimizer, train

_CLIENT = """
import sys
from tests.near.training import make_model, make_optimizer, train
model = make_model()
optimizer = make_optimizer(model, sys.argv[1])
train(model, optimizer, 1, 1)
print("idle", flush=True)
sys.stdin.readline()
train(model, optimizer, 2, 2)
print(f"took {optimizer.stats().steps}", flush=True)
"""


@pytest.fixture
def resumed(server: Server) -> Iterator[None]:
    """Let the server go on after the test."""
    yield
    server.process.send_signal(signal.SIGCONT)


@pytest.mark.usefixtures("resumed")
def test_a_server_that_is_stopped_is_named_and_restore_goes_on(
    server: Server, tmp_path: Path
) -> None:
    values = expected(tmp_path / "run", 3)
    model = make_model()
    with make_optimizer(model, server.url("stopped"), SHORT_AGREEMENT_S) as optimizer:
        train(model, optimizer, 1, 2)
        optimizer.checkpoint().result()
        server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(NearError, match="look whether it runs"):
            train(model, optimizer, 3, 3)
        with pytest.raises(NearError):
            optimizer.restore()
        server.process.send_signal(signal.SIGCONT)
        assert optimizer.restore() is not None
        assert are_same(copied(model), values[2])
        train(model, optimizer, 3, 3)
        assert are_same(copied(model), values[3])


def test_a_client_that_is_stopped_between_steps_goes_on_and_keeps_its_run(server: Server) -> None:
    client = subprocess.Popen(
        dying([sys.executable, "-c", _CLIENT, server.url("client")]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert client.stdout is not None
    assert client.stdin is not None
    assert client.stdout.readline() == "idle\n"
    client.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreLockedError):
        make_optimizer(make_model(), server.url("client"))
    client.send_signal(signal.SIGCONT)
    answer, _ = client.communicate("\n")
    assert answer == "took 2\n"


def test_a_client_that_is_silent_within_a_step_is_given_up(
    server: Server, recorded: Recorded
) -> None:
    with Peer(server) as peer:
        terms = {**recorded.terms, "run": "silent", "timeout_s": SHORT_AGREEMENT_S}
        assert peer.enter(terms) == ""
        peer.document(CALL, 1, recorded.calls["step"])
        assert peer.answer()[0] == PASS
        assert peer.answer()[0] == 0
        with make_optimizer(make_model(), server.url("silent")) as optimizer:
            assert optimizer.checkpoints() == []
    assert eventually(lambda: "for 3 seconds" in server.said())


def test_a_client_that_reads_nothing_is_given_up_and_the_server_does_not_grow(
    server: Server, recorded: Recorded
) -> None:
    steps = recorded.calls["step"]
    with Peer(server) as peer:
        terms = {**recorded.terms, "run": "deaf", "timeout_s": SHORT_AGREEMENT_S}
        assert peer.enter(terms) == ""
        before = server.status("VmRSS")
        for number in range(1, 4000):
            peer.document(CALL, number, {"call": "pin", "name": steps})
        assert server.status("VmRSS") < before + (64 << 10)
    make_optimizer(make_model(), server.url("deaf")).close()
