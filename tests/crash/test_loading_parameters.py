"""`load_parameters`: names of tied tensors, shards in given directories, and unreadable models."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import offload
from gds import MemoryBackend
from offload.errors import MismatchError
from tests.stores import small


def sealed_model(model: torch.nn.Module, backend: MemoryBackend) -> None:
    """Make a checkpoint of a model after one step."""
    with offload.SGD(
        model.parameters(), lr=0.1, directory="/run", model=model, options=small.options(backend)
    ) as optimizer:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.checkpoint().result()


def layers(*names: str, tied: bool = False, wrapped: bool = False) -> torch.nn.ModuleDict:
    """Return square layers without a bias; all of them have the weight of the first if `tied`."""
    found = {name: torch.nn.Linear(4, 4, bias=False) for name in names}
    for layer in found.values():
        if tied:
            layer.weight = found[names[0]].weight
    return torch.nn.ModuleDict(
        {name: checkpoint_wrapper(layer) if wrapped else layer for name, layer in found.items()}
    )


class TestLoading:
    def test_a_tied_tensor_is_found_under_another_of_its_names(self) -> None:
        model, backend = layers("b"), MemoryBackend()
        sealed_model(model, backend)
        loaded = layers("a", "b", tied=True)
        assert offload.load_parameters(loaded, "/run", backend=backend) == 1
        assert torch.equal(next(loaded.parameters()), next(model.parameters()))

    def test_two_tensors_are_not_both_loaded_from_one_by_its_other_names(self) -> None:
        """The checkpoint has names of parameters that no state dict has, and these as aliases."""
        model, backend = layers("a", "b", tied=True, wrapped=True), MemoryBackend()
        sealed_model(model, backend)
        tied = layers("a", "b", tied=True)
        assert offload.load_parameters(tied, "/run", backend=backend) == 1
        assert torch.equal(next(tied.parameters()), next(model.parameters()))
        with pytest.raises(MismatchError, match=r"'b\.weight' is only in the model"):
            offload.load_parameters(layers("a", "b"), "/run", backend=backend)
