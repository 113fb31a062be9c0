"""`state_dict()` is a small reference, and `load_state_dict()` of one is exact or refuses."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from gds import MemoryBackend
from offload.errors import MismatchError
from tests.numerics.reference import bits
from tests.stores.small import make_mixed_model, make_optimizer, step

pytestmark = pytest.mark.filterwarnings("ignore:the reference that state_dict")  # said once

BUILTINS = (str, int, float, bool, type(None))


def values(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from values(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from values(item)
    else:
        yield value


def saved(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Send a state dict through a file, as libraries do, and read it as they do."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    return [bits(p).clone() for p in model.parameters()]


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_it_is_builtins_only_and_by_value(lr):
    model, backend = make_mixed_model(), MemoryBackend()
    with make_optimizer(model, backend, lr=lr) as optimizer:
        step(optimizer, 1)
        reference = optimizer.state_dict()
        assert all(type(value) in BUILTINS for value in values(reference))
        assert len(str(reference)) < 2000
        before = copy.deepcopy(reference)
        optimizer.param_groups[0]["betas"] = (0.5, 0.5)
        if isinstance(lr, torch.Tensor):
            optimizer.param_groups[0]["lr"].fill_(7.0)
        step(optimizer, 2)
        assert reference == before


def test_loading_it_where_it_was_made_reads_and_writes_nothing_any_number_of_times():
    model, backend = make_mixed_model(), MemoryBackend()
    with make_optimizer(model, backend) as optimizer:
        for number in range(3):
            reference = saved(optimizer.state_dict())
            optimizer.synchronize()
            before = optimizer.stats()
            for _ in range(2):
                optimizer.load_state_dict(reference)
            after = optimizer.stats()
            assert (after.bytes_read, after.bytes_written) == (
                before.bytes_read,
                before.bytes_written,
            )
            step(optimizer, number)
        assert optimizer.state_dict()["step"] == 3
        assert not [n for n in backend.list_dir("/run") if n.startswith("step-")]


def test_hyper_parameters_come_with_it_also_a_tensor():
    model, backend = make_mixed_model(), MemoryBackend()
    with make_optimizer(model, backend, lr=torch.tensor(0.25)) as optimizer:
        reference = saved(optimizer.state_dict())
        optimizer.param_groups[0].update(lr=3.0, betas=(0.1, 0.2))
        optimizer.load_state_dict(reference)
        lr = optimizer.param_groups[0]["lr"]
        assert isinstance(lr, torch.Tensor)
        assert (lr.dtype, lr.item()) == (torch.float32, 0.25)
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_another_process_goes_on_from_the_sealed_checkpoint_that_it_names():
    """As a library does that saves and loads the model itself: the state alone is adopted."""
    model, backend = make_mixed_model(), MemoryBackend()
    with make_optimizer(model, backend, lr=0.01) as optimizer:
        for number in range(3):
            step(optimizer, number)
        optimizer.checkpoint()
        reference = saved(optimizer.state_dict())
        weights = copy.deepcopy(model.state_dict())
        step(optimizer, 3)
        step(optimizer, 4)
        expected = parameters(model)
    other, reopened = make_mixed_model(seed=9), backend.reopened()
    with make_optimizer(other, reopened, lr=5.0) as optimizer:
        before = parameters(other)
        optimizer.load_state_dict(reference)
        assert_same(parameters(other), before)  # torch does not touch parameters either
        read = optimizer.stats().bytes_read
        assert read == 0
        other.load_state_dict(weights)
        optimizer.load_state_dict(reference)  # where it is now
        assert optimizer.param_groups[0]["lr"] == 0.01
        step(optimizer, 3)
        step(optimizer, 4)
        assert_same(parameters(other), expected)


class TestRefusals:
    def test_a_state_that_has_moved_on(self):
        model, backend = make_mixed_model(), MemoryBackend()
        with make_optimizer(model, backend) as optimizer:
            step(optimizer, 1)
            stale = optimizer.state_dict()
            step(optimizer, 2)
            with pytest.raises(
                MismatchError,
                match=r"was never sealed.* at step 1, and the optimizer is at step 2 now",
            ):
                optimizer.load_state_dict(stale)

    def test_another_store(self):
        model, backend = make_mixed_model(), MemoryBackend()
        with make_optimizer(model, backend) as optimizer:
            step(optimizer, 1)
            optimizer.checkpoint()
            reference = optimizer.state_dict()
        other = make_mixed_model()
        with (
            make_optimizer(other, MemoryBackend(), directory="/other") as optimizer,
            pytest.raises(MismatchError, match="/other"),
        ):
            optimizer.load_state_dict(reference)

    def test_a_checkpoint_that_is_not_the_newest_or_is_gone(self):
        model, backend = make_mixed_model(), MemoryBackend()
        references = []
        with make_optimizer(model, backend, keep=2) as optimizer:
            for number in range(3):
                step(optimizer, number)
                optimizer.checkpoint().result()
                references.append(optimizer.state_dict())
        with make_optimizer(model, backend.reopened()) as optimizer:
            with pytest.raises(MismatchError, match=r"restore\(2, discard_newer=True\)"):
                optimizer.load_state_dict(references[1])
            with pytest.raises(MismatchError, match="has been withdrawn, or sealing it failed"):
                optimizer.load_state_dict(references[0])
            optimizer.load_state_dict(references[2])
            assert optimizer.state_dict()["step"] == 3

    def test_the_same_step_of_a_history_that_was_given_up(self):
        model, backend = make_mixed_model(), MemoryBackend()
        with make_optimizer(model, backend) as optimizer:
            step(optimizer, 1)
            optimizer.checkpoint().result()
            step(optimizer, 2)
            optimizer.checkpoint().result()
            given_up = optimizer.state_dict()
            optimizer.restore(1, discard_newer=True)
            step(optimizer, 99)
            optimizer.checkpoint().result()
            assert optimizer.state_dict()["step"] == given_up["step"] == 2
            with pytest.raises(MismatchError, match="generation"):
                optimizer.load_state_dict(given_up)

    def test_one_that_was_made_before_the_checkpoint(self):
        model, backend = make_mixed_model(), MemoryBackend()
        with make_optimizer(model, backend) as optimizer:
            step(optimizer, 1)
            early = optimizer.state_dict()
            optimizer.checkpoint().result()
            optimizer.load_state_dict(early)  # this process knows that it is the same state
        with (
            make_optimizer(model, backend.reopened()) as optimizer,
            pytest.raises(MismatchError, match=r"never sealed.*is not known whether /run/step-0"),
        ):
            optimizer.load_state_dict(early)

    def test_another_format_or_other_parameter_groups(self):
        model, backend = make_mixed_model(), MemoryBackend()
        with make_optimizer(model, backend) as optimizer:
            reference = optimizer.state_dict()
            for key, value in (
                ("format", "offload-reference-1"),
                ("step", "3"),
                ("generation", True),
                ("run", 0),
            ):
                with pytest.raises(MismatchError, match=r"load_state_dict\(\) got a reference"):
                    optimizer.load_state_dict({**reference, key: value})
            two = {**reference, "param_groups": reference["param_groups"] * 2}
            with pytest.raises(ValueError, match="different number of parameter groups"):
                optimizer.load_state_dict(two)
            short = copy.deepcopy(reference)
            short["param_groups"][0]["params"].pop()
            with pytest.raises(ValueError, match="doesn't match the size"):
                optimizer.load_state_dict(short)


def unsealed(message: str = "the reference that state_dict") -> Any:
    return pytest.warns(RuntimeWarning, match=message)


@pytest.mark.filterwarnings("error")
class TestAStateThatNobodyHasSealed:
    def test_a_reference_to_it_is_warned_of_once_where_it_is_taken(self):
        model, backend = make_mixed_model(), MemoryBackend()
        optimizer = make_optimizer(model, backend)
        optimizer.load_state_dict(optimizer.state_dict())  # as accelerate.prepare() does: no step
        step(optimizer, 1)
        with unsealed(r"cannot be resumed from: the state of step 1 in /run .*checkpoint\(\)") as w:
            optimizer.state_dict()
        assert [os.path.basename(each.filename) for each in w] == [os.path.basename(__file__)]
        step(optimizer, 2)
        optimizer.state_dict()  # every save would say the same
        optimizer.close()

    def test_a_reference_to_another_state_is_not_warned_of(self):
        model, backend = make_mixed_model(), MemoryBackend()
        with make_optimizer(model, backend) as optimizer:
            step(optimizer, 1)
            optimizer.full_state_dict()
            with optimizer.materialized():
                optimizer.state_dict()
            optimizer.checkpoint()  # in flight is enough
            optimizer.state_dict()
            step(optimizer, 2)
            optimizer.checkpoint().result()
            optimizer.state_dict()
        with make_optimizer(model, backend.reopened()) as optimizer:
            optimizer.state_dict()
            optimizer.restore()
            optimizer.state_dict()

    @pytest.mark.parametrize("has_checkpoint", [False, True])
    def test_what_plain_loops_save_says_so_when_it_is_resumed_from(self, has_checkpoint):
        model, backend = make_mixed_model(), MemoryBackend()
        with make_optimizer(model, backend) as optimizer:
            for number in range(3):
                step(optimizer, number)
                if has_checkpoint and not number:
                    optimizer.checkpoint().result()
            with unsealed():
                kept = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        with (
            make_optimizer(make_mixed_model(), backend.reopened()) as optimizer,
            pytest.raises(MismatchError) as raised,
        ):
            optimizer.load_state_dict(kept["optimizer"])
        said = str(raised.value)
        assert said.startswith(
            "load_state_dict() got a reference to a state that was never sealed: checkpoint() had "
            "not been called when state_dict() was taken at step 3, and the state ended with"
        )
        assert ("/run/step-00000001, call restore()" in said) == has_checkpoint
        assert ("/run has no checkpoint to continue from" in said) != has_checkpoint
        assert "directory=" not in said  # it is the right one
