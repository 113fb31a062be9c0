"""``param_groups`` that a user or a library changes in the middle of a run, beside plain torch."""

from __future__ import annotations

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.errors import MismatchError

STORE = "/run"


def pair() -> tuple[torch.nn.Module, offload.AdamW, torch.nn.Module, torch.optim.AdamW]:
    """An offloaded FP32 model of two groups, and its twin with plain torch."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)))
    ours, theirs = models
    options = offload.Options(
        backend=MemoryBackend(), allow_volatile=True, chunk_bytes=4096, train_state_bytes=8192
    )
    optimizer = offload.AdamW(groups(ours), directory=STORE, model=ours, options=options)
    return ours, optimizer, theirs, torch.optim.AdamW(groups(theirs))


def groups(model: torch.nn.Module) -> list[dict[str, object]]:
    return [
        {"params": list(model[0].parameters()), "lr": 1e-2},
        {"params": list(model[1].parameters()), "lr": 1e-4},
    ]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def test_a_parameter_taken_out_of_its_group_is_not_stepped() -> None:
    ours, optimizer, theirs, reference = pair()
    for number in range(4):
        if number == 2:
            optimizer.param_groups[0]["params"].pop(0)
            reference.param_groups[0]["params"].pop(0)
        step(ours, optimizer, number)
        step(theirs, reference, number)
    for ours_p, theirs_p in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours_p, theirs_p)
    optimizer.close()


def test_a_parameter_moved_to_another_group_is_refused() -> None:
    ours, optimizer, _, _ = pair()
    step(ours, optimizer, 0)
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(0))
    before = ours[0].weight.detach().clone()
    with pytest.raises(MismatchError, match=r"'0\.weight' was .*group=0.* and is .*group=1"):
        step(ours, optimizer, 1)
    assert torch.equal(ours[0].weight, before)
    optimizer.close()


def test_a_removed_group_is_refused() -> None:
    ours, optimizer, _, _ = pair()
    step(ours, optimizer, 0)
    del optimizer.param_groups[1]
    with pytest.raises(MismatchError, match="a group cannot be removed"):
        step(ours, optimizer, 1)
    optimizer.close()


def test_a_parameter_replaced_by_another_object_is_refused() -> None:
    ours, optimizer, _, _ = pair()
    step(ours, optimizer, 0)
    replacement = torch.nn.Parameter(ours[0].weight.detach().clone())
    ours[0].weight = replacement
    optimizer.param_groups[0]["params"][0] = replacement
    with pytest.raises(MismatchError, match=r"'0\.weight' is another object"):
        step(ours, optimizer, 1)
    optimizer.close()
