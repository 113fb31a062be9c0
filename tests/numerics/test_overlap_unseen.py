"""Readers that a step beside the forward cannot see: they get old values, unless synchronized.

So that the list of them in ``docs/evidence.md`` is true. Compiled code and C++ extensions are on
it as well; see ``test_overlap_compiled.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.numerics.reference import assert_same_bits
from tests.numerics.twins import LAST, Layers, last

X = torch.randn(3, 32, generator=torch.Generator().manual_seed(7))

SHARED: dict[str, Callable[[Layers], torch.Tensor]] = {
    "NumPy": lambda model: torch.from_numpy(last(model).detach().numpy()),
    "DLPack": lambda model: torch.from_dlpack(last(model).detach()),
    "detach": lambda model: last(model).detach(),
    "a view": lambda model: last(model)[0],
    "a state dict": lambda model: model.state_dict()[f"layers.{LAST}.weight"],
}
"""What shares memory with a parameter since before the step."""


@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
def test_memory_that_was_shared_before_is_not_seen_but_synchronize_helps(run, share):
    shared, expected = share(run.live), share(run.expected)
    stale = shared.detach().clone()
    run.step_held(2, LAST)
    assert_same_bits(shared.detach(), stale, "it waits: the guarantees need not speak of it")
    assert LAST not in run.backend.ended
    run.backend.release()
    run.optimizer.synchronize()
    assert_same_bits(shared.detach(), expected.detach(), "after synchronize()")
    assert not torch.equal(shared, stale)


def jagged_times(p: torch.Tensor) -> torch.Tensor:
    """Nested tensors handle every function themselves."""
    nested = torch.nested.nested_tensor([X[:1], X[1:]], layout=torch.jagged)
    return torch.cat(list((nested @ p).unbind()))


def without_torch_functions(p: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return X @ p


def assigned(assign: Callable[[torch.Tensor, torch.Tensor], object]) -> Any:
    def given_to_another(p: torch.Tensor) -> torch.Tensor:
        other = torch.zeros(32, 32)
        with torch.no_grad():
            assign(other, p)
            return other.clone()

    return given_to_another


def square(w: torch.Tensor) -> torch.Tensor:
    return w.square().sum()


def doubled(p: torch.Tensor) -> torch.Tensor:
    return p * 2


INDICES = torch.arange(32)
UNANNOUNCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to_dlpack": lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p.requires_grad_(False))),
    "torch.tensor": lambda p: torch.tensor(p),
    "torch.as_tensor": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "new_tensor": lambda p: torch.ones(1).new_tensor(p),
    "asarray": lambda p: torch.asarray(p, dtype=torch.float64, requires_grad=False),
    "constructor": lambda p: torch.Tensor(p).clone(),
    "constructor of a type": lambda p: torch.FloatTensor(p).clone(),
    "new": lambda p: torch.ones(1).new(p).clone(),
    "q.data = p": assigned(lambda q, p: setattr(q, "data", p)),
    "q.set_(p)": assigned(lambda q, p: q.set_(p)),
    "q.real = p": assigned(lambda q, p: setattr(q, "real", p)),
    "Tensor.set_": lambda p: torch.Tensor.set_(torch.empty(0), p).clone(),
    "sparse_coo_tensor": lambda p: torch.sparse_coo_tensor(INDICES[None], p, (32, 32)).to_dense(),
    "sparse_csr_tensor": lambda p: (
        torch.sparse_csr_tensor(torch.arange(33), INDICES, p).values().clone()
    ),
    "torch.func.grad": lambda p: torch.func.grad(square)(p),
    "torch.func.grad_and_value": lambda p: torch.func.grad_and_value(square)(p)[1],
    "torch.func.vjp": lambda p: torch.func.vjp(torch.sin, p)[0],
    "torch.func.functionalize": lambda p: torch.func.functionalize(torch.clone)(p),
    "nested_tensor": lambda p: torch.nested.nested_tensor([p]).to_padded_tensor(0.0),
    "jagged operand": jagged_times,
    "no torch functions": without_torch_functions,
    "scripted function": lambda p: torch.jit.script(doubled)(p),
}
"""Functions that read a parameter without a word."""


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
@pytest.mark.parametrize("read", UNANNOUNCED.values(), ids=UNANNOUNCED)
def test_functions_that_ask_nobody_are_not_seen_but_synchronize_helps(run, read):
    run.optimizer.synchronize()
    stale = read(last(run.live)).detach().clone()
    last(run.live).requires_grad_()
    run.step_held(2, LAST)
    found = read(last(run.live)).detach()
    assert_same_bits(found, stale, "it waits: the guarantees need not speak of it")
    assert LAST not in run.backend.ended
    run.backend.release()
    run.optimizer.synchronize()
    found, expected = read(last(run.live)), read(last(run.expected))
    assert_same_bits(found.detach(), expected.detach(), "after synchronize()")
    assert not torch.equal(found, stale)
