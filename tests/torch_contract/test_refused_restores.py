"""Restores that are refused: undecided, of a checkpoint that is not there, of another model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gds import MemoryBackend
from offload import SGD, Adam, list_checkpoints, load_parameters
from offload.errors import CheckpointError, CheckpointNotFoundError, MismatchError, NotRestoredError
from tests.stores.files import flip
from tests.stores.small import STORE, make_model, make_optimizer, memory_store, step
from tests.threads import one_thread
from tests.torch_contract.refusing import bits, nothing_changes

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


class TestResuming:
    @pytest.mark.parametrize("call", ["step", "checkpoint", "synchronize"])
    def test_using_a_store_before_deciding_about_it(self, call: str) -> None:
        backend = memory_store(2)
        model = make_model()
        optimizer = make_optimizer(model, backend)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(NotRestoredError, match="already has checkpoints") as error,
        ):
            getattr(optimizer, call)()
        assert "step-00000001, step-00000002" in str(error.value)
        assert "call restore() to continue" in str(error.value)
        assert "fresh=True to the optimizer to start over" in str(error.value)
        assert optimizer.restore() is not None
        getattr(optimizer, call)()
        optimizer.close()

    def test_an_older_checkpoint_without_saying_so(self) -> None:
        backend = memory_store(3)
        model = make_model()
        optimizer = make_optimizer(model, backend, keep=3)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(MismatchError, match="step-00000001 is not the newest") as error,
        ):
            optimizer.restore(1)
        assert "pass discard_newer=True" in str(error.value)
        assert "open_checkpoint or load_parameters" in str(error.value)
        found = optimizer.restore(1, discard_newer=True)
        assert found is not None
        assert found.step == 1
        assert [c.step for c in list_checkpoints(STORE, backend=backend)] == [1]
        optimizer.close()

    @pytest.mark.parametrize("which", [7, "step-00000007", "/elsewhere/step-00000001"])
    def test_a_checkpoint_that_is_not_there(self, which: int | str) -> None:
        backend = memory_store(2)
        model = make_model()
        optimizer = make_optimizer(model, backend)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(CheckpointNotFoundError, match="no usable checkpoint") as error,
        ):
            optimizer.restore(which)
        assert "it has: step-00000001, step-00000002" in str(error.value)
        optimizer.close()

    def test_an_older_one_that_is_damaged_does_not_cost_the_newer_ones(self) -> None:
        backend = memory_store(3)
        flip(backend, f"{STORE}/step-00000001/model.safetensors", -100)
        model = make_model()
        optimizer = make_optimizer(model, backend, keep=3)
        with pytest.raises(CheckpointError, match=r"step-00000001/model\.safetensors"):
            optimizer.restore(1, discard_newer=True)
        assert [c.step for c in list_checkpoints(STORE, backend=backend)] == [1, 2, 3]
        with pytest.warns(RuntimeWarning, match="not using .*step-00000001"):
            found = optimizer.restore()
        assert found is not None
        assert found.step == 3
        optimizer.close()


def renamed(model: torch.nn.Sequential) -> torch.nn.Module:
    return torch.nn.ModuleDict({"first": model[0], "second": model[1]})


class TestAnotherModel:
    @pytest.mark.parametrize(
        ("build", "says"),
        [
            (lambda: renamed(make_model()), ["'0.weight' is only in the checkpoint"]),
            (lambda: make_model(30, 41, 4), ["'0.weight' is BF16 [40, 30]", "BF16 [41, 30]"]),
            (lambda: make_model(dtype=torch.float32), ["BF16 [40, 30]", "F32 [40, 30]"]),
            (
                lambda: torch.nn.Sequential(*make_model(), torch.nn.Linear(4, 4)),
                ["'2.weight' is only in the model"],
            ),
            (
                lambda: torch.nn.Sequential(*make_model(), torch.nn.BatchNorm1d(4, affine=False)),
                ["'2.running_mean' is only in the model"],
            ),
        ],
        ids=["names", "shapes", "dtype", "more-parameters", "more-buffers"],
    )
    def test_is_refused_by_name(
        self, build: Callable[[], torch.nn.Module], says: list[str]
    ) -> None:
        backend = memory_store(2)
        model = build()
        optimizer = make_optimizer(model, backend)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(MismatchError, match="differs from the one that was saved") as error,
        ):
            optimizer.restore()
        for part in says:
            assert part in str(error.value)
        said = str(error.value)
        assert "Build the model as it was then, with the same configuration" in said
        is_dtype = any("F32" in part for part in says)
        assert ("convert it to another dtype after restore()" in said) == is_dtype
        assert "if this is another run, give it another directory=, or pass fresh=True" in said
        with nothing_changes(backend, model), pytest.raises(MismatchError) as error:
            load_parameters(model, STORE, backend=backend)
        said = str(error.value)
        assert "Build the model as it was then, with the same configuration" in said
        assert ("convert it to another dtype after load_parameters()" in said) == is_dtype
        assert "or name a checkpoint of this model" in said
        assert "fresh" not in said
        with pytest.raises(NotRestoredError):
            optimizer.step()
        optimizer.close()

    def test_names_that_are_only_numbers(self) -> None:
        backend = memory_store(2, model=None)
        model = make_model()
        with pytest.raises(MismatchError, match=r"'group0\.param0' is only in the ch") as error:
            load_parameters(model, STORE, backend=backend)
        said = "It was made without model=, so it does not have the model's names"
        assert said in str(error.value)
        with (
            make_optimizer(model, backend) as named,
            pytest.raises(MismatchError, match=f"{said}: an optimizer that is made without model="),
        ):
            named.restore()
        with make_optimizer(model, backend, model=None) as numbered:
            assert numbered.restore() is not None

    def test_another_class(self) -> None:
        backend = memory_store(2)
        model = make_model()
        optimizer = make_optimizer(model, backend, Adam)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(MismatchError, match=r"made with torch\.optim\.adamw\.AdamW") as error,
        ):
            optimizer.restore()
        assert "this optimizer is torch.optim.adam.Adam" in str(error.value)
        assert "construct the same class" in str(error.value)
        optimizer.close()

    def test_another_number_of_groups(self) -> None:
        backend = memory_store(2)
        model = make_model()
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
        optimizer = make_optimizer(model, backend, params=groups)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(MismatchError, match=r"has 1 parameter group, .*has 2") as error,
        ):
            optimizer.restore()
        assert "construct it with the same groups" in str(error.value)
        optimizer.close()

    def test_parameters_in_other_groups(self) -> None:
        groups: Callable[[Any], Any] = lambda m: [  # noqa: E731
            {"params": list(m[0].parameters())},
            {"params": list(m[1].parameters()), "momentum": 0.9},
        ]
        model, backend = make_model(), MemoryBackend()
        with make_optimizer(model, backend, SGD, params=groups(model), lr=0.1) as optimizer:
            step(optimizer)
            optimizer.checkpoint().result()
        model = make_model()
        optimizer = make_optimizer(model, backend, SGD, params=groups(model)[::-1], lr=0.1)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(MismatchError, match=r"parameter '\d\.\w+' was in group") as error,
        ):
            optimizer.restore()
        assert "Construct the optimizer with the same groups" in str(error.value)
        optimizer.close()

    def test_a_group_that_was_added_is_added_before_restoring(self) -> None:
        """What the message advises works."""

        def build() -> tuple[torch.nn.Sequential, dict[str, Any]]:
            model = torch.nn.Sequential(*make_model(), torch.nn.Linear(4, 4))
            model[2].requires_grad_(False)
            return model, {"params": list(model[2].parameters())}

        backend = MemoryBackend()
        model, added = build()
        with make_optimizer(model, backend, params=list(model[:2].parameters())) as optimizer:
            step(optimizer)
            model[2].requires_grad_(True)
            optimizer.add_param_group(added)
            step(optimizer)
            optimizer.checkpoint().result()
        trained = bits(model)
        model, added = build()
        model[2].requires_grad_(True)
        optimizer = make_optimizer(model, backend, params=list(model[:2].parameters()))
        with pytest.raises(MismatchError, match="add those that were added during training"):
            optimizer.restore()
        optimizer.add_param_group(added)
        assert optimizer.restore() is not None
        assert bits(model) == trained
        optimizer.close()

    @pytest.mark.filterwarnings("ignore:the reference that state_dict")
    def test_a_state_dict_of_elsewhere(self) -> None:
        model, backend = make_model(), MemoryBackend()
        optimizer = make_optimizer(model, backend)
        step(optimizer)
        stale = {**optimizer.state_dict(), "step": 9}
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(MismatchError, match=r"never sealed.* at step 9, .* at step 1 now"),
        ):
            optimizer.load_state_dict(stale)
        optimizer.close()
