"""`load_parameters`: names of tied tensors, shards in given directories, and unreadable models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import offload
from gds import MemoryBackend, PosixBackend
from offload.errors import MismatchError, UnreadableError
from tests.crash.fault_backend import FaultBackend
from tests.ranks_store.job import SHAPES
from tests.ranks_store.test_owner_readers import made
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

    def test_a_model_that_cannot_be_read_is_no_damage(self) -> None:
        inner = MemoryBackend()
        sealed_model(layers("a"), inner)
        backend = FaultBackend(inner)
        backend.fail_if(lambda kind, path: kind == "read" and path.endswith("/model.safetensors"))
        with pytest.raises(UnreadableError, match=r"If it stays unreadable, move /run/step-0000"):
            offload.load_parameters(layers("a"), "/run", backend=backend)
        assert backend.num_failed == 1


class TestLoadingFromSeveralOwners:
    def model(self) -> torch.nn.Module:
        found = torch.nn.Module()
        for name, shape in SHAPES.items():
            empty = torch.zeros(shape, dtype=torch.bfloat16)
            found.register_parameter(name, torch.nn.Parameter(empty))
        return found

    def test_a_model_that_cannot_be_read_is_no_damage(self, tmp_path: Path) -> None:
        store = made(tmp_path / "run", tmp_path / "run")
        backend = FaultBackend(PosixBackend())
        backend.fail_if(lambda kind, path: kind == "read" and path.endswith("/model.safetensors"))
        with pytest.raises(UnreadableError, match=r"If it stays unreadable, move .*/step-0000"):
            offload.load_parameters(self.model(), store, backend=backend)
        assert backend.num_failed == 1
        backend.close()

    def test_shards_are_found_in_the_directories_that_are_given(self, tmp_path: Path) -> None:
        store = made(tmp_path / "run", tmp_path / "elsewhere", sharded=True)
        (tmp_path / "elsewhere").rename(tmp_path / "moved")
        model = self.model()
        assert offload.load_parameters(model, store, parts=[tmp_path / "moved"]) == 2
        assert all(parameter.any() for parameter in model.parameters())
