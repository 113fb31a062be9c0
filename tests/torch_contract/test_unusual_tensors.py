"""Unusual tensors in a model's state dict: each is restored exactly, or refused at construction.

None is found out by a restore only: until then checkpoints would be acknowledged that cannot be
restored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import offload
from gds import MemoryBackend
from offload.errors import MismatchError, UnsupportedParameterError
from tests.numerics.reference import assert_same_bits
from tests.stores.small import STORE, make_optimizer

Make = Callable[[], torch.Tensor]


class Plain(torch.Tensor):
    """A subclass that has memory, as other tensors have."""


class Wrapper(torch.Tensor):
    """A subclass that only stands for another tensor, as quantised weights of libraries do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=dtype)


def quantized(of: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(of, 0.1, 0, torch.qint8)


EXACT: dict[str, Make] = {
    "conjugate, transposed": lambda: numbers(3, 5, dtype=torch.complex64).conj().t(),
    "negative, strided": lambda: numbers(9, dtype=torch.complex64).conj().imag,
    "overlapping as_strided": lambda: numbers(20).as_strided((4, 4), (2, 1)),
    "expanded to nothing": lambda: numbers(1).expand(0),
    "subclass": lambda: numbers(9).as_subclass(Plain),
    "bool": lambda: numbers(9) > 0,
    "0-d": numbers,
}

REFUSED: dict[str, tuple[Make, str]] = {
    "expanded": (lambda: numbers(1).expand(8), r"shape \[8\], strides \[0\].*\bb\.clone\(\)"),
    "meta": (lambda: torch.ones(3, device="meta"), "is on meta"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "a torch.sparse_coo tensor"),
    "quantised": (lambda: quantized(numbers(3)), "of torch.qint8"),
    "nested": (
        lambda: torch.nested.nested_tensor([numbers(2), numbers(3)], layout=torch.jagged),
        "a nested tensor",
    ),
    "wrapper": (lambda: Wrapper(numbers(3)), "Wrapper without memory of its own"),
    "zeros": (lambda: torch._efficientzerotensor((3,)), "without memory of its own"),
}


def make_model(make: Make, how: str) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    if how == "buffer":
        model[0].register_buffer("b", make())
    else:
        model[0].b = torch.nn.Parameter(make(), requires_grad=False)
    return model


def offloaded(model: torch.nn.Module, backend: MemoryBackend) -> offload.OffloadedOptimizer:
    return make_optimizer(model, backend, lr=0.01)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def sealed(model: torch.nn.Module) -> MemoryBackend:
    """Take a step, make a checkpoint, and return the files."""
    backend = MemoryBackend()
    with offloaded(model, backend) as optimizer:
        step(model, optimizer)
        assert optimizer.checkpoint().result().verify().ok
    return backend


def restore(model: torch.nn.Module, backend: MemoryBackend) -> None:
    with offloaded(model, backend) as optimizer:
        optimizer.restore()
        step(model, optimizer)


def load_parameters(model: torch.nn.Module, backend: MemoryBackend) -> None:
    assert offload.load_parameters(model, STORE, backend=backend) == 1


@pytest.mark.parametrize("kind", EXACT)
def test_what_is_taken_is_restored_exactly(kind: str) -> None:
    """As a buffer, or as a frozen parameter, in turns; a parameter is no other subclass."""
    how = "frozen" if [*EXACT].index(kind) % 2 and kind != "subclass" else "buffer"
    backend = sealed(make_model(EXACT[kind], how))
    expected = EXACT[kind]().resolve_conj().resolve_neg()
    for load in (restore, load_parameters):
        model = make_model(EXACT[kind], how)
        with torch.no_grad():
            model[0].b.copy_(torch.zeros_like(expected))
        load(model, backend)
        found = model[0].b.detach().resolve_conj().resolve_neg()
        assert_same_bits(found.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor), kind)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_restored_is_refused_by_name_at_construction(kind: str) -> None:
    make, why = REFUSED[kind]
    model = make_model(make, "buffer")
    with pytest.raises(UnsupportedParameterError, match=rf"'0\.b' in .*{why}"):
        offloaded(model, MemoryBackend())
    backend = sealed(make_model(lambda: numbers(3), "buffer"))
    with pytest.raises(UnsupportedParameterError, match=rf"'0\.b' in .*{why}"):
        load_parameters(model, backend)


LAZY: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "parameter": (lambda: torch.nn.LazyLinear(8), "1.weight"),
    "buffer": (lambda: torch.nn.LazyBatchNorm1d(affine=False), "1.running_mean"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("kind", LAZY)
def test_a_lazy_module_that_was_never_called_is_refused_by_name(kind: str) -> None:
    make, name = LAZY[kind]
    says = rf"'{name}' has no shape yet.*run one forward"
    model, called = (torch.nn.Sequential(torch.nn.Linear(8, 8), make()) for _ in range(2))
    called(torch.ones(2, 8))
    for is_frozen in (False, True):
        for parameter in model[1].parameters():
            parameter.requires_grad = not is_frozen  # the method fails on a lazy one
        for params in (model, model[0]):
            with pytest.raises(UnsupportedParameterError, match=says):
                make_optimizer(model, MemoryBackend(), params=params.parameters())
    with pytest.raises(UnsupportedParameterError, match=says):
        load_parameters(model, sealed(called))
    lazy = model.pop(1)
    with offloaded(model, MemoryBackend()) as optimizer:
        model.append(lazy)
        model[0](torch.ones(2, 8)).sum().backward()
        with pytest.raises(UnsupportedParameterError, match=says):
            optimizer.step()


def test_one_that_appears_later_is_refused_before_a_checkpoint_is_acknowledged() -> None:
    model, backend = make_model(lambda: numbers(8), "buffer"), MemoryBackend()
    with offloaded(model, backend) as optimizer:
        step(model, optimizer)
        good = optimizer.checkpoint().result()
        model[0].b = numbers(1).expand(8)
        step(model, optimizer)
        with pytest.raises(UnsupportedParameterError, match=r"'0\.b' in the model's state dict"):
            optimizer.checkpoint()
        model[0].b = model[0].b.clone()
        assert optimizer.checkpoint().result().step == good.step + 1


def test_a_model_whose_state_dict_has_other_names_loads_what_it_wrote() -> None:
    """torch's checkpoint_wrapper renames in a hook of the state dict."""

    def make() -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                checkpoint_wrapper(torch.nn.Linear(8, 8)), torch.nn.BatchNorm1d(8)
            )
        model[1].requires_grad_(False)
        return model

    model = make()
    backend = sealed(model)
    # The same layers without the wrapper have the names of the state dict.
    for loaded in (make(), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))):
        load_parameters(loaded, backend)
        for name, tensor in model.state_dict().items():
            assert_same_bits(loaded.state_dict()[name], tensor, name)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_model_that_does_not_tie_what_the_checkpoint_ties_is_refused(order: str) -> None:
    """Whichever of the two names the checkpoint has for both."""

    def make(names: str) -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in names})

    tied, backend = make(order), MemoryBackend()
    tied["b"].weight = tied["a"].weight
    with offloaded(tied, backend) as optimizer:
        tied["b"](tied["a"](torch.ones(2, 8))).sum().backward()
        optimizer.step()
        optimizer.checkpoint().result()
    untied = make("ab")
    before = {name: tensor.clone() for name, tensor in untied.state_dict().items()}
    with pytest.raises(MismatchError, match=rf"'{order[1]}\.weight' is only in the model"):
        offload.load_parameters(untied, STORE, backend=backend)
    for name, tensor in untied.state_dict().items():
        assert_same_bits(tensor, before[name], name)
