"""Training on a server gives the bits of training with a directory of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.near.servers import Server, serving

CHUNKS = {"chunk_bytes": 1 << 16, "allow_volatile": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("near")) as found:
        yield found


def make_model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(257, 300),
        torch.nn.BatchNorm1d(300),
        torch.nn.Linear(300, 130, bias=False),
        torch.nn.Linear(130, 3),
    ).to(dtype)


def trained(
    directory: Any, dtype: torch.dtype, optimizer: type, options: offload.Options, **hyper: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Train with groups, clipping, a schedule, an edit, a frozen layer, a seal and a restore."""
    model = make_model(dtype)
    model[3].requires_grad_(False)
    groups = [
        {"params": model[0].parameters()},
        {"params": [*model[1].parameters(), *model[2].parameters()], "weight_decay": 0.1},
    ]
    with offload.OffloadedOptimizer(
        optimizer, groups, directory=directory, model=model, options=options, **hyper
    ) as training:
        schedule = torch.optim.lr_scheduler.ExponentialLR(training, 0.9)

        def step(number: int) -> None:
            torch.manual_seed(number)
            loss = model(torch.randn(16, 257).to(dtype)).float().square().mean()
            (loss * 8).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            training.step()
            training.zero_grad()
            schedule.step()

        for number in range(5):
            step(number)
            if number == 2:
                with torch.no_grad():
                    model[0].weight.mul_(0.99)
                    model[3].bias.add_(1)
        state = {"data": [1, 2], "noise": torch.arange(3)}
        made = training.checkpoint(state, metrics={"loss": 0.5}).result()
        assert (made.step, made.metrics) == (5, {"loss": 0.5})
        step(5)
        sealed = training.restore()
        assert sealed is not None
        assert sealed.train_state["data"] == [1, 2]
        assert [one.step for one in training.checkpoints()] == [5]
        restored = {name: value.clone() for name, value in model.state_dict().items()}
        step(6)
        training.synchronize()
        hyper_now = [{k: v for k, v in g.items() if k != "params"} for g in training.param_groups]
        return restored, model.state_dict(), {"groups": hyper_now, "steps": training.num_steps}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("optimizer", "hyper", "settings"),
    [
        (torch.optim.AdamW, {"lr": 1e-2}, {}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {}),
        (torch.optim.Adagrad, {"lr": 1e-2}, {}),
        (torch.optim.AdamW, {"lr": 1e-2}, {"overlap": "forward"}),
        (torch.optim.AdamW, {"lr": 1e-2}, {"state_dtype": "int8"}),
        (torch.optim.AdamW, {"lr": 1e-2}, {"state_dtype": "bfloat16", "master": "split"}),
    ],
    ids=["adamw", "sgd", "adagrad", "forward", "int8", "bf16-split"],
)
def test_a_server_gives_the_bits_of_a_local_store(
    server: Server,
    tmp_path: Path,
    dtype: torch.dtype,
    optimizer: type,
    hyper: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    if "master" in settings and dtype == torch.float32:
        settings = {"state_dtype": "bfloat16"}
    options = offload.Options(**CHUNKS, **settings)
    run = f"{optimizer.__name__}-{dtype}-{'-'.join(map(str, settings.values()))}"
    near = trained(server.url(run), dtype, optimizer, options, **hyper)
    local = trained(tmp_path / "run", dtype, optimizer, options, **hyper)
    for here, there in zip(local[:2], near[:2], strict=True):
        assert here.keys() == there.keys()
        assert all(torch.equal(value, there[name]) for name, value in here.items())
    assert local[2] == near[2]


def test_the_store_of_a_server_is_one_like_any_other(server: Server, tmp_path: Path) -> None:
    """A program on the server's machine goes on with it, and has the bits of a local run."""
    options = offload.Options(**CHUNKS)
    trained(server.url("moved"), torch.bfloat16, torch.optim.AdamW, options, lr=1e-2)
    trained(tmp_path / "run", torch.bfloat16, torch.optim.AdamW, options, lr=1e-2)
    found = []
    for store in (server.runs / "moved", tmp_path / "run"):
        with offload.open_checkpoint(store) as sealed:
            assert sealed.verify().ok
        model = make_model(torch.bfloat16)
        with offload.AdamW(
            [
                {"params": model[0].parameters()},
                {"params": [*model[1].parameters(), *model[2].parameters()]},
            ],
            directory=store,
            model=model,
            options=options,
        ) as training:
            training.restore()
            model(torch.ones(4, 257).bfloat16()).float().square().mean().backward()
            training.step()
        found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
