"""The whole state crosses on request: as torch's state dict, to the client and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.errors import BrokenOptimizerError, DamagedError, MismatchError, NearError
from tests.near.proxy import PASS, RESULT, TENSOR, Proxy, after
from tests.near.servers import Server
from tests.near.training import are_same, copied, options
from tests.stores.files import flip_on_disk

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
}
FORMS: dict[str, dict[str, Any]] = {
    "exact": {},
    "bf16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8"},
    "split": {"state_dtype": "int8", "master": "split"},
    "forward": {"overlap": "forward"},
}


def make_model(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    """Return a model of which one layer never has a gradient, and one is frozen."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(97, 130), torch.nn.BatchNorm1d(130), torch.nn.Linear(130, 33)
    ).to(dtype)
    model[1].bias.requires_grad_(False)
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(70, 3, dtype=dtype)))
    return model


def make_optimizer(
    model: torch.nn.Sequential, directory: str | Path, name: str = "adamw", **settings: Any
) -> offload.OffloadedOptimizer:
    """Return an optimizer of two groups."""
    kind, hyper = CLASSES[name]
    groups = [
        {"params": [*model[0].parameters(), model.unused]},
        {"params": [*model[1].parameters(), *model[2].parameters()], "lr": 3e-3},
    ]
    return offload.OffloadedOptimizer(
        kind, groups, directory=directory, model=model, options=options(**settings), **hyper
    )


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Take steps with gradients that follow from their numbers."""
    for step in range(first, last + 1):
        torch.manual_seed(step)
        for name, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape).bfloat16()
            is_used = parameter.requires_grad and name != "unused"
            parameter.grad = gradient.to(parameter.dtype) if is_used else None
        optimizer.step()


def tensors(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return all tensors and numbers of a state dict by name."""
    found = {f"master.{n}": tensor for n, tensor in state_dict.get("master", {}).items()}
    for n, state in state_dict["state"].items():
        found |= {f"{n}.{name}": torch.as_tensor(value) for name, value in state.items()}
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["16", "32"])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "exact") for name in CLASSES),
        *(("adamw", form) for form in FORMS if form != "exact"),
    ],
)
def test_the_state_has_the_bits_of_a_local_store_and_comes_back_to_them(
    name: str, form: str, dtype: torch.dtype, server: Server, tmp_path: Path
) -> None:
    settings = dict(FORMS[form])
    if dtype == torch.float32:
        settings.pop("master", None)
    run = f"bits-{name}-{form}-{dtype}".replace("torch.", "")
    dicts, values = [], []
    for place in (tmp_path / "run", server.url(run)):
        model = make_model(dtype)
        with make_optimizer(model, place, name, **settings) as optimizer:
            train(model, optimizer, 1, 3)
            dicts.append(optimizer.full_state_dict())
            train(model, optimizer, 4, 4)
        again = make_model(dtype)
        with make_optimizer(again, f"{place}-again", name, **settings) as optimizer:
            optimizer.param_groups[0]["lr"] = 7.0
            optimizer.load_state_dict(dicts[-1])
            assert optimizer.num_steps == 3
            assert optimizer.param_groups[0]["lr"] == CLASSES[name][1]["lr"]
            dicts.append(optimizer.full_state_dict())
            train(again, optimizer, 4, 4)
            optimizer.checkpoint().result()
            values.append(copied(again))
            assert optimizer.restore() is not None
            assert are_same(copied(again), values[-1])
    local, local_again, near, near_again = dicts
    assert near["param_groups"] == local["param_groups"]
    assert near["num_steps"] == local["num_steps"] == near_again["num_steps"] == 3
    assert are_same(tensors(near), tensors(local))
    assert are_same(tensors(near_again), tensors(local_again))
    assert are_same(values[1], values[0])


@pytest.mark.parametrize("name", CLASSES)
def test_torch_goes_on_from_it_to_the_same_masters(name: str, server: Server) -> None:
    model = make_model()
    with make_optimizer(model, server.url(f"torch-{name}"), name) as optimizer:
        train(model, optimizer, 1, 2)
        found = optimizer.full_state_dict()
        live = [p for group in optimizer.param_groups for p in group["params"]]
        masters = [found["master"].get(n, p).detach().float() for n, p in enumerate(live)]
        own = [torch.nn.Parameter(master.clone()) for master in masters]
        kind, hyper = CLASSES[name]
        plain = kind([{"params": own[:3]}, {"params": own[3:]}], **hyper)
        plain.load_state_dict(found)
        train(model, optimizer, 3, 3)
        for parameter, here in zip(own, live, strict=True):
            parameter.grad = None if here.grad is None else here.grad.float()
        plain.step()
        now = optimizer.full_state_dict()["master"]
    assert len(now) == len(own) - 1
    assert all(torch.equal(master, own[number]) for number, master in now.items())


def test_a_state_dict_of_plain_torch_is_loaded(server: Server) -> None:
    model = make_model()
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    plain = torch.optim.AdamW(masters, lr=1e-2)
    with offload.AdamW(
        model.parameters(), lr=1.0, directory=server.url("plain"), model=model, options=options()
    ) as optimizer:
        for step in (1, 2):
            torch.manual_seed(step)
            for own, live in zip(masters, model.parameters(), strict=True):
                live.grad = torch.randn(live.shape).bfloat16() if live.requires_grad else None
                own.grad = None if live.grad is None else live.grad.float()
            if step == 1:
                plain.step()
                optimizer.load_state_dict(
                    plain.state_dict() | {"master": dict(enumerate(m.data for m in masters))}
                )
                assert all(
                    torch.equal(live, own.bfloat16())
                    for own, live in zip(masters, model.parameters(), strict=True)
                )
            else:
                plain.step()
                optimizer.step()
        found = optimizer.full_state_dict()
    assert optimizer.num_steps == 2
    assert all(torch.equal(master, masters[n].data) for n, master in found["master"].items())


def test_edits_are_part_of_the_state(server: Server, tmp_path: Path) -> None:
    found = []
    for place in (tmp_path / "run", server.url("edits")):
        model = make_model()
        with make_optimizer(model, place) as optimizer:
            train(model, optimizer, 1, 1)
            with torch.no_grad():
                model[0].weight.mul_(0.5)
            with optimizer.materialized():
                found.append(tensors(optimizer.state_dict()))
                exp_avg = optimizer.state[model[0].weight]["exp_avg"]
                assert exp_avg.shape == model[0].weight.shape
                with pytest.raises(offload.errors.OffloadError, match="leave it first"):
                    optimizer.step()
            assert not dict(optimizer.state)
    assert are_same(found[1], found[0])


def test_what_does_not_fit_is_refused_as_by_a_local_store(server: Server, tmp_path: Path) -> None:
    model = make_model()
    with make_optimizer(model, tmp_path / "run", "momentum") as optimizer:
        train(model, optimizer, 1, 1)
        other = optimizer.full_state_dict()
    said = []
    for place in (tmp_path / "second", server.url("refused")):
        with make_optimizer(make_model(), place) as optimizer:
            good = optimizer.full_state_dict()
            bad = [other, {"a": 1}, good | {"num_steps": "x"}, good | {"state": {0: {"step": 1}}}]
            bad.append(good | {"master": {0: torch.zeros(3)}})
            for one in bad:
                with pytest.raises(MismatchError) as error:
                    optimizer.load_state_dict(one)
                said.append(str(error.value))
            with pytest.raises(ValueError, match="different number of parameter groups"):
                optimizer.load_state_dict(good | {"param_groups": good["param_groups"][:1]})
            optimizer.load_state_dict(good)
    assert said[5:] == said[:5]


def test_the_server_holds_a_block_and_not_the_state(server: Server) -> None:
    model = torch.nn.Linear(4000, 2000, bias=False).bfloat16()
    with offload.AdamW(
        model.parameters(),
        directory=server.url("large"),
        options=offload.Options(chunk_bytes=1 << 20, ring_chunks=4),
    ) as optimizer:
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        before, crossed = server.status("VmHWM"), optimizer.stats().from_server_bytes
        found = optimizer.full_state_dict()
        crossed = optimizer.stats().from_server_bytes - crossed
        assert crossed < 12.01 * model.weight.numel()
        sent = optimizer.stats().to_server_bytes
        optimizer.step()  # which sends nothing but gradients
        assert optimizer.stats().to_server_bytes - sent < 2.01 * model.weight.numel()
        optimizer.load_state_dict(optimizer.full_state_dict() | {"num_steps": 1})
        found = optimizer.full_state_dict()
        optimizer.load_state_dict(found)
        assert server.status("VmHWM") < before + (32 << 10)  # of 94 MiB
        assert torch.equal(optimizer.full_state_dict()["master"][0], found["master"][0])


def test_damage_is_named_and_nothing_is_returned(server: Server) -> None:
    model = make_model()
    with make_optimizer(model, server.url("damaged")) as optimizer:
        train(model, optimizer, 1, 1)
        optimizer.checkpoint().result()
    flip_on_disk(server.runs / "damaged" / "step-00000001" / "exp_avg.safetensors", 5000)
    with make_optimizer(make_model(), server.url("damaged")) as optimizer:
        assert optimizer.restore() is not None
        with pytest.raises(DamagedError, match="exp_avg"):
            optimizer.full_state_dict()
        assert optimizer.checkpoints()  # the connection goes on


@pytest.mark.parametrize("how", ["cut", "truncate", "flip"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_loss_while_state_crosses_is_named_and_restore_goes_on(
    number: int, how: Any, server: Server
) -> None:
    proxy, model = Proxy(server.socket), make_model()
    with make_optimizer(model, proxy.url(f"lost-{number}-{how}")) as optimizer:
        train(model, optimizer, 1, 2)
        optimizer.checkpoint().result()
        values, found = copied(model), optimizer.full_state_dict()
        for way, kind, call in (
            ("down", TENSOR, optimizer.full_state_dict),
            ("up", TENSOR, lambda: optimizer.load_state_dict(found)),
            ("down", PASS, lambda: optimizer.load_state_dict(found)),
        ):
            proxy.rule = after(number, way, kind, how)
            with pytest.raises(NearError):
                call()
            proxy.rule = lambda _way, _kind: "pass"
            assert optimizer.restore() is not None
            assert are_same(copied(model), values)
        proxy.rule = after(0, "down", RESULT, "cut")
        with pytest.raises(NearError):
            optimizer.load_state_dict(found)
        with pytest.raises((NearError, BrokenOptimizerError), match="restore"):
            optimizer.step()
        assert optimizer.restore() is not None
        assert are_same(tensors(optimizer.full_state_dict()), tensors(found))
    proxy.close()
