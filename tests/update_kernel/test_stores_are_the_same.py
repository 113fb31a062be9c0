"""Stores are the same to the byte with the kernel, without it, and changing between the two.

The model has parameters of every dtype and layout, with gradients of every kind, some of them
missing or late. The tests of `tests/numerics` compare its FP32 state with torch's in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from tests.numerics.models import Mixed, give_gradients
from tests.numerics.reference import bits
from tests.update_kernel.chunk_steps import may_use_kernel
from tests.update_kernel.steps import kernel_for

NUM_STEPS = 9
ADDED_STEP = 5
"""At this step a parameter is added, in a group of its own."""

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "split": {"master": "split"},
    "bfloat16": {"state_dtype": "bfloat16", "rounding_seed": 11},
    "int8": {"state_dtype": "int8"},
    "split-bfloat16": {"state_dtype": "bfloat16", "master": "split"},
    "split-int8": {"state_dtype": "int8", "master": "split"},
}
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], list[dict[str, Any]]]] = {
    "adamw": (
        torch.optim.AdamW,
        [{}, {"foreach": True}, {"lr": "tensor"}, {"amsgrad": True, "maximize": True}],
    ),
    "adam": (
        torch.optim.Adam,
        [{"weight_decay": 0.1}, {"maximize": True, "weight_decay": 0.05}, {"betas": (0.4, 0.6)}],
    ),
    "sgd": (
        torch.optim.SGD,
        [{"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}, {"momentum": 0.5}],
    ),
}
CODES: dict[str, Callable[[int], bool]] = {
    "torch": lambda _: False,
    "kernel": lambda _: True,
    "in-turns": lambda step: step % 2 == 0,
}
"""Whether the optimizer that begins with a step may use the kernel."""


class Model(Mixed):
    """`Mixed`, with parameters that are views with the negative bit."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        generator = torch.Generator().manual_seed(seed + 7)
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(71, generator=generator).to(dtype)
            name = f"negated_{str(dtype)[6:]}"
            self.register_parameter(name, torch.nn.Parameter(torch._neg_view(values)))
        self.added = torch.nn.Parameter(torch.randn(333, generator=generator).bfloat16())


def give_more_gradients(step: int, model: torch.nn.Module) -> None:
    """Give gradients as `give_gradients` does, some of them in unusual tensors."""
    give_gradients(step, model)
    p = dict(model.named_parameters())
    if (gradient := p["matrix_full"].grad) is not None:
        p["matrix_full"].grad = torch._neg_view(gradient)
    if (gradient := p["big"].grad) is not None:
        p["big"].grad = torch._neg_view(torch.stack([gradient, gradient], 1)[:, 1])
    if (gradient := p["narrow_full"].grad) is not None and step % 2:
        p["narrow_full"].grad = torch._efficientzerotensor((89,))
    if (gradient := p["tied.weight"].grad) is not None:
        with torch.inference_mode():
            p["tied.weight"].grad = gradient + 1
    if (gradient := p["sometimes_full"].grad) is not None:
        p["sometimes_full"].grad = p["sometimes_full"].detach()
    if (gradient := p["strided_full"].grad) is not None:
        p["scalar_full"].grad = gradient[3]  # a view of another parameter's gradient


def construct(
    name: str, model: Model, backend: MemoryBackend, *, joined: bool, options: dict[str, Any]
) -> offload.OffloadedOptimizer:
    """Make an optimizer of the model.

    Args:
        name: Key of `CLASSES`.
        model: The model.
        backend: Where the store is.
        joined: Whether the parameter that is added in mid-run has been added.
        options: More of `Options`.
    """
    optimizer_class, groups = CLASSES[name]
    given: list[dict[str, Any]] = [{"params": [], **group} for group in groups]
    for number, (of, parameter) in enumerate(model.named_parameters()):
        if of != "added":
            given[number % len(given)]["params"].append(parameter)
    if joined:
        given.append({"params": [model.added]})
    for group in given:
        if group.get("lr") == "tensor":
            group["lr"] = torch.tensor(3e-3)
    return offload.OffloadedOptimizer(
        optimizer_class,
        given,
        lr=1e-2,
        model=model,
        directory="/store",
        options=offload.Options(backend=backend, allow_volatile=True, chunk_bytes=20480, **options),
    )


def trained(name: str, code: str, *, resumed: bool, **options: Any) -> dict[str, torch.Tensor]:
    """Train, and return the bits of the parameters and of all files of tensors in a checkpoint.

    Args:
        name: Key of `CLASSES`.
        code: Key of `CODES`.
        resumed: Whether each step is taken by another optimizer, as another process would.
        options: More of `Options`.
    """
    backend, model = MemoryBackend(), Model()

    def make(step: int) -> offload.OffloadedOptimizer:
        with may_use_kernel(allowed=CODES[code](step)):
            made = construct(name, model, backend, joined=step > ADDED_STEP, options=options)
        assert made.stats().update_code.startswith("kernel") == CODES[code](step)
        return made

    optimizer = make(0)
    for step in range(NUM_STEPS):
        if resumed and step:
            optimizer.checkpoint().result()
            optimizer.close()
            backend, model = backend.reopened(), Model(seed=99)
            optimizer = make(step)
            optimizer.restore()
        if step == ADDED_STEP:
            optimizer.add_param_group({"params": [model.added]})
        give_more_gradients(step, model)
        if step < ADDED_STEP:
            model.added.grad = None
        optimizer.step()
    checkpoint = optimizer.checkpoint().result()
    assert checkpoint.verify().ok
    found = {name: bits(p.detach().resolve_neg()) for name, p in model.named_parameters()}
    for file_name in backend.list_dir(checkpoint.path):
        if file_name.endswith(".safetensors") and file_name != "train_state.safetensors":
            file = backend.open(f"{checkpoint.path}/{file_name}")
            data = file.read_bytes(0, file.size_bytes)
            found[file_name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    optimizer.close()
    return found


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    assert {"model.safetensors"} < {name for name in found if name.endswith(".safetensors")}
    return [name for name, values in expected.items() if not torch.equal(found[name], values)]


RUNS = [
    ("adamw", "float32"),
    ("adamw", "split"),
    ("adamw", "bfloat16"),
    ("adamw", "split-int8"),
    ("adam", "int8"),
    ("adam", "split-bfloat16"),
    ("sgd", "float32"),
    ("sgd", "split-int8"),
]


@pytest.mark.parametrize(("name", "form"), RUNS)
def test_a_run_leaves_the_same_bytes(name: str, form: str) -> None:
    options = FORMATS[form]
    kernel_for(CLASSES[name][0], options.get("state_dtype", "float32"))
    expected = trained(name, "torch", resumed=False, **options)
    assert differences(trained(name, "kernel", resumed=False, **options), expected) == []
    assert differences(trained(name, "in-turns", resumed=True, **options), expected) == []


@pytest.mark.parametrize("form", ["float32", "bfloat16", "split-int8"])
def test_a_run_that_resumes_and_flushes_denormal_numbers(form: str) -> None:
    kernel_for(torch.optim.AdamW, FORMATS[form].get("state_dtype", "float32"))
    torch.set_flush_denormal(True)
    try:
        expected = trained("adamw", "torch", resumed=True, **FORMATS[form])
        found = trained("adamw", "in-turns", resumed=True, **FORMATS[form])
        assert differences(found, expected) == []
    finally:
        torch.set_flush_denormal(False)
