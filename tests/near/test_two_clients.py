"""One client for a run; as many as there are runs for a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.errors import StoreLockedError
from tests.near.proxy import Proxy
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
