"""Parameters that share memory would lose one of two updates: they are refused, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.errors import UnsupportedParameterError
from offload.model.model_file import ModelImage
from tests.eventually import eventually
from tests.numerics.reference import assert_same_parameters
from tests.stores.small import make_optimizer, step


def construct(
    params: Any, model: torch.nn.Module | None = None, overlap: Any = None
) -> offload.OffloadedOptimizer:
    return make_optimizer(
        model or torch.nn.Module(), MemoryBackend(), offload.SGD, params=params, lr=0.1,
        model=model, settings={"overlap": overlap},
    )  # fmt: skip


def two() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(2)))


def alias(model: torch.nn.Sequential) -> None:
    model[1].weight.data = model[0].weight.data


def test_two_parameters_over_one_storage_are_refused_at_construction():
    model = two()
    alias(model)
    with pytest.raises(UnsupportedParameterError) as caught:
        construct(model.parameters(), model)
    for part in ("'0.weight' and '1.weight' share memory", "same Parameter object", ".data.clone"):
        assert part in str(caught.value)
    with pytest.raises(UnsupportedParameterError, match=r"group0\.param0.*group1\.param0"):
        construct([{"params": [model[0].weight]}, {"params": [model[1].weight]}])
    model[1].weight = model[0].weight  # the same object is tied, and fine
    optimizer = construct(model.parameters(), model)
    step(optimizer)
    optimizer.close()


@pytest.mark.parametrize(("steps", "overlap"), [(0, "backward"), (3, None), (3, "forward")])
def test_when_it_appears_later_the_next_step_is_refused_and_changes_nothing(steps, overlap):
    model = two()
    optimizer = construct(model.parameters(), model, overlap=overlap)
    for _ in range(steps):
        model(torch.ones(2, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    own = model[1].weight.data
    alias(model)
    before = [p.detach().clone() for p in model.parameters()]

    def step_once():
        model(torch.ones(2, 16)).square().sum().backward()
        optimizer.step()

    with pytest.raises(UnsupportedParameterError, match=r"'0\.weight' and '1\.weight' share"):
        step_once()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    model[1].weight.data = own
    for parameter in model.parameters():
        parameter.grad = None
    step_once()
    optimizer.synchronize()
    assert not torch.equal(model[0].weight, before[0])
    optimizer.close()


def test_in_add_param_group_and_in_a_checkpoint_before_the_first_step():
    model = two()
    optimizer = construct([model[0].weight], model)
    own = model[1].weight.data
    for _ in range(2):
        alias(model)
        with pytest.raises(UnsupportedParameterError, match=r"'0\.weight' and '1\.weight' share"):
            optimizer.add_param_group({"params": [model[1].weight]})
        assert len(optimizer.param_groups) == 1
        step(optimizer)
    model[1].weight.data = own
    optimizer.close()
    optimizer = construct(model.parameters(), model)
    alias(model)
    with pytest.raises(UnsupportedParameterError, match="share memory"):
        optimizer.checkpoint()


def test_a_frozen_alias_is_fine_until_it_is_trained():
    model = two()
    alias(model)
    model[1].requires_grad_(False)
    optimizer = construct(model.parameters(), model)
    model[0].weight.grad = torch.ones(16, 16)
    optimizer.step()
    model[1].weight.grad = torch.ones(16, 16)  # which torch would step
    with pytest.raises(UnsupportedParameterError, match="share memory"):
        optimizer.step()
    model[1].weight.grad = None
    optimizer.step()
    model[1].requires_grad_(True)
    with pytest.raises(UnsupportedParameterError, match="share memory"):
        optimizer.step()


@pytest.mark.parametrize(("overlap", "how"), [(None, "frozen"), ("forward", "detached")])
def test_a_checkpoint_holds_one_moment_of_a_parameter_and_its_alias(overlap, how, monkeypatch):
    """The next step may change the parameter while the seal has not come to the alias yet."""
    width = 2048  # so that the parameter is one block of the model file, and its alias the next
    gather = ModelImage.gather

    def late(image, start, stop, out, **settings):
        if start:
            assert eventually(lambda: memory[-1, -1].item() < 0.35), "no step has changed it"
        gather(image, start, stop, out, **settings)

    def make(shared):
        model = torch.nn.Sequential(torch.nn.Linear(width, width, bias=False))
        with torch.no_grad():
            model[0].weight.fill_(0.5)
        alias = shared(model[0].weight)
        if how == "buffer":
            model[0].register_buffer("alias", alias)
        else:
            model[0].alias = torch.nn.Parameter(alias, requires_grad=False)
        return model

    model = make(lambda weight: weight.detach() if how == "detached" else weight.data)
    memory = model[0].weight.data
    monkeypatch.setattr(ModelImage, "gather", late)
    backend = MemoryBackend()
    options = offload.Options(backend=backend, allow_volatile=True, overlap=overlap)
    given = [model[0].weight]
    with offload.SGD(given, lr=0.1, directory="/run", model=model, options=options) as optimizer:
        for number in range(2):
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                handle = optimizer.checkpoint()
        handle.result()
    monkeypatch.undo()
    restored = make(torch.clone)
    assert offload.load_parameters(restored, "/run", backend=backend) == 1
    assert torch.equal(restored[0].weight, torch.full((width, width), 0.4))
    assert torch.equal(restored[0].alias, restored[0].weight)


def base(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


APART: dict[str, Callable[[], list[torch.Tensor]]] = {
    "columns": lambda: base(12, 31).split([10, 21], 1),
    "transposed": lambda: (lambda w: [w[4:].t(), w[:4]])(base(9, 7)),
    "checkerboard": lambda: (lambda w: [w[::2, ::2], w[1::2, 1::2], w[::2, 1::2]])(base(9, 9)),
    "two-dtypes": lambda: (lambda w: [w[:, :2], w.view(torch.bfloat16)[:, 4:8], w[:, 4:]])(
        base(5, 6)
    ),
    "odd-strides": lambda: [base(30).as_strided((3, 3), (7, 2))],
}
OVERLAPPING: dict[str, Callable[[], tuple[list[torch.Tensor], tuple[int, int]]]] = {
    "the-same": lambda: (lambda w: ([w, w.view(-1)], (0, 1)))(base(4, 5)),
    "one-element": lambda: (lambda w: ([w[:6], w[5:]], (0, 1)))(base(10)),
    "columns": lambda: (lambda w: ([w[:, :11], w[:, 10:]], (0, 1)))(base(12, 31)),
    "halves-of-elements": lambda: (lambda w: ([w[:8], w.view(torch.bfloat16)[15:17]], (0, 1)))(
        base(16)
    ),
    "expanded": lambda: ([base(3, 1).expand(3, 4)], (0, 0)),
    "windows": lambda: ([base(10).unfold(0, 3, 1)], (0, 0)),
    "odd-strides": lambda: ([base(30).as_strided((3, 3), (4, 2))], (0, 0)),
}


def parameters(tensors: list[torch.Tensor]) -> list[torch.nn.Parameter]:
    found = [torch.nn.Parameter(t) for t in tensors]
    assert all(p.data_ptr() == t.data_ptr() for p, t in zip(found, tensors, strict=True))
    return found


@pytest.mark.parametrize("make", APART.values(), ids=APART)
def test_views_of_one_storage_whose_elements_are_apart_are_trained_as_by_torch(make):
    ours, theirs = (parameters(make()) for _ in range(2))
    optimizer = construct(ours)
    reference = torch.optim.SGD([p for p in theirs if p.dtype == torch.float32], lr=0.1)
    for number in range(3):
        for p, q in zip(ours, theirs, strict=True):
            if p.dtype == torch.float32:
                p.grad = torch.full_like(p, 0.25 * (number + 1))
                q.grad = torch.full_like(q, 0.25 * (number + 1))
        optimizer.step()
        reference.step()
        assert_same_parameters(enumerate(ours), enumerate(theirs))
    optimizer.close()


@pytest.mark.parametrize("make", OVERLAPPING.values(), ids=OVERLAPPING)
def test_views_that_have_an_element_in_common_are_refused_by_name(make):
    tensors, (first, second) = make()
    names = [f"weight{number}" for number in range(len(tensors))]
    given = list(zip(names, parameters(tensors), strict=True))
    with pytest.raises(UnsupportedParameterError) as caught:
        construct(given)
    for name in {names[first], names[second]}:
        assert repr(name) in str(caught.value)
    if first == second:
        assert "the same place in memory" in str(caught.value)
        assert "clone" in str(caught.value)


def test_a_view_that_keeps_its_address_and_changes_its_strides_is_noticed():
    memory = torch.zeros(40)
    first, second = parameters([memory[:10], memory[10:20]])
    optimizer = construct([("first", first), ("second", second)])
    for parameter in (first, second):
        parameter.grad = torch.ones(10)
    optimizer.step()
    first.data = memory[:20:2]
    with pytest.raises(UnsupportedParameterError, match="'first' and 'second' share memory"):
        optimizer.step()
