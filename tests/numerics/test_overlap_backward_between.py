"""Between `backward()` and `step()` parameters are the step's already: who needs them is told."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from offload.errors import OverlapError
from tests.eventually import TIMEOUT_S, eventually
from tests.numerics.loops import (
    STEPS,
    Net,
    assert_hidden,
    batch,
    check,
    copies,
    optimizer_for,
)
from tests.numerics.twins import is_open

REMEDY = r'use Options\(overlap="forward"\)'


USES: dict[str, Callable[[nn.Parameter], object]] = {
    "norm": lambda p: p.norm(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "an element": lambda p: p[0, 0].item(),
    "foreach": lambda p: torch._foreach_norm([p]),
    "clamp_": lambda p: p.clamp_(-0.05, 0.05),
    "edit of the data": lambda p: p.data.mul_(0.9),
    "copy_": lambda p: p.copy_(torch.ones(24, 24)),
    "assigned data": lambda p: setattr(p, "data", torch.ones(24, 24)),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "numpy": lambda p: p.numpy(force=True),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "text": repr,
}


def refused(net: Any) -> None:
    for use in USES.values():
        with (
            torch.no_grad(),
            pytest.raises(
                OverlapError,
                match=rf"'last.weight' was used between backward\(\) and step\(\).*{REMEDY}",
            ),
        ):
            use(net.last.weight)


def uses_between(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    (net,), (optimizer,) = nets, optimizers
    for step in range(STEPS):
        loss = net(batch(step)).square().mean()
        loss.backward()
        assert_hidden(optimizer)
        if is_open(optimizer):
            refused(net)
            with ThreadPoolExecutor(1) as other:
                other.submit(refused, net).result(TIMEOUT_S)
        optimizer.step()  # as nothing has been lost or changed
        optimizer.zero_grad()
        yield loss
        yield from copies(net)


def test_between_backward_and_step() -> None:
    check(uses_between, lambda: [Net()])


def test_what_does_not_read_is_not_refused() -> None:
    net = Net()
    with optimizer_for(net) as optimizer:
        net(batch(0)).square().mean().backward()
        assert is_open(optimizer)
        assert net.last.weight.shape == (24, 24)
        assert all(p.requires_grad and p.dtype == torch.float32 for p in net.parameters())
        assert all(isinstance(p, nn.Parameter) for p in net.parameters())
        assert all(torch.zeros_like(p).sum() == 0 for p in net.parameters())
        net.train()
        optimizer.step()
        optimizer.checkpoint().result()


def test_a_step_pre_hook_that_reads_is_refused_and_the_step_can_be_repeated() -> None:
    net = Net()
    with optimizer_for(net) as optimizer:
        handle = optimizer.register_step_pre_hook(lambda *_: net.last.weight.norm() and None)
        net(batch(0)).square().mean().backward()
        with pytest.raises(OverlapError, match=r"'last.weight' was used between"):
            optimizer.step()
        handle.remove()
        optimizer.step()
        optimizer.checkpoint().result()


SHARED: dict[str, Callable[[nn.Parameter], Any]] = {
    "numpy": lambda p: p.detach().numpy(),
    "detached": lambda p: p.detach(),
}


@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
def test_memory_that_was_shared_before_is_not_seen_but_is_right_after_the_step(
    share: Callable[[nn.Parameter], Any],
) -> None:
    torch.manual_seed(3)
    net = Net()
    plain = copy.deepcopy(net)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    shared = share(net.last.weight)
    with optimizer_for(net) as optimizer:
        for step in range(3):
            before = torch.as_tensor(shared).clone()
            net(batch(step)).square().mean().backward()
            assert eventually(lambda: not torch.equal(torch.as_tensor(shared), before))  # noqa: B023
            optimizer.step()
            plain(batch(step)).square().mean().backward()
            reference.step()
            reference.zero_grad()
            assert torch.equal(torch.as_tensor(shared), plain.last.weight)
        optimizer.checkpoint().result()


@pytest.mark.parametrize("when", ["waited for", "dropped", "closed"])
def test_parameters_are_ordinary_again(when: str) -> None:
    net = Net()
    optimizer = optimizer_for(net)
    net(batch(0)).square().mean().backward()
    assert is_open(optimizer)
    if when == "waited for":
        optimizer.step()
    elif when == "closed":
        optimizer.close()
    if when == "dropped":
        del optimizer
    else:
        assert all(type(p) is nn.Parameter for p in net.parameters())
        optimizer.close()
    assert all(torch.isfinite(p).all() for p in net.parameters())
    assert all(type(p) is nn.Parameter for p in net.parameters())
