"""Parameters and gradients of every kind: near, they have the bits of a store on this machine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.errors import NearError, OffloadError, UnsupportedParameterError
from tests.near.servers import Server
from tests.near.training import are_same, copied, options

Loop = Callable[[torch.nn.Module, offload.OffloadedOptimizer, int], None]
"""Function that takes the step of a number."""


class Odd(torch.nn.Module):
    """Parameters of unusual shapes and layouts."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape).to(dtype))

        self.scale = parameter()
        self.nothing = parameter(0, 7)
        self.turned = torch.nn.Parameter(torch.randn(70, 90).to(dtype).t())
        self.sparse_step = torch.nn.Parameter(torch.randn(40, 60).to(dtype)[:, ::2])
        self.tied = parameter(90, 70)
        self.also = self.tied
        self.frozen = torch.nn.Parameter(torch.randn(9).to(dtype), requires_grad=False)
        self.large = parameter(300, 200)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.ones(3, dtype=torch.bool))
        self.register_buffer("turned_buffer", torch.randn(6, 4).t())


def _gradients(model: torch.nn.Module, step: int) -> None:
    torch.manual_seed(step)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)


def _plain(model: Any, optimizer: offload.OffloadedOptimizer, step: int) -> None:
    _gradients(model, step)
    optimizer.step()


def _some_none(model: Any, optimizer: offload.OffloadedOptimizer, step: int) -> None:
    _gradients(model, step)
    if step % 2:
        model.large.grad = model.scale.grad = None
    if step == 3:
        optimizer.zero_grad()
    optimizer.step()


def _frozen_later(model: Any, optimizer: offload.OffloadedOptimizer, step: int) -> None:
    model.zero_grad()
    model.large.requires_grad_(step < 2)
    model.frozen.requires_grad_(step == 3)
    _gradients(model, step)
    optimizer.step()


def _closure(model: Any, optimizer: offload.OffloadedOptimizer, step: int) -> None:
    def closure() -> float:
        _gradients(model, step)
        return float(step)

    assert optimizer.step(closure) == step


def _edited(model: Any, optimizer: offload.OffloadedOptimizer, step: int) -> None:
    _gradients(model, step)
    model.large.data.mul_(0.5)
    model.turned.data = model.turned.data.clone().contiguous()
    model.frozen.data.add_(1)
    model.count.add_(1)
    optimizer.step()
    with torch.no_grad():
        model.tied.copy_(model.tied * 2)


def _turned_gradients(model: Any, optimizer: offload.OffloadedOptimizer, step: int) -> None:
    _gradients(model, step)
    model.tied.grad = model.tied.grad.t().contiguous().t()
    model.scale.grad = model.scale.grad.expand(())
    model.large.grad = torch.ones(1, dtype=model.large.dtype).expand(300, 200)
    optimizer.step()


def _scheduled(model: Any, optimizer: offload.OffloadedOptimizer, step: int) -> None:
    _gradients(model, step)
    optimizer.param_groups[0]["lr"] = 0.1 / step
    with optimizer.gradients_times(0.5, 3.0):
        optimizer.step()


LOOPS: dict[str, Loop] = {
    "plain": _plain,
    "gradients that are None": _some_none,
    "frozen later": _frozen_later,
    "closure": _closure,
    "edited": _edited,
    "turned gradients": _turned_gradients,
    "scheduled and scaled": _scheduled,
}


def _run(
    directory: str | Path, loop: Loop, dtype: torch.dtype
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the values after each step, and after a restore and one more step."""
    model = Odd(dtype)
    optimizer = offload.AdamW(
        model.parameters(), lr=0.1, directory=directory, model=model, options=options()
    )
    with optimizer:
        for step in range(1, 5):
            loop(model, optimizer, step)
            yield copied(model)
            if step in (1, 3):
                optimizer.checkpoint({"step": step}).result()
        found = optimizer.restore()
        assert found is not None
        yield copied(model)
        loop(model, optimizer, 4)
        yield copied(model)
        optimizer.checkpoint().result()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_the_bits_are_those_of_a_store_on_this_machine(
    name: str, dtype: torch.dtype, server: Server, tmp_path: Path
) -> None:
    run = f"{name}-{dtype}".replace(" ", "-")
    near = _run(server.url(run), LOOPS[name], dtype)
    here = _run(tmp_path / "run", LOOPS[name], dtype)
    for number, (there, wanted) in enumerate(zip(near, here, strict=True)):
        differ = [key for key in wanted if not are_same({key: there[key]}, {key: wanted[key]})]
        assert not differ, number
    with (
        offload.open_checkpoint(server.runs / run / "step-00000004") as there,
        offload.open_checkpoint(tmp_path / "run" / "step-00000004") as wanted,
    ):
        assert there.verify().ok
        for file in ("model.safetensors", "state.safetensors"):
            if (Path(wanted.path) / file).exists():
                assert (Path(there.path) / file).read_bytes() == (
                    Path(wanted.path) / file
                ).read_bytes(), file


def _optimizer(model: torch.nn.Module, server: Server, run: str) -> offload.OffloadedOptimizer:
    return offload.AdamW(
        model.parameters(), lr=0.1, directory=server.url(run), model=model, options=options()
    )


def test_parameters_that_are_added_are_refused_and_training_goes_on(server: Server) -> None:
    model = Odd()
    with _optimizer(model, server, "added") as optimizer:
        _plain(model, optimizer, 1)
        model.frozen.requires_grad_(True)
        for parameter in (torch.nn.Parameter(torch.ones(3)), model.scale):
            with pytest.raises((OffloadError, ValueError)):
                optimizer.add_param_group({"params": [parameter]})
        _plain(model, optimizer, 2)
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model.frozen]})
        with pytest.raises(UnsupportedParameterError, match="make the optimizer after"):
            _plain(model, optimizer, 3)
        optimizer.param_groups.pop()
        _plain(model, optimizer, 3)
        assert optimizer.stats().steps == 3


@pytest.mark.parametrize("how", ["shape", "dtype"])
def test_a_parameter_with_other_memory_than_was_agreed_is_named(server: Server, how: str) -> None:
    model = Odd()
    with _optimizer(model, server, f"other-{how}") as optimizer:
        _plain(model, optimizer, 1)
        before = model.large.data
        model.large.data = before[:5] if how == "shape" else before.float()
        model.large.grad = None
        with pytest.raises(UnsupportedParameterError, match="large"):
            optimizer.step()
        with pytest.raises(UnsupportedParameterError, match="large"):
            optimizer.checkpoint()
        model.large.data = before
        _plain(model, optimizer, 2)


def test_a_sparse_gradient_is_refused_and_training_goes_on(server: Server) -> None:
    table = torch.nn.Embedding(50, 8, sparse=True)
    with _optimizer(table, server, "sparse") as optimizer:
        table(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(UnsupportedParameterError, match="sparse"):
            optimizer.step()
        table.weight.grad = torch.ones(50, 8)
        optimizer.step()
        assert optimizer.stats().steps == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": "device"},
        {"tier": "s3://a/b"},
        {"host_memory": "/dev/shm"},
    ],
    ids=str,
)
def test_an_option_that_needs_the_state_here_is_refused_by_name(
    changes: dict[str, Any], server: Server
) -> None:
    model = Odd()
    (name,) = changes
    with pytest.raises(NearError, match=name):
        offload.AdamW(
            model.parameters(),
            directory=server.url("options"),
            model=model,
            options=options(**changes),
        )


def test_all_calls_work(server: Server, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = Odd()
    with _optimizer(model, server, "calls") as optimizer:
        _plain(model, optimizer, 1)
        whole = optimizer.full_state_dict()
        with offload.AdamW(model.parameters(), lr=0.1, directory=tmp_path) as local:
            local.load_state_dict(whole)
            again = local.full_state_dict()
        assert all(torch.equal(again["master"][n], one) for n, one in whole["master"].items())
        first = optimizer.checkpoint({"step": 1}, metrics={"loss": 1.0}).result()
        _plain(model, optimizer, 2)
        optimizer.checkpoint({"step": 2}).result()
        optimizer.pin("first", first)
        assert list(optimizer.pins()) == ["first"]
        infos = optimizer.checkpoints()
        assert [one.step for one in infos] == [1, 2]
        assert infos[0].pins == ("first",)
        reference = optimizer.state_dict()
        optimizer.load_state_dict(reference)
        assert optimizer.find(offload.reference_of(reference)).step == 2
        for which in (first, infos[0], first.path, 1):
            found = optimizer.restore(which, discard_newer=True)
            assert found is not None
            assert found.train_state == {"step": 1}
            assert f"step 1 from {server.url('calls')}/step-" in capfd.readouterr().err
            _plain(model, optimizer, 2)
            optimizer.unpin("first")
            optimizer.checkpoint({"step": 2}).result()
            optimizer.pin("first", 1)
        optimizer.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            repr(optimizer)
            optimizer._repr_html_()
