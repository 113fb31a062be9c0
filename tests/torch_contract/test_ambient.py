"""Whatever mode of torch a method is called in, it does the same, and nothing fails later."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from tests.numerics.conftest import one_thread
from tests.numerics.reference import (
    Reference,
    assert_same_bits,
    assert_same_parameters,
    bits,
    read_state,
)
from tests.stores.small import STORE, make_model, make_optimizer
from tests.torch_contract.modes import MODES, default_dtype, flush_denormal

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow

Entry = Callable[[str], AbstractContextManager[Any]]
"""Given the name of a method, the modes that it is called in."""

Outcome = dict[str, Any]
"""Everything that a program has arrived at."""


class Net(torch.nn.Module):
    """Parameters of three dtypes, buffers and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(13, 60).bfloat16()
        self.norm = torch.nn.BatchNorm1d(60)
        self.second = torch.nn.Linear(60, 3).half()
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs).float()).relu()
        return self.second(hidden.half()).float() + self.frozen


def train(model: Net, step: int) -> None:
    """Compute gradients."""
    generator = torch.Generator("cpu").manual_seed(step)
    inputs = torch.randn(6, 13, generator=generator, dtype=torch.float32, device="cpu")
    (model(inputs.bfloat16()) - 1).square().mean().backward()


SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8": {"state_dtype": "int8", "master": "split"},
    "resident": {"host_memory": "1MiB"},
    "forward": {"overlap": "forward"},
    "backward": {"overlap": "backward"},
}


def frozen(value: Any) -> Any:
    """Return a copy that compares by bits."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), bits(value).numpy().tobytes()
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(item) for item in value]
    return value


def program(within: Entry, **settings: Any) -> Outcome:
    """Call every method of an optimizer once, and return all that it has made."""
    out: Outcome = {}
    backend = MemoryBackend()

    def construct(model: Net) -> offload.OffloadedOptimizer:
        params = [*model.first.parameters(), *model.norm.parameters()]
        chosen = {"ring_chunks": 2, **settings}
        with within("construct"):
            return make_optimizer(model, backend, params=params, lr=0.01, settings=chosen)

    def do(name: str, call: Callable[..., Any], *args: Any) -> Any:
        with within(name):
            return call(*args)

    def step(name: str = "step") -> None:
        optimizer.zero_grad()
        do("training", train, model, optimizer.stats().steps)
        do(name, optimizer.step)

    def checkpoint(name: str = "checkpoint") -> None:
        state = {"tensor": torch.arange(3), "rates": [0.5]}
        handle = do(name, optimizer.checkpoint, state)
        assert do("result", handle.result).step

    model = Net()
    optimizer = construct(model)
    step("first step")
    checkpoint("first checkpoint")
    step()
    step()
    checkpoint()
    reference = do("state_dict", optimizer.state_dict)
    out["reference"] = {k: reference[k] for k in ("step", "sealed", "param_groups")}
    do("load_state_dict(reference)", optimizer.load_state_dict, reference)
    step()
    full = do("full_state_dict", optimizer.full_state_dict)
    out["full"] = frozen(full)
    assert not any(t.is_inference() for t in full["master"].values())
    step()
    do("load_state_dict", optimizer.load_state_dict, full)
    step()
    with within("materialized"), optimizer.materialized():
        out["materialized"] = frozen(list(optimizer.state.values()))
    do("synchronize", optimizer.synchronize)
    head = {"params": list(model.second.parameters()), "lr": 0.1}
    do("add_param_group", optimizer.add_param_group, head)
    step()
    step()
    checkpoint()
    do("pin", optimizer.pin, "best")
    do("unpin", optimizer.unpin, "best")
    out["model"] = frozen(model.state_dict())
    step()
    assert do("stats", optimizer.stats).steps
    assert do("restore", optimizer.restore).step
    out["restored"] = frozen(model.state_dict())
    step()
    do("close", optimizer.close)

    model = Net()
    optimizer = construct(model)
    optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.1})
    restored = do("restore in a new process", optimizer.restore)
    out["train_state"] = frozen(do("train_state", lambda: restored.train_state))
    out["resumed"] = frozen(model.state_dict())
    step()
    step()
    checkpoint()
    out["final"] = frozen(model.state_dict())
    optimizer.close()
    stored = read_state(f"{STORE}/step-{restored.step + 2:08d}", backend)
    out["stored"] = {n: frozen(v) for n, v in vars(stored).items() if n in ("arrays", "scalars")}
    return out


ENTRIES = (
    "construct", "first step", "step", "first checkpoint", "checkpoint", "result", "state_dict",
    "load_state_dict(reference)", "full_state_dict", "load_state_dict", "materialized",
    "synchronize", "add_param_group", "pin", "unpin", "stats", "restore", "close",
    "restore in a new process", "train_state",
)  # fmt: skip


def only(entries: Collection[str], mode: str) -> Entry:
    """Be in a mode for these methods."""
    return lambda name: MODES[mode]() if name in entries else nullcontext()


_expected: dict[str, Outcome] = {}


def differences(name: str, entries: Collection[str], mode: str) -> list[str]:
    """Return what a program arrives at only if no method is called in the mode."""
    if name not in _expected:
        _expected[name] = program(lambda _: nullcontext(), **SETTINGS[name])
    try:
        outcome = program(only(entries, mode), **SETTINGS[name])
    except Exception as error:  # noqa: BLE001  (it is what is looked for)
        return [f"{type(error).__name__}: {error}"[:150]]
    return [k for k, v in _expected[name].items() if _kinds(outcome[k], mode) != _kinds(v, mode)]


def _kinds(value: Any, mode: str) -> Any:
    """Leave out of which precision a step count is: torch itself goes by the default dtype."""
    if mode != "float64":
        return value
    if isinstance(value, dict):
        return {k: "" if k in ("step", "scalars") else _kinds(v, mode) for k, v in value.items()}
    return [_kinds(item, mode) for item in value] if isinstance(value, list) else value


MAKING = ("inference_mode", "device_context", "function_mode")
"""Modes that change which tensors are made: what one method makes, another one uses."""
MAKERS = (
    "construct", "first step", "first checkpoint", "full_state_dict", "load_state_dict",
    "materialized", "restore", "restore in a new process", "add_param_group",
)  # fmt: skip

CASES = [
    ("exact", "set_grad_enabled"),
    ("int8", "inference_mode"),
    ("int8", "float64"),
    ("resident", "device_context"),
    ("forward", "inference_mode"),
    ("forward", "float64"),
    ("backward", "autocast"),
    ("backward", "no_grad"),
]

TRAINING_MODES = [
    mode
    for mode in MODES
    if mode not in ("inference_mode", "no_grad", "set_grad_enabled", "autocast")
]
"""Modes in which a model computes the same gradients as outside of them."""


@pytest.mark.parametrize("mode", MAKING)
def test_one_method_in_a_mode_and_the_others_outside_of_it(mode: str) -> None:
    """Those that make memory which later ones use, each in one of the modes, and in turns."""
    chosen = MAKERS[MAKING.index(mode) :: len(MAKING)]
    found = {entry: differences("exact", {entry}, mode) for entry in chosen}
    assert {entry: what for entry, what in found.items() if what} == {}


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_half_of_the_methods_in_a_mode_and_half_outside_of_it(name: str, mode: str) -> None:
    chosen = random.Random(f"{name} {mode}").sample(ENTRIES, len(ENTRIES) // 2)
    assert differences(name, chosen, mode) == []
    assert differences(name, {*ENTRIES} - {*chosen}, mode) == []


@pytest.mark.parametrize("mode", MODES)
def test_all_methods_in_a_mode(mode: str) -> None:
    assert differences("exact", ENTRIES, mode) == []


@pytest.mark.parametrize(
    ("name", "mode"),
    [(("forward", "backward")[n % 2], mode) for n, mode in enumerate(TRAINING_MODES)],
)
def test_hooks_on_the_model_in_a_mode_that_training_is_in(name: str, mode: str) -> None:
    assert differences(name, {"training", *ENTRIES}, mode) == []


@pytest.mark.parametrize("overlap", [None, "forward"])
def test_denormal_numbers_are_flushed_on_all_threads_if_they_are_on_the_callers(
    overlap: Any,
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1_300_000))

        def forward(self) -> torch.Tensor:
            return self.weight.sum()

    model, expected = Model(), Model()
    hyper = {"lr": 0.5, "eps": 1e-30}
    reference = Reference(torch.optim.AdamW, expected.parameters(), **hyper)
    settings = {"overlap": overlap, "chunk_bytes": 8 << 20}
    optimizer = make_optimizer(model, MemoryBackend(), settings=settings, **hyper)
    found = set()
    for flush in (True, True, False, True, True):
        with flush_denormal() if flush else nullcontext():
            for each in (model, expected):
                each.weight.grad = None
                (each() * 1e-20).backward()
            reference.step()
            optimizer.step()
            optimizer.synchronize()
        assert_same_bits(model.weight, expected.weight, "the weight")
        variance = reference.inner.state[reference.masters[expected.weight]]["exp_avg_sq"]
        found.add((flush, bool(variance.any())))
    assert found == {(True, False), (False, True)}
    full = optimizer.full_state_dict()
    state = reference.inner.state_dict()["state"][0]
    assert_same_bits(full["state"][0]["exp_avg_sq"], state["exp_avg_sq"], "the variance")
    optimizer.close()


def test_what_is_only_moved_keeps_its_denormal_numbers() -> None:
    model, settings = torch.nn.Linear(700, 3), {"state_dtype": "int8"}
    optimizer = make_optimizer(model, MemoryBackend(), offload.SGD, momentum=0.9, settings=settings)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-39)
    optimizer.step()
    expected = optimizer.full_state_dict()["state"][0]["momentum_buffer"]
    assert 0 < expected.abs().max() < torch.finfo(torch.float32).tiny
    checkpoint = optimizer.checkpoint().result()
    with flush_denormal():
        found = optimizer.full_state_dict()["state"][0]["momentum_buffer"]
        read = offload.read_state(checkpoint, "weight")["momentum_buffer"]
    assert_same_bits(found, expected, "the momentum")
    assert_same_bits(read, expected, "the momentum that was read")
    optimizer.close()


@pytest.mark.parametrize("changes_at", [0, 2])
def test_a_class_whose_numbers_have_the_default_dtype_computes_as_in_torch(changes_at: int) -> None:
    """NAdam keeps a product of momenta of the precision that the default dtype has."""
    model, expected = (make_model(30, 7, dtype=torch.float32) for _ in range(2))
    reference = Reference(torch.optim.NAdam, expected.parameters(), lr=0.01)
    nadam = partial(offload.OffloadedOptimizer, torch.optim.NAdam)
    optimizer = make_optimizer(model, MemoryBackend(), nadam, lr=0.01)
    with ExitStack() as stack:
        for step in range(6):
            if step == changes_at:
                stack.enter_context(default_dtype(torch.float64))
            if step == 4:
                full = optimizer.full_state_dict()
                optimizer.load_state_dict(full)
                again = optimizer.full_state_dict()["state"][0]["mu_product"]
                assert_same_bits(again, full["state"][0]["mu_product"], "mu_product")
            for each in (model, expected):
                generator = torch.Generator().manual_seed(step)
                for parameter in each.parameters():
                    parameter.grad = torch.randn(
                        parameter.shape, generator=generator, dtype=torch.float32
                    )
            reference.step()
            optimizer.step()
            assert_same_parameters(model.named_parameters(), expected.named_parameters())
    optimizer.close()
