"""Damage of a checkpoint is reported with its reason, and an older checkpoint is used."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from gds import Backend, MemoryBackend
from offload import list_checkpoints, load_parameters, open_checkpoint
from offload.errors import BrokenOptimizerError, CheckpointError, NotRestoredError, StoreError
from offload.format.document import digest_of
from tests.stores.files import everything, flip, read, remove_tree, write
from tests.stores.small import STORE, make_model, make_optimizer, memory_store, step
from tests.threads import one_thread
from tests.torch_contract.refusing import nothing_changes

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


def replace_in(name: str, old: bytes, new: bytes) -> Callable[[Backend, str], None]:
    def damage(backend: Backend, path: str) -> None:
        data = read(backend, f"{path}/{name}")
        assert old in data
        changed = data.replace(old, new, 1).rstrip(b" \n") if len(old) != len(new) else data
        write(backend, f"{path}/{name}", changed.replace(old, new, 1).ljust(len(data)))

    return damage


def truncate(name: str, nbytes: int) -> Callable[[Backend, str], None]:
    def damage(backend: Backend, path: str) -> None:
        write(backend, f"{path}/{name}", read(backend, f"{path}/{name}")[:nbytes])

    return damage


def remove(name: str) -> Callable[[Backend, str], None]:
    return lambda backend, path: backend.remove(f"{path}/{name}")


def edit_manifest(change: Callable[[dict[str, Any]], None]) -> Callable[[Backend, str], None]:
    """Change the manifest as someone would who knows how to make its digest right."""

    def damage(backend: Backend, path: str) -> None:
        data = read(backend, f"{path}/manifest.json")
        document = json.loads(data)
        change(document["body"])
        document["digest"] = digest_of(document["body"])
        write(backend, f"{path}/manifest.json", json.dumps(document).encode().ljust(len(data)))

    return damage


DAMAGE: dict[str, tuple[Callable[[Backend, str], None], str]] = {
    "manifest edited": (
        replace_in("manifest.json", b'"lr":0.001', b'"lr":0.005'),
        "does not match its digest",
    ),
    "manifest truncated": (truncate("manifest.json", 700), "not a JSON document"),
    "manifest missing": (remove("manifest.json"), "no manifest.json: not a complete checkpoint"),
    "manifest of another version": (
        replace_in("manifest.json", b'"format":1', b'"format":9'),
        "format version 9, expected 1; it was written by another version",
    ),
    "array truncated": (truncate("exp_avg.safetensors", 5000), "5000 bytes, expected a file of"),
    "array missing": (remove("master.safetensors"), "master.safetensors: missing"),
    "array with another header": (
        replace_in("exp_avg_sq.safetensors", b'"0.weight"', b'"9.weight"'),
        "its header lists other tensors than the manifest",
    ),
    "a file in its place": (
        lambda backend, path: (
            remove_tree(backend, path),
            write(backend, path, b"gone"),
        ),
        "step-00000002",
    ),
    "a group that is not there": (
        edit_manifest(lambda body: body["parameters"][0].__setitem__(3, 5)),
        "contradictory content",
    ),
    "a metric that is text": (
        edit_manifest(lambda body: body.update(metrics={"loss": "1.0"})),
        "contradictory content",
    ),
}


def require_not_used(backend: Backend, reason: str) -> None:
    """Check that restoring, listing and opening pass over the newest of two, with the reason."""
    newest = f"{STORE}/step-00000002"
    before = everything(backend)
    with make_optimizer(make_model(), backend) as optimizer:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = optimizer.restore()
        assert found is not None
        assert found.step == 1
        (message,) = [str(w.message) for w in caught if w.category is RuntimeWarning]
        assert message.startswith(f"not using {newest}: ")
        assert reason in message
        assert everything(backend) == before, "it is left alone: somebody may want to look at it"
        info = {c.path: c for c in list_checkpoints(STORE, backend=backend)}
        assert not info[newest].valid
        assert reason in info[newest].reason
        assert info[f"{STORE}/step-00000001"].valid
        with pytest.warns(RuntimeWarning) as caught, open_checkpoint(STORE, backend=backend) as old:
            assert old.step == 1
        assert [str(w.message) for w in caught] == [message]
        # Training goes on, and takes the damaged one's name when it comes to its step.
        step(optimizer)
        assert optimizer.checkpoint().result().path == newest
        with open_checkpoint(newest, backend=backend) as opened:
            assert opened.verify().ok


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGE)
    def test_is_passed_over_with_the_reason(self, damage: str) -> None:
        inflict, reason = DAMAGE[damage]
        backend = memory_store(2)
        inflict(backend, f"{STORE}/step-00000002")
        require_not_used(backend, reason)

    @pytest.mark.parametrize("damage", ["manifest edited", "array missing"])
    def test_of_the_only_checkpoint_is_an_error(self, damage: str) -> None:
        inflict, reason = DAMAGE[damage]
        backend, model = memory_store(2), make_model()
        for name in ("step-00000001", "step-00000002"):
            inflict(backend, f"{STORE}/{name}")
        with make_optimizer(model, backend) as optimizer:
            with (
                nothing_changes(backend, model, optimizer),
                pytest.warns(RuntimeWarning, match="not using"),
                pytest.raises(CheckpointError, match="none of its checkpoints can be") as error,
            ):
                optimizer.restore()
            assert reason in str(error.value)
            assert "pass fresh=True to start over" in str(error.value)
            with pytest.raises(NotRestoredError, match=r"call restore\(\).*or pass fresh=True"):
                optimizer.step()
        with make_optimizer(model, backend, fresh=True) as optimizer:
            step(optimizer)
            assert optimizer.checkpoint().result().verify().ok

    def test_of_the_parameters_is_found_when_they_are_restored(self) -> None:
        backend = memory_store(2)
        flip(backend, f"{STORE}/step-00000002/model.safetensors", -5)
        model = make_model()
        optimizer = make_optimizer(model, backend)
        with pytest.raises(CheckpointError, match=r"step-00000002/model.*bytes \d+ to") as error:
            optimizer.restore(2)
        assert "call restore() to continue from" in str(error.value)
        with pytest.raises((NotRestoredError, BrokenOptimizerError)):
            optimizer.step()
        with pytest.warns(RuntimeWarning, match="not using .*step-00000002"):
            found = optimizer.restore()
        assert found is not None
        assert found.step == 1
        flip(backend, f"{STORE}/step-00000001/model.safetensors", -5)
        with (
            pytest.warns(RuntimeWarning, match="not using .*step-00000002"),
            pytest.raises(CheckpointError, match=r"step-00000001/model.*bytes \d+ to"),
        ):
            load_parameters(model, STORE, backend=backend)
        optimizer.close()

    def test_found_in_the_middle_of_training_is_not_trained_on(self) -> None:
        """A restore that fails half way leaves neither the old nor the new state."""
        model, backend = make_model(), MemoryBackend()
        optimizer = make_optimizer(model, backend)
        for _ in range(2):
            step(optimizer)
            optimizer.checkpoint().result()
        step(optimizer)
        flip(backend, f"{STORE}/step-00000002/model.safetensors", -5)
        with pytest.raises(CheckpointError, match="damaged"):
            optimizer.restore(2)
        for call in (optimizer.step, optimizer.checkpoint, optimizer.synchronize):
            with pytest.raises(BrokenOptimizerError, match=r"call restore\(\)"):
                call()
        with pytest.warns(RuntimeWarning, match="not using .*step-00000002"):
            found = optimizer.restore()
        assert found is not None
        assert optimizer.num_steps == found.step == 1
        step(optimizer)
        optimizer.close()

    def test_a_reader_that_keeps_newer_ones_from_being_withdrawn(self) -> None:
        backend = memory_store(2)
        model = make_model()
        optimizer = make_optimizer(model, backend)
        optimizer.restore()
        with (
            open_checkpoint(f"{STORE}/step-00000002", backend=backend),
            pytest.raises(StoreError, match="is being read and cannot be withdrawn"),
        ):
            optimizer.restore(1, discard_newer=True)
        with pytest.raises(BrokenOptimizerError, match=r"call restore\(\)"):
            step(optimizer)
        found = optimizer.restore()
        assert found is not None
        assert found.step == 2
        step(optimizer)
        assert optimizer.num_steps == 3
        optimizer.close()
