"""What cannot be done with a server is refused by name, and nothing is begun."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload import NearError
from tests.near.servers import Server, serving
from tests.stores.small import make_model, make_optimizer, step, train


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("near")) as found:
        yield found


class Own(torch.optim.SGD):
    """A class of the user's own, which a directory of this machine would take."""


class Custom(offload.LastK):
    """A policy of the user's own."""


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"overlap": "backward"}, 'overlap="backward"'),
        ({"tier": "file:///tmp/tier"}, "tier="),
        ({"backend": MemoryBackend()}, "backend="),
        ({"placement": "device"}, 'placement="device"'),
        ({"host_memory": "/mnt/cxl"}, "host_memory="),
        ({"parameters": "drive"}, "parameters="),
    ],
    ids=["backward", "tier", "backend", "device", "dax", "parameters"],
)
def test_options_that_need_the_state_here(
    server: Server, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(NearError) as refused:
        make_optimizer(
            make_model(), directory=server.url("options"), options=offload.Options(**settings)
        )
    assert str(refused.value).startswith(named)
    assert not (server.runs / "options").exists()


def test_objects_that_a_server_would_have_to_import(server: Server) -> None:
    model = make_model()
    with pytest.raises(offload.UnsupportedOptimizerError, match="Own cannot be updated by a serv"):
        offload.OffloadedOptimizer(
            Own, model.parameters(), directory=server.url("own"), model=model, lr=0.1
        )
    with pytest.raises(NearError, match=r"keep=.* cannot be sent to a server"):
        make_optimizer(model, directory=server.url("own"), keep=Custom(2))
    assert not (server.runs / "own").exists()


@pytest.mark.parametrize(
    "url",
    [
        "offload://host/a/run",
        "offload+unix://host/s/run",
        "offload+unix:///s/",
        "offload://host/r n",
    ],
)
def test_addresses_of_no_run(url: str) -> None:
    with pytest.raises(ValueError, match=r"write offload\+unix:///path/of/socket/run, or"):
        make_optimizer(make_model(), directory=url)


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NearError, match=r"cannot be reached .* start it with offload serve"):
        make_optimizer(make_model(), directory=f"offload+unix://{tmp_path}/s/run")


def test_every_policy_of_the_library_is_taken(server: Server) -> None:
    keep = offload.LastK(1) | offload.ParametersOnly(offload.EverySteps(2) | offload.BestBy("loss"))
    with make_optimizer(make_model(), directory=server.url("keep"), keep=keep) as optimizer:
        train(optimizer, 4, losses={1: 0.1, 2: 1, 3: 2, 4: 3})
        train(optimizer, 1, losses={5: 4})
        kept = {one.step: one.parameters_only for one in optimizer.checkpoints()}
    assert kept == {1: True, 2: True, 4: True, 5: False}


def test_a_second_client_of_a_run(server: Server) -> None:
    with make_optimizer(make_model(), directory=server.url("twice")) as first:
        step(first)
        with pytest.raises(offload.StoreLockedError, match="another client trains here"):
            make_optimizer(make_model(), directory=server.url("twice"))
        step(first)
        first.checkpoint({}).result()
