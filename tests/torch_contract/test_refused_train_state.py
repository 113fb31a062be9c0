"""Train state, and values beside it, that a checkpoint refuses to hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gds import MemoryBackend
from offload.format.train_state import TrainStateTooLargeError, TrainStateTypeError
from tests.stores.small import make_model, make_optimizer, memory_store, step
from tests.threads import one_thread
from tests.torch_contract.refusing import nothing_changes

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


class TestTrainState:
    class Sampler:
        pass

    @pytest.mark.parametrize(
        ("state", "path"),
        [
            ({"epoch": 1, "sampler": Sampler()}, r"\['sampler'\]"),
            ({"functions": [1, len]}, r"\['functions'\]\[1\]"),
        ],
        ids=["object", "function"],
    )
    def test_that_would_not_come_back_the_same(self, state: object, path: str) -> None:
        model, backend = make_model(), MemoryBackend()
        optimizer = make_optimizer(model, backend)
        step(optimizer)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(TrainStateTypeError, match=path),
        ):
            optimizer.checkpoint(state)
        assert optimizer.checkpoint({"epoch": 1}).result().train_state == {"epoch": 1}
        optimizer.close()

    @pytest.mark.parametrize(
        "state",
        ["ckpt.pt", b"state", Path("out/ckpt.pt"), 1, 0.5, True],
        ids=lambda state: type(state).__name__,
    )
    def test_what_is_meant_as_a_file_name_or_a_step(self, state: object) -> None:
        model, backend = make_model(), MemoryBackend()
        with make_optimizer(model, backend) as optimizer:
            step(optimizer)
            with (
                nothing_changes(backend, model, optimizer),
                pytest.raises(TrainStateTypeError, match=r"train_state .*, got ") as error,
            ):
                optimizer.checkpoint(state)
            said = str(error.value)
            assert f"got {type(state).__name__} {state!r}" in said
            assert "The step number and the name of the checkpoint need not be given" in said
            assert '{"epoch": 3}' in said
            assert optimizer.checkpoint({"state": state} if state != Path("out/ckpt.pt") else None)

    @pytest.mark.parametrize(
        "state",
        [None, {}, [1, 2], ("epoch", 1), {"name"}, np.float32(2), torch.tensor(1)],
        ids=repr,
    )
    def test_other_values_are_stored_as_they_are(self, state: object) -> None:
        model = make_model()
        with make_optimizer(model, MemoryBackend()) as optimizer:
            step(optimizer)
            assert optimizer.checkpoint(state).result().train_state == state

    def test_that_is_larger_than_what_is_reserved(self) -> None:
        backend = memory_store(2)
        model = make_model()
        optimizer = make_optimizer(model, backend)
        optimizer.restore()
        step(optimizer)
        large = {"seen": torch.arange(5000)}
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(TrainStateTooLargeError, match="the checkpoints reserve 8192") as error,
        ):
            optimizer.checkpoint(large)
        optimizer.checkpoint({"seen": None}).result()
        optimizer.close()
        # What the message says helps, and in every slot, also in those that were made before.
        needed = int(str(error.value).rpartition("train_state_bytes=")[2].rstrip(")"))
        backend = backend.reopened()
        model = make_model()
        optimizer = make_optimizer(model, backend, settings={"train_state_bytes": needed})
        optimizer.restore()
        for _ in range(4):
            step(optimizer)
            found = optimizer.checkpoint(large).result()
            assert torch.equal(found.train_state["seen"], large["seen"])
        optimizer.close()

    def test_a_hyperparameter_that_cannot_be_stored(self) -> None:
        model, backend = make_model(), MemoryBackend()
        optimizer = make_optimizer(model, backend)
        step(optimizer)
        optimizer.param_groups[0]["note"] = self.Sampler()
        with pytest.raises(TypeError, match=r"param_groups\[0\]\['note'\] is a Sampler"):
            optimizer.checkpoint()
        del optimizer.param_groups[0]["note"]
        assert optimizer.checkpoint().result().verify().ok
        optimizer.close()
