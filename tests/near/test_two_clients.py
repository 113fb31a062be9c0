"""One client for a run; as many as there are runs for a server."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from offload.errors import StoreLockedError
from tests.limits import HANG_S
from tests.near.proxy import RESULT, Proxy, Way
from tests.near.servers import Server
from tests.near.training import are_same, copied, expected, make_model, make_optimizer, train


def test_the_second_client_of_a_run_is_refused_and_one_of_another_run_is_not(
    server: Server, tmp_path: Path
) -> None:
    values = expected(tmp_path / "run", 3)
    first, second = make_model(), make_model()
    with make_optimizer(first, server.url("two")) as one:
        train(first, one, 1, 2)
        with pytest.raises(StoreLockedError, match="two: another client trains here"):
            make_optimizer(second, server.url("two"))
        with make_optimizer(second, server.url("other")) as two:
            train(second, two, 1, 3)
            train(first, one, 3, 3)
        assert are_same(copied(first), values[3])
        assert are_same(copied(second), values[3])
    make_optimizer(make_model(), server.url("two")).close()


def test_who_waits_for_a_checkpoint_keeps_no_other_call_waiting(server: Server) -> None:
    proxy = Proxy(server.socket)
    waits, goes_on = threading.Event(), threading.Event()
    model = make_model()
    with make_optimizer(model, proxy.url("waits")) as optimizer:
        train(model, optimizer, 1, 1)
        handle = optimizer.checkpoint({"step": 1})

        def change(way: Way, header: bytes, content: bytes) -> bytes:
            """Keep the first result until the test lets it go on."""
            if (way, header[4]) == ("down", RESULT) and not waits.is_set():
                waits.set()
                goes_on.wait(HANG_S)
            return header + content

        proxy.change = change
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(handle.result)
            assert waits.wait(HANG_S)
            train(model, optimizer, 2, 2)
            assert optimizer.stats().steps == 2
            assert not result.done()
            goes_on.set()
            assert result.result().step == 1
    proxy.close()


def test_a_handle_knows_its_checkpoint_after_the_optimizer_was_closed(server: Server) -> None:
    model = make_model()
    with make_optimizer(model, server.url("closed")) as optimizer:
        train(model, optimizer, 1, 1)
        handle = optimizer.checkpoint({"step": 1})
    assert handle.done()
    assert handle.result().train_state == {"step": 1}


def test_a_run_that_another_process_of_the_machine_trains_is_refused(server: Server) -> None:
    with (
        make_optimizer(make_model(), server.runs / "local"),
        pytest.raises(StoreLockedError, match="local"),
    ):
        make_optimizer(make_model(), server.url("local"))


def test_a_client_whose_end_the_server_has_not_seen_yet_is_not_in_the_way(server: Server) -> None:
    proxy = Proxy(server.socket)
    for number in range(10):
        model = make_model()
        optimizer = make_optimizer(model, proxy.url("again"))
        if number:
            assert optimizer.restore() is not None
        train(model, optimizer, 1, 1)
        optimizer.checkpoint(discarded := {"number": number})
        proxy.cut()  # while the server seals
        assert discarded
    proxy.close()
