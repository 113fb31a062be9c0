"""The configurations that torch's own optimizer tests run through, beside plain torch.

``torch.testing._internal.common_optimizers`` lists them for every optimizer class. All are run:
those that are refused by name, those that torch refuses itself, and the rest to the bit. A
configuration that a later torch adds is run as well; a class fails a test until it is listed here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.errors import MismatchError, UnsupportedOptimizerError
from tests.numerics.reference import Reference, assert_same_bits, assert_same_state, read_state
from tests.stores.small import make_optimizer

CLASSES = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
)  # fmt: skip

REFUSED = {
    "Adafactor": "rows and columns",
    "LBFGS": "inner products",
    "Muon": "matri",
    "SparseAdam": "sparse",
}
"""Classes that need more than one element at a time; a word of what their refusal says of it."""

REFUSED_FLAGS = {
    "capturable": "cannot be captured in a CUDA graph",
    "differentiable": "autograd cannot follow a step whose state is on disk",
    "fused": "fused CPU kernels round differently depending on where a tensor is cut",
}

NUM_STEPS = 3


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    # Imported here, as it takes seconds, and as its own imports warn.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_optimizers import optim_db
    return {info.name: info for info in optim_db}


def make_parameters(*dtypes: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for dtype in dtypes
        for shape in [(17, 9), (1100,), (), (3, 1, 5)]
    ]


def offloaded(
    cls: type[torch.optim.Optimizer], params: Any, **hyper: Any
) -> tuple[offload.OffloadedOptimizer, MemoryBackend]:
    backend, made = MemoryBackend(), partial(offload.OffloadedOptimizer, cls)
    nothing = torch.nn.Module()
    return make_optimizer(nothing, backend, made, params=params, model=None, **hyper), backend


def configurations(info: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what torch says of a configuration, and its arguments.

    The ``foreach`` flag, which its tests add to each, is added to one here: all of them are in
    `tests/numerics/test_bit_identity.py`.
    """
    given = info.optim_inputs_func(device="cpu", dtype=torch.float32)
    for one in given:
        yield one.desc, one.kwargs
    if "foreach" in info.supported_impls:
        yield f"{given[-1].desc} foreach", {**given[-1].kwargs, "foreach": True}


def test_every_class_of_torch_is_here(cases: dict[str, Any]) -> None:
    classes = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    assert classes - {"Optimizer"} == set(cases) == {*CLASSES, *REFUSED}


@pytest.mark.parametrize("name", CLASSES)
def test_every_configuration_gives_the_bits_of_torch(name: str, cases: dict[str, Any]) -> None:
    info = cases[name]
    num_run = 0
    for description, hyper in configurations(info):
        live = make_parameters(torch.bfloat16, torch.float32)
        expected = make_parameters(torch.bfloat16, torch.float32)
        optimizer, backend = offloaded(info.optim_cls, live, **hyper)
        reference = Reference(info.optim_cls, expected, **hyper)
        with optimizer:
            for step in range(NUM_STEPS):
                generator = torch.Generator().manual_seed(step)
                for ours, theirs in zip(live, expected, strict=True):
                    ours.grad = torch.randn(ours.shape, generator=generator).to(ours.dtype)
                    theirs.grad = ours.grad.clone()
                optimizer.step()
                reference.step()
            for number, (ours, theirs) in enumerate(zip(live, expected, strict=True)):
                assert_same_bits(ours, theirs, f"{description}: parameter {number}")
            stored = read_state(optimizer.checkpoint().result().path, backend)
        names = {f"group0.param{number}": p for number, p in enumerate(expected)}
        assert_same_state(stored, reference, names)
        num_run += 1
    assert num_run >= 5


@pytest.mark.parametrize("name", REFUSED)
def test_no_configuration_of_a_class_that_is_refused_is_taken(
    name: str, cases: dict[str, Any]
) -> None:
    message = rf"{name} cannot be offloaded: .*{REFUSED[name]}.*Use an element-wise optimizer"
    for _, hyper in configurations(cases[name]):
        with pytest.raises(UnsupportedOptimizerError, match=message):
            offloaded(cases[name].optim_cls, make_parameters(torch.float32), **hyper)


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
def test_a_flag_that_cannot_be_honoured(flag: str, cases: dict[str, Any]) -> None:
    num_refused = 0
    for name in CLASSES:
        info = cases[name]
        known = info.has_capturable_arg if flag == "capturable" else flag in info.supported_impls
        error = UnsupportedOptimizerError if known else TypeError  # torch's: no such argument
        with pytest.raises(error, match=REFUSED_FLAGS[flag] if known else flag):
            offloaded(info.optim_cls, make_parameters(torch.float32), **{flag: True})
        num_refused += known
    assert num_refused >= 3


@pytest.mark.parametrize("name", CLASSES)
def test_what_torch_refuses_is_refused_in_torchs_words(name: str, cases: dict[str, Any]) -> None:
    info = cases[name]
    errors = info.optim_error_inputs_func("cpu", torch.float32)
    assert len(errors) >= 6
    for error in errors:
        given = error.optimizer_error_input
        params = make_parameters(torch.float32) if given.params is None else given.params
        assert error.error_on.name == "CONSTRUCTION_ERROR"
        if issubclass(
            error.error_type, Warning
        ):  # torch steps a parameter twice that is given twice
            with (
                pytest.warns(error.error_type, match=error.error_regex),
                pytest.raises(MismatchError, match="is given twice"),
            ):
                offloaded(info.optim_cls, params, **given.kwargs)
        else:
            with pytest.raises(error.error_type, match=error.error_regex):
                offloaded(info.optim_cls, params, **given.kwargs)
