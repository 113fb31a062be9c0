"""The life of a server: where it listens, and how it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import offload
from offload.errors import NearError
from tests.dying import dying
from tests.near.peers import HELLO, Peer
from tests.near.servers import Server, serving
from tests.near.training import (
    are_same,
    copied,
    expected,
    make_model,
    make_optimizer,
    options,
    train,
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_closes_all_stores_in_order(number: signal.Signals, tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        model = make_model()
        optimizer = make_optimizer(model, server.url("run"))
        train(model, optimizer, 1, 2)
        optimizer.checkpoint({"step": 2})  # is sealed in the meantime
        idle = make_optimizer(make_model(), server.url("idle"))
        assert server.stop(number) == 0
        assert not server.socket.exists()
        with pytest.raises(NearError):
            optimizer.step()
        optimizer.close()  # which knows that its server is lost
        with pytest.raises(NearError):
            idle.close()
    (found,) = offload.list_checkpoints(server.runs / "run")
    assert found.step == 2


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.kill()
        assert server.socket.exists()
        server.start()
        make_optimizer(make_model(), server.url("run")).close()
        second = _command("serve", str(server.runs), "--listen", f"unix:{server.socket}")
        assert second.returncode != 0
        assert "in use" in second.stderr
        assert "Traceback" not in second.stderr
        make_optimizer(make_model(), server.url("run")).close()
        assert server.stop() == 0
        server.socket.write_text("a file of the user")
        third = _command("serve", str(server.runs), "--listen", f"unix:{server.socket}")
        assert third.returncode != 0
        assert server.socket.read_text() == "a file of the user"


def test_a_run_gets_as_much_memory_as_the_server_allows(tmp_path: Path) -> None:
    with serving(tmp_path, "--host-memory", "1MB") as server:
        with pytest.raises(offload.errors.OffloadError, match="offload serve --host-memory"):
            make_optimizer(make_model(), server.url("run"), options=options(ring_chunks=16))
        assert not (server.runs / "run").exists()
        with make_optimizer(make_model(), server.url("run"), options=options(ring_chunks=15)):
            pass
    assert _command("serve", str(tmp_path), "--host-memory", "much").returncode == 2


@pytest.mark.parametrize(
    "listen", ["unix:", "unix:/nowhere/s", "unix:/" + "a" * 120, "host", ":99999", "0.0.0.0:0"]
)
def test_an_address_that_cannot_be_is_refused_in_a_line(listen: str, tmp_path: Path) -> None:
    found = _command("serve", str(tmp_path), "--listen", listen)
    assert found.returncode != 0
    assert "Traceback" not in found.stderr
    assert found.stderr.strip()


def test_a_client_without_the_token_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("correct horse battery staple")
    with serving(tmp_path, "--token-file", str(token)) as server:
        for given in (None, "", "wrong", 5, ["a"], "\ud800", "x" * 3000):
            with Peer(server) as peer:
                peer.document(HELLO, 0, {"token": given, "secret": ""})
                assert "token" in peer.error()
        with Peer(server) as peer:
            peer.document(HELLO, 0, {"token": token.read_text(), "secret": ""})
            assert peer.answer()[1] == b"{}"


def test_tcp_needs_a_token_and_then_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _command("serve", str(tmp_path), "--listen", "127.0.0.1:0")
    assert found.returncode == 1
    assert "pass --token-file" in found.stderr
    token = tmp_path / "token"
    token.write_text("correct horse battery staple")
    command = [sys.executable, "-m", "offload", "serve", str(tmp_path), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        dying([*command, "--token-file", str(token)]), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split('"')[1].replace("RUN", "run")
            with pytest.raises(NearError, match="the token is not the server's"):
                make_optimizer(make_model(), url)
            monkeypatch.setenv("OFFLOAD_TOKEN_FILE", str(token))
            model = make_model()
            with make_optimizer(model, url) as optimizer:
                train(model, optimizer, 1, 2)
            assert are_same(copied(model), expected(tmp_path / "local", 2)[2])
        finally:
            process.terminate()


def test_a_socket_is_for_its_owner_only(server: Server) -> None:
    assert server.socket.stat().st_mode & 0o077 == 0


def test_a_server_that_is_not_there_or_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(NearError, match="offload serve"):
        make_optimizer(make_model(), f"offload+unix://{tmp_path}/nothing/run")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        with pytest.raises(NearError, match="offload serve"):
            make_optimizer(make_model(), f"offload+unix://{tmp_path}/s/run")


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "offload", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
