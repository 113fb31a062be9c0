"""Steps of opening, restoring and recycling that could be taken out, and no other test noticed."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import pytest
import torch

from gds import Backend, MemoryBackend
from offload import AdamW, load_parameters, open_checkpoint
from offload.errors import DamagedError, SealError, StoreError
from offload.format.manifest import MODEL_BLOCK_BYTES
from tests.crash.fault_backend import FaultBackend
from tests.stores.files import contents, write
from tests.stores.training import (
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
    same_bits,
)

STORE = "/run"
THREE = [STORE, "/second", "/third"]


class Training:
    """A model and its optimizer, step by step."""

    def __init__(
        self, backend: Backend, directories: Sequence[str] = (STORE,), **changes: object
    ) -> None:
        self.backend = backend
        self.model = Model()
        self.optimizer: AdamW = optimizer_for(
            self.model, list(directories), options(backend), **changes
        )

    def steps(self, *steps: int, seal: bool = True, **train_state: object) -> None:
        for step in steps:
            backward(self.model, step)
            self.optimizer.step()
            if seal:
                self.optimizer.checkpoint({"step": step, **train_state}).result()


def trained(backend: Backend, last: int, directories: Sequence[str] = (STORE,)) -> None:
    """Leave checkpoints of steps 1, 2, ... behind."""
    training = Training(backend, directories, keep=last)
    training.steps(*range(1, last + 1))
    training.optimizer.close()


def assert_newest(backend: Backend, step: int, history: int = 0) -> None:
    with open_checkpoint(STORE, backend=backend) as newest:
        assert newest.step == step
        assert differences(newest, backend, Reference(history).after(step)) == []


def copy(backend: Backend, files: dict[str, bytes], directory: str) -> None:
    backend.make_dir(directory)
    for name, data in files.items():
        write(backend, f"{directory}/{name}", data)


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
        assert len(found.manifest.model_digests) == 3
        data_start = found.manifest.layout.model_header.data_start
    file = backend.open(f"{found.path}/model.safetensors", writable=True)
    file.write_bytes(b"\1", data_start + block * MODEL_BLOCK_BYTES + 100)
    file.close()
    model = build()
    optimizer = AdamW([model.trained], model=model, **settings)
    start = data_start + block * MODEL_BLOCK_BYTES
    with pytest.raises(DamagedError, match=f"bytes {start} to ") as error:
        optimizer.restore()
    assert found.path in str(error.value)
    optimizer.close()
    backend.remove(f"{found.path}/damaged.txt")
    with pytest.raises(DamagedError, match=f"bytes {start} to "):
        load_parameters(build(), STORE, backend=backend)


def test_a_history_that_starts_over_is_newer_than_the_one_that_was_given_up() -> None:
    """Also where a reader has kept the old one from being withdrawn when the new one was sealed."""
    backend = MemoryBackend()
    trained(backend, 3)
    with open_checkpoint(f"{STORE}/step-00000003", backend=backend):
        model = Model(history=1)
        optimizer = optimizer_for(model, STORE, options(backend), fresh=True)
        backward(model, 1, history=1)
        optimizer.step()
        optimizer.checkpoint({"step": 1}).result()
        optimizer.close()
    assert "step-00000003" in backend.list_dir(STORE)
    model = Model()
    with optimizer_for(model, STORE, options(backend)) as optimizer:
        assert optimizer.restore().step == 1
    assert same_bits(dict(model.state_dict()), Reference(1).after(1).model)


def test_a_part_of_another_store_is_not_taken_while_it_cannot_be_read() -> None:
    """As earlier versions let two stores have parts in one directory."""
    inner = MemoryBackend()
    trained(inner, 1, ["/elsewhere", "/second"])
    foreign = contents(inner, "/second/part-1")
    inner.rename("/second", "/aside")
    trained(inner, 2, [STORE, "/second"])
    copy(inner, foreign, "/second/part-50")
    backend = FaultBackend(inner)
    with pytest.warns(RuntimeWarning, match="sealed for another store"):
        training = Training(backend, [STORE, "/second"], keep=9)
    training.optimizer.restore()
    looked = []

    def chosen(kind: str, path: str) -> bool:
        if kind == "open" and path == "/second/part-50/part.json":
            looked.append(path)
            return True
        return False

    for step in range(3, 7):
        backend.fail_if(chosen)
        training.steps(step)
    assert len(looked) > 1
    training.optimizer.close()
    assert contents(inner, "/second/part-50") == foreign
    assert_newest(inner, 6)
    backend.close()


def test_a_number_that_is_kept_on_one_drive_is_used_on_no_other() -> None:
    backend = MemoryBackend(directories=[STORE, "/second/part-7", "/third/part-7/not-ours"])
    for directory in ("/second", "/third"):  # so they are of a store, whatever else is in them
        backend.create(f"{directory}/LOCK", 0).close()
    training = Training(backend, THREE)
    training.steps(1, 2)
    training.optimizer.close()
    assert_newest(backend, 2)
    assert backend.list_dir("/third/part-7") == ["not-ours"]


@pytest.mark.parametrize("drive", [1, 2])
def test_parts_that_were_removed_by_hand_do_not_stop_the_training(drive: int) -> None:
    """Of a checkpoint that another process has sealed, after this one has opened the store."""
    backend = MemoryBackend()
    trained(backend, 3, THREE)
    training = Training(backend, THREE, keep=1)
    training.optimizer.restore()
    with open_checkpoint(f"{STORE}/step-00000001", backend=backend) as oldest:
        part = oldest.parts[drive - 1]
    for name in backend.list_dir(part):
        backend.remove(f"{part}/{name}")
    backend.remove_dir(part)
    with pytest.warns(RuntimeWarning, match="not using .*/step-00000001 any more"):
        training.steps(4, 5)
    training.optimizer.close()
    assert_newest(backend, 5)


@pytest.mark.parametrize("drive", [1, 2])
def test_missing_parts_of_a_checkpoint_that_was_given_up_do_not_keep_its_slot(
    drive: int,
) -> None:
    backend = MemoryBackend()
    trained(backend, 3, THREE)
    with open_checkpoint(f"{STORE}/step-00000003", backend=backend) as newest:
        part = newest.parts[drive - 1]
    training = Training(backend, THREE, keep=1, fresh=True)
    for name in backend.list_dir(part):
        backend.remove(f"{part}/{name}")
    backend.remove_dir(part)
    training.steps(1, 2)
    training.optimizer.close()
    assert_newest(backend, 2)
    assert backend.stat(f"{STORE}/step-00000003") is None


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_parts_that_were_made_for_a_slot_that_could_not_be_made_are_removed(nth: int) -> None:
    inner = MemoryBackend()
    backend = FaultBackend(inner)
    training = Training(backend, THREE)
    count = 0

    def chosen(kind: str, path: str) -> bool:
        nonlocal count
        count += kind == "create" and path.startswith("/third/part-")
        return count == nth and kind == "create"

    backend.fail_if(chosen)
    backward(training.model, 1)
    with pytest.raises(OSError, match="the slot that the next step writes to needs") as error:
        training.optimizer.step()
    assert error.value.errno == errno.ENOSPC
    assert backend.num_failed == 1
    for directory in THREE:
        assert not [n for n in inner.list_dir(directory) if n.startswith((".slot-", "part-"))]
    training.optimizer.step()
    training.optimizer.checkpoint().result()
    training.optimizer.close()
    assert_newest(inner, 1)
    backend.close()


@pytest.mark.parametrize("kind", ["remove", "list_dir"])
@pytest.mark.parametrize("directories", [[STORE], [STORE, "/second"]], ids=["one", "two"])
def test_what_fails_behind_the_commit_does_not_fail_the_seal(
    kind: str, directories: list[str]
) -> None:
    """Nor does it end the reuse of slots: nothing was renamed or synced in vain."""
    inner = MemoryBackend()
    trained(inner, 4, directories)
    backend = FaultBackend(inner)
    training = Training(backend, directories, keep=1)
    training.optimizer.restore()
    training.steps(5, seal=False)
    sealed = []

    def chosen(operation: str, path: str) -> bool:
        sealed.extend([path] if operation == "rename" and "/.slot-" in path else [])
        return bool(sealed) and operation == kind

    backend.fail_if(chosen)
    assert training.optimizer.checkpoint({"step": 5}).result().step == 5
    assert backend.num_failed == 1
    training.steps(6, 7, 8)
    training.optimizer.close()
    assert_newest(inner, 8)
    slots = [n for n in inner.list_dir(STORE) if n.startswith((".slot-", "step-"))]
    assert len(slots) <= 3
    backend.close()


@pytest.mark.parametrize("name", ["train_state.safetensors", "manifest.json"])
def test_a_replacement_that_a_crash_has_left_half_made_does_not_block_the_next(name: str) -> None:
    backend = MemoryBackend()
    trained(backend, 2)
    left = backend.create(f"{STORE}/step-00000002/{name}.new", 10)
    left.close()
    training = Training(backend)
    assert training.optimizer.restore().step == 2
    again = training.optimizer.checkpoint({"another": "state"}, metrics={"loss": 0.5}).result()
    assert again.train_state == {"another": "state"}
    assert again.metrics == {"loss": 0.5}
    training.optimizer.close()
    with open_checkpoint(STORE, backend=backend) as found:
        assert (found.train_state, found.metrics) == ({"another": "state"}, {"loss": 0.5})
        assert found.verify().ok
    assert not [n for n in backend.list_dir(f"{STORE}/step-00000002") if n.endswith(".new")]


def test_several_that_cannot_be_used_now_are_never_the_newest_again() -> None:
    """Their generations are not known, and may be many above the one that training goes on from."""
    backend = MemoryBackend()
    trained(backend, 5)
    whole = {}
    for step in (2, 3, 4, 5):
        file = backend.open(f"{STORE}/step-{step:08d}/manifest.json", writable=True)
        whole[step] = file.read_bytes(0, file.size_bytes)
        file.write_bytes(bytes(64), 0)
        file.close()
    training = Training(backend, keep=9)
    with pytest.warns(RuntimeWarning) as caught:
        assert training.optimizer.restore().step == 1
    assert "not using /run/step-00000002, step-00000003" in str(caught[-1].message)
    training.steps(2, 3, 4, 5, seal=False)
    training.steps(6)
    training.optimizer.close()
    for step, data in whole.items():
        file = backend.open(f"{STORE}/step-{step:08d}/manifest.json", writable=True)
        file.write_bytes(data, 0)
        file.close()
    with open_checkpoint(STORE, backend=backend) as found:
        assert found.step == 6
    training = Training(backend, keep=9)
    assert training.optimizer.restore().step == 6
    training.optimizer.close()


def test_a_slot_that_is_given_back_is_not_removed_from_another_store() -> None:
    """After a failed sync slots are removed by their path, which may name another directory now."""
    inner = MemoryBackend()
    backend = FaultBackend(inner)
    training = Training(backend)
    training.steps(1)
    training.steps(2, seal=False)
    backend.fail_if(lambda kind, path: kind == "sync" and "/.slot-" in path)
    with pytest.raises(SealError):
        training.optimizer.checkpoint().result()
    assert backend.num_failed == 1
    inner.rename(STORE, "/moved")
    inner.make_dir(STORE)
    for name in inner.list_dir("/moved"):  # a copy, in which another process trains on
        if name != "LOCK":
            copy(inner, contents(inner, f"/moved/{name}"), f"{STORE}/{name}")
    (slot,) = [name for name in inner.list_dir(STORE) if name.startswith(".slot-")]
    before = contents(inner, f"{STORE}/{slot}")
    with pytest.warns(RuntimeWarning, match="sealing step 2 failed"):
        training.optimizer.restore()
    assert contents(inner, f"{STORE}/{slot}") == before
    with pytest.raises(StoreError, match="this is not the directory that was opened"):
        training.steps(2)
    training.optimizer.close()
    assert contents(inner, f"{STORE}/{slot}") == before
    backend.close()


def test_a_slot_that_is_given_back_is_not_removed_from_under_another_writer() -> None:
    """An earlier version locks LOCK only: once that is gone it gets in, and rewrites free slots."""
    inner = MemoryBackend()
    backend = FaultBackend(inner)
    training = Training(backend)
    training.steps(1)
    training.steps(2, seal=False)
    backend.fail_if(lambda kind, path: kind == "sync" and "/.slot-" in path)
    with pytest.raises(SealError):
        training.optimizer.checkpoint().result()
    assert backend.num_failed == 1
    inner.remove(f"{STORE}/LOCK")
    of_another = inner.lock(f"{STORE}/LOCK", create=True)
    (slot,) = [name for name in inner.list_dir(STORE) if name.startswith(".slot-")]
    before = contents(inner, f"{STORE}/{slot}")
    with pytest.warns(RuntimeWarning, match="sealing step 2 failed"):
        training.optimizer.restore()
    assert contents(inner, f"{STORE}/{slot}") == before
    with pytest.raises(StoreError, match="another process may have created and locked a new one"):
        training.steps(2)
    training.optimizer.close()
    of_another.release()
    assert contents(inner, f"{STORE}/{slot}") == before
    assert_newest(inner, 1)
    backend.close()
