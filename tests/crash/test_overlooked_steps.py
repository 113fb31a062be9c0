"""Steps of opening, restoring, sealing and recycling that only a test of their own notices."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from gds import Backend, MemoryBackend, StorageError
from offload import AdamW, list_checkpoints, load_parameters, open_checkpoint
from offload.errors import BrokenOptimizerError, DamagedError, SealError, StoreError
from offload.format.manifest import MODEL_BLOCK_BYTES
from tests.crash.fault_backend import FaultBackend
from tests.crash.late import GateBackend
from tests.crash.runs import STORE, assert_at_step, slots_in, start, step_path
from tests.stores.files import contents, overwrite, read, remove_tree, write
from tests.stores.training import (
    Model,
    Reference,
    options,
    same_bits,
    take_step,
    train,
)

NEWEST = step_path(2)


def start_anew(backend: Backend, num_drives: int = 1, **changes: Any) -> tuple[Model, AdamW]:
    return start(backend, num_drives, **{"history": 5, **changes})


def trained(backend: Backend, last: int, num_drives: int = 1) -> Backend:
    """Leave checkpoints of steps 1, 2, ... behind."""
    model, optimizer = start(backend, num_drives, keep=last)
    with optimizer:
        train(model, optimizer, *range(1, last + 1))
    return backend


def assert_restores(model: Model, optimizer: AdamW, step: int) -> None:
    """Restore a step, and take one more, to the bit."""
    found = optimizer.restore()
    assert found is not None
    assert found.step == step
    train(model, optimizer, step + 1)
    assert same_bits(dict(model.state_dict()), Reference().after(step + 1).model)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_every_block_of_the_parameters_is_checked(block: int) -> None:
    """Real models have more than the one block that fits all other tests."""

    def build() -> torch.nn.Module:
        model = torch.nn.Module()
        model.trained = torch.nn.Parameter(torch.zeros(64))
        large = torch.zeros(MODEL_BLOCK_BYTES * 2 // 4 + 1000)
        model.frozen = torch.nn.Parameter(large, requires_grad=False)
        return model

    backend, model = MemoryBackend(), build()
    settings = {"directory": STORE, "options": options(backend)}
    with AdamW([model.trained], model=model, **settings) as optimizer:
        model.trained.grad = torch.ones(64)
        optimizer.step()
        found = optimizer.checkpoint().result()
    size = sum(p.nbytes for p in model.parameters())
    first = found.files["model.safetensors"] - size + block * MODEL_BLOCK_BYTES
    overwrite(backend, f"{found.path}/model.safetensors", b"\1", first + 100)
    model = build()
    with AdamW([model.trained], model=model, **settings) as optimizer:
        with pytest.raises(DamagedError, match=f"bytes {first} to ") as error:
            optimizer.restore()
        assert found.path in str(error.value)
    backend.remove(f"{found.path}/damaged.txt")
    with pytest.raises(DamagedError, match=f"bytes {first} to "):
        load_parameters(build(), STORE, backend=backend)


class TestNewest:
    def test_a_history_that_starts_over_is_newer_than_the_one_that_was_given_up(self) -> None:
        """Also where a reader has kept the old one from being withdrawn when that was sealed."""
        backend = trained(MemoryBackend(), 3)
        with open_checkpoint(f"{STORE}/step-00000003", backend=backend):
            model, optimizer = start(backend, fresh=True)
            with optimizer:
                train(model, optimizer, 1)
        assert "step-00000003" in backend.list_dir(STORE)
        model, optimizer = start_anew(backend)
        with optimizer:
            assert_restores(model, optimizer, 1)

    def test_several_that_cannot_be_used_now_are_never_the_newest_again(self) -> None:
        """Their generations are not known, and may be many above the one that is gone on from."""
        backend = trained(MemoryBackend(), 5)
        paths = [f"{STORE}/step-{step:08d}/manifest.json" for step in (2, 3, 4, 5)]
        whole = {path: read(backend, path) for path in paths}
        for path in paths:
            overwrite(backend, path, bytes(64))
        model, optimizer = start_anew(backend, keep=9)
        with pytest.warns(RuntimeWarning) as caught:
            assert optimizer.restore().step == 1
        assert "not using /run/step-00000002, step-00000003" in str(caught[-1].message)
        train(model, optimizer, 2, 3, 4, 5, seal=False)
        train(model, optimizer, 6)
        optimizer.close()
        for path, data in whole.items():
            overwrite(backend, path, data)
        assert_at_step(backend, 6)
        model, optimizer = start_anew(backend, keep=9)
        with optimizer:
            assert_restores(model, optimizer, 6)

    def test_training_begins_where_all_checkpoints_were_removed_beside_the_process(self) -> None:
        backend = trained(MemoryBackend(), 2)
        model, optimizer = start(backend)
        for info in list_checkpoints(STORE, backend=backend):
            remove_tree(backend, info.path)
        with pytest.warns(RuntimeWarning, match="was removed or moved away"):
            assert optimizer.restore() is None
        train(model, optimizer, 1)
        optimizer.close()
        assert_at_step(backend, 1)


@pytest.mark.parametrize("kind", ["remove", "list_dir"])
@pytest.mark.parametrize("num_drives", [1, 2])
def test_what_fails_behind_the_commit_does_not_fail_the_seal(kind: str, num_drives: int) -> None:
    """Nor does it end the reuse of slots: nothing was renamed or synced in vain."""
    inner = trained(MemoryBackend(), 4, num_drives)
    backend = FaultBackend(inner)
    model, optimizer = start_anew(backend, num_drives, keep=1)
    optimizer.restore()
    train(model, optimizer, 5, seal=False)
    sealed = []

    def chosen(operation: str, path: str) -> bool:
        sealed.extend([path] if operation == "rename" and "/.slot-" in path else [])
        return bool(sealed) and operation == kind

    backend.fail_if(chosen)
    assert optimizer.checkpoint({"step": 5}).result().step == 5
    assert backend.num_failed == 1
    train(model, optimizer, 6, 7)
    optimizer.close()
    assert_at_step(inner, 7)
    assert len(slots_in(inner)) <= 3
    backend.close()


@pytest.mark.parametrize("name", ["train_state.safetensors", "manifest.json"])
def test_a_replacement_that_a_crash_has_left_half_made_does_not_block_the_next(name: str) -> None:
    backend = trained(MemoryBackend(), 2)
    write(backend, f"{NEWEST}/{name}.new", bytes(10))
    _, optimizer = start_anew(backend)
    with optimizer:
        assert optimizer.restore().step == 2
        optimizer.checkpoint({"another": "state"}, metrics={"loss": 0.5}).result()
    with open_checkpoint(STORE, backend=backend) as found:
        assert (found.train_state, found.metrics) == ({"another": "state"}, {"loss": 0.5})
        assert found.verify().ok
    assert not [n for n in backend.list_dir(NEWEST) if n.endswith(".new")]


@pytest.mark.parametrize("whose", ["in a copy", "of an earlier version"])
def test_a_slot_that_is_given_back_is_not_removed_from_under_another_writer(whose: str) -> None:
    """After a failed sync slots are removed by their path, which may name another's by now.

    An earlier version locks LOCK only: once that is gone it gets in, and rewrites free slots.
    """
    inner = MemoryBackend()
    backend = FaultBackend(inner)
    model, optimizer = start(backend)
    train(model, optimizer, 1)
    take_step(model, optimizer, 2)
    backend.fail_if(lambda kind, path: kind == "sync" and "/.slot-" in path)
    with pytest.raises(SealError):
        optimizer.checkpoint().result()
    assert backend.num_failed == 1
    if whose == "in a copy":
        inner.rename(STORE, "/moved")
        inner.make_dir(STORE)
        for name in inner.list_dir("/moved"):
            if name != "LOCK":
                inner.make_dir(f"{STORE}/{name}")
                for file, data in contents(inner, f"/moved/{name}").items():
                    write(inner, f"{STORE}/{name}/{file}", data)
        error = "this is not the directory that was opened"
    else:
        inner.remove(f"{STORE}/LOCK")
        inner.lock(f"{STORE}/LOCK", create=True)
        error = "another process may have created and locked a new one"
    (slot,) = [name for name in inner.list_dir(STORE) if name.startswith(".slot-")]
    before = contents(inner, f"{STORE}/{slot}")
    with pytest.warns(RuntimeWarning, match="sealing step 2 failed"):
        optimizer.restore()
    with pytest.raises(StoreError, match=error):
        train(model, optimizer, 2)
    optimizer.close()
    assert contents(inner, f"{STORE}/{slot}") == before
    assert_at_step(inner, 1)
    backend.close()


class TestRestores:
    def test_one_waits_for_the_seal_in_flight(self) -> None:
        backend = GateBackend("/model.safetensors")
        model, optimizer = start(backend)
        take_step(model, optimizer, 1)
        backend.num_before = 0
        handle = optimizer.checkpoint({"step": 1})
        assert backend.reached.wait(60)
        opens = threading.Timer(0.2, backend.is_open.set)
        opens.start()
        found = optimizer.restore()
        opens.join()
        assert handle.done()
        assert found is not None
        assert found.step == 1
        train(model, optimizer, 2)
        assert_at_step(backend, 2)
        optimizer.close()


@pytest.mark.parametrize("call", ["step", "checkpoint"])
def test_state_of_which_a_write_has_failed_behind_a_step_is_not_trained_on(call: str) -> None:
    backend = FaultBackend(MemoryBackend(), "later")
    model, optimizer = start(backend)
    train(model, optimizer, 1)
    writes = backend.num_done["write"]
    take_step(model, optimizer, 2)
    optimizer.synchronize()
    per_step = backend.num_done["write"] - writes
    backend.fail("write", per_step, forever=False)  # the last one, which the step does not await
    take_step(model, optimizer, 3)
    with pytest.raises((StorageError, BrokenOptimizerError), match="injected failure of write"):
        optimizer.synchronize()
    with pytest.raises(
        BrokenOptimizerError, match=rf"a transfer of state failed .*continue from {STORE}/step-0000"
    ):
        getattr(optimizer, call)()
    assert_restores(model, optimizer, 1)
    optimizer.close()
    backend.close()
