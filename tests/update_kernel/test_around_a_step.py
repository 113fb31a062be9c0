"""What surrounds a step by the kernel: autograd, unusual tensors and hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import offload
from gds import MemoryBackend
from tests.numerics.reference import assert_same_bits
from tests.update_kernel.chunk_steps import may_use_kernel
from tests.update_kernel.steps import kernel_for

NUM_STEPS = 4

Tensors = list[torch.Tensor]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def offloaded(
    parameters: Any,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    model: torch.nn.Module | None = None,
    hyper: dict[str, Any] | None = None,
    **options: Any,
) -> offload.OffloadedOptimizer:
    return offload.OffloadedOptimizer(
        optimizer_class,
        parameters,
        directory="/store",
        model=model,
        options=offload.Options(
            backend=MemoryBackend(), allow_volatile=True, chunk_bytes=4096, **options
        ),
        **{"lr": 0.1, **(hyper or {})},
    )


def by_both(run: Callable[[], Tensors], optimizer_class: type = torch.optim.AdamW) -> None:
    """Run something with torch's code and with the kernel, and compare the bits of its results."""
    kernel_for(optimizer_class, "float32")
    found = []
    for allowed in (False, True):
        with may_use_kernel(allowed=allowed):
            found.append(run())
    for number, (expected, tensor) in enumerate(zip(*found, strict=True)):
        assert_same_bits(tensor.resolve_neg(), expected.resolve_neg(), f"tensor {number}")


FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "float16": lambda: numbers(9, 5, dtype=torch.float16),
    "transposed-bfloat16": lambda: numbers(9, 5, dtype=torch.bfloat16).t(),
    "channels-last": lambda: numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "negated": lambda: torch._neg_view(numbers(45)),
    "of-several-chunks": lambda: numbers(5000),
}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_a_graph_that_saved_a_parameter_before_the_step_raises(
    make: Callable[[], torch.Tensor],
) -> None:
    kernel_for(torch.optim.AdamW, "float32")
    parameter, other = torch.nn.Parameter(make()), torch.nn.Parameter(numbers(50))
    optimizer = offloaded([parameter, other])
    assert optimizer.stats().update_code.startswith("kernel")
    for step in range(2):  # the second step is the kernel's
        parameter.grad = gradient = torch.ones_like(parameter).requires_grad_()
        other.grad = numbers(50, seed=9) if step == 0 else None
        versions = other._version, gradient._version
        graphs = [tensor.square().sum() for tensor in (parameter, other, gradient)]
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graphs[0].backward()
        if step:  # what the step leaves alone stays good
            assert (other._version, gradient._version) == versions
            graphs[1].backward()
            graphs[2].backward()


class Wrapper(torch.Tensor):
    """A subclass that only stands for another tensor, which operations then see."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        out = func(*tree_map(inner, args), **tree_map(inner, kwargs or {}))
        is_view = func.__name__ in ("detach.default", "view.default", "slice.Tensor")
        return Wrapper(out) if is_view else out


GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros-without-memory": lambda g: torch._efficientzerotensor(tuple(g.shape)),
    "stand-in": Wrapper,
    "negated": torch._neg_view,
    "conjugate": lambda g: torch.complex(g, g).conj().imag,
    "expanded": lambda g: g[:1].expand(g.shape),
    "every-second": lambda g: torch.stack([g, g], 1)[:, 1],
    "lazily-cloned": torch._lazy_clone,
    "at-an-odd-address": lambda g: torch.frombuffer(
        bytearray(b"x" + g.numpy().tobytes()), dtype=torch.float32, offset=1
    ),
}


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient, one beside the other in memory of their own."""
    gradient = gradient.inner if isinstance(gradient, Wrapper) else gradient
    return torch.empty(gradient.shape).copy_(gradient)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("make", GRADIENTS.values(), ids=GRADIENTS)
def test_unusual_gradients(make: Callable[[torch.Tensor], torch.Tensor], state_dtype: str) -> None:
    """They are read by their values, also by torch's fused code, which reads memory as it lies."""

    def run(form: Callable[[torch.Tensor], torch.Tensor] = lambda gradient: gradient) -> Tensors:
        values = [numbers(num, seed=num) for num in (40, 3000, 7)]
        parameters = [torch.nn.Parameter(v) for v in (*values, torch._neg_view(numbers(64)))]
        optimizer = offloaded(parameters, state_dtype=state_dtype)
        for step in range(NUM_STEPS):
            for number, parameter in enumerate(parameters):
                gradient = numbers(len(parameter), seed=100 * step + number)
                parameter.grad = form(make(gradient)) if number != 2 else gradient
            optimizer.step()
        return [p.detach() for p in parameters]

    by_both(run)
    with may_use_kernel(allowed=False):
        for found, expected in zip(run(), run(plain), strict=True):
            assert_same_bits(found.resolve_neg(), expected.resolve_neg(), "parameter")


ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the-parameter-itself": lambda p: p.detach(),
    "its-elements-shifted": lambda p: torch.as_strided(p.detach(), p.shape, (1,), 1),
    "its-elements-negated": lambda p: torch._neg_view(p.detach()),
    "its-elements-reversed-in-pairs": lambda p: p.detach().view(-1, 2).t().reshape(-1),
    "one-of-its-elements": lambda p: p.detach()[5].expand(p.shape),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_a_gradient_in_the_memory_of_its_parameter(
    alias: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    def run() -> Tensors:
        memory = numbers(101, dtype=dtype)
        parameter = torch.nn.Parameter(memory[:100])
        optimizer = offloaded([parameter], hyper={"weight_decay": 0.5})
        for _ in range(NUM_STEPS):
            parameter.grad = alias(parameter)
            optimizer.step()
        return [parameter.detach()]

    by_both(run)


def test_parameters_that_share_one_gradient() -> None:
    def run() -> Tensors:
        parameters = [torch.nn.Parameter(numbers(n, seed=n)) for n in (64, 64, 31)]
        optimizer = offloaded(parameters)
        for step in range(NUM_STEPS):
            shared = numbers(64, seed=step)
            for parameter in parameters:
                parameter.grad = shared[: len(parameter)]
            optimizer.step()
            assert torch.equal(shared, numbers(64, seed=step))
        return [p.detach() for p in parameters]

    by_both(run)


@pytest.mark.parametrize(
    ("optimizer_class", "name"),
    [
        *((torch.optim.AdamW, name) for name in ("lr", "eps", "weight_decay")),
        *((torch.optim.SGD, name) for name in ("lr", "weight_decay")),
    ],
)
def test_hyperparameters_that_fp32_cannot_hold(
    optimizer_class: type[torch.optim.Optimizer], name: str
) -> None:
    """The result is that of torch's code, or its error."""

    def outcome(value: float) -> torch.Tensor | str:
        parameter = torch.nn.Parameter(numbers(50))
        optimizer = offloaded([parameter], optimizer_class)
        for step in range(NUM_STEPS):
            if step == 2:
                optimizer.param_groups[0][name] = value
            parameter.grad = numbers(50, seed=step)
            try:
                optimizer.step()
            except (RuntimeError, offload.OffloadError) as error:
                # torch's own code has begun to change the parameter, or has not
                return str(error).splitlines()[0]
        return torch.nan_to_num(parameter.detach())

    kernel_for(optimizer_class, "float32")
    for value in (0.0, 1e-46, 1e-300, 3e38, 1e39, float("inf")):
        with may_use_kernel(allowed=False):
            expected = outcome(value)
        found = outcome(value)
        assert type(found) is type(expected), value
        if isinstance(found, str):
            assert found == expected
        else:
            assert_same_bits(found, expected, str(value))
