"""Who waits for a seal is told when it may go on, and who asks for its outcome hears all of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from gds import MemoryBackend, StorageError
from offload import (
    AdamW,
    Checkpoint,
    MismatchError,
    SealError,
    list_checkpoints,
    load_parameters,
    open_checkpoint,
)
from tests.crash.fault_backend import FaultBackend, Kind
from tests.crash.seal_gates import (
    STORE,
    Rows,
    Turnstile,
    copies,
    goes_on,
    held_checkpoint,
    is_waiting,
    started,
    turnstile,
    waits,
)
from tests.crash.trained import Training
from tests.eventually import eventually
from tests.stores.training import HYPER, Reference, differences, options, same_bits

__all__ = ["turnstile"]


def test_the_next_step_waits_only_for_what_it_overwrites(backend: Turnstile) -> None:
    model, optimizer = started(backend)
    at_checkpoint = copies(model)
    handle = held_checkpoint(backend, optimizer)  # the first row has been copied

    def changed() -> list[int]:
        return [
            number
            for number, row in enumerate(model.rows)
            if not torch.equal(row, at_checkpoint[f"rows.{number}"])
        ]

    model.fill_gradients(2)
    step = is_waiting(optimizer.step)
    assert changed() == [0], "the step has begun, and stopped where it must"
    backend.turns.release()
    assert backend.reached.acquire(timeout=60)  # the second one, and no more than that
    assert eventually(lambda: changed() == [0, 1])
    assert not handle.done()

    backend.open_for_all()
    assert goes_on(step)
    sealed = handle.result(60)
    assert optimizer.num_steps == 2
    assert len(changed()) == len(model.rows)
    loaded = Rows()
    load_parameters(loaded, sealed.path, backend=backend)
    assert same_bits(loaded.state_dict(), at_checkpoint)
    assert sealed.verify().ok
    assert optimizer.stats().wait_seal_s > 0
    optimizer.close()


@pytest.mark.parametrize("fails", [False, True], ids=["sealed", "failed"])
def test_who_waits_for_the_end_of_a_seal_goes_on_when_it_has_ended(
    fails: bool, backend: Turnstile
) -> None:
    _, optimizer = started(backend)
    handle = held_checkpoint(backend, optimizer)
    used: list[Checkpoint] = []
    handle.when_sealed(used.append)
    waiting = is_waiting(handle.wait)
    assert not handle.done()
    assert used == []
    backend.fails = fails
    if fails:
        backend.turns.release()
    else:
        backend.open_for_all()
    assert goes_on(waiting)
    assert handle.done()
    if fails:
        with pytest.raises(SealError, match=r"sealing step 1 failed.*the drive is gone") as failed:
            handle.result()
        assert isinstance(failed.value.__cause__, StorageError)
        handle.when_sealed(used.append)
        assert used == []
        backend.fails = False
        backend.open_for_all()
        with pytest.raises(SealError):
            optimizer.synchronize()
        assert optimizer.checkpoint().result(60).verify().ok
    else:
        assert eventually(lambda: used)
        handle.when_sealed(used.append)
        assert used == [handle.result(), handle.result()]
    optimizer.close()


@pytest.mark.parametrize(
    ("keep", "fails"), [(1, False), (2, False), (1, True)], ids=["", "keep=2", "failed"]
)
def test_a_step_that_waits_for_the_slot_of_an_expired_checkpoint_gets_it(
    keep: int, fails: bool, backend: Turnstile
) -> None:
    """Disks are sized for `keep` and one more slot, also while one is being sealed."""
    model, optimizer = started(backend, keep=keep)
    for _ in range(keep):
        optimizer.checkpoint().result(60)
        model.fill_gradients(2)
        optimizer.step()
    handle = held_checkpoint(backend, optimizer)
    model.fill_gradients(3)
    waiting = is_waiting(optimizer.step)
    names = backend.list_dir(STORE)
    assert len([n for n in names if n.startswith((".slot-", "step-"))]) == keep + 1, names
    backend.fails = fails
    backend.open_for_all()
    assert goes_on(waiting)
    handle.wait()
    assert optimizer.num_steps == keep + 2
    backend.fails = False
    if fails:
        with pytest.raises(SealError):
            optimizer.synchronize()
    assert optimizer.checkpoint().result(60).verify().ok
    optimizer.close()


def test_a_step_beside_the_model_waits_for_the_seal_which_has_the_values_before_it(
    backend: Turnstile,
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(6)))
    settings = options(backend, overlap="forward")
    optimizer = AdamW(model.parameters(), directory=STORE, model=model, options=settings, **HYPER)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 32)).square().mean().backward()
        expected = copies(model)
        handle = held_checkpoint(backend, optimizer) if optimizer.num_steps else None
        before = {*threading.enumerate()}
        optimizer.step()
    beside = {*threading.enumerate()} - before
    assert eventually(lambda: any(waits(thread.ident) for thread in beside))
    assert not handle.done()
    backend.open_for_all()
    sealed = handle.result(60)
    load_parameters(model, sealed.path, backend=backend)
    assert same_bits(model.state_dict(), expected)
    optimizer.close()


def test_a_second_checkpoint_waits_for_the_first(backend: Turnstile) -> None:
    _, optimizer = started(backend)
    first = held_checkpoint(backend, optimizer, {"number": 1})
    second: list[Any] = []
    caller = is_waiting(lambda: second.append(optimizer.checkpoint({"number": 2})))
    assert not second
    for timeout_s in (0.0, 0.01):
        with pytest.raises(TimeoutError):
            first.result(timeout_s)
    backend.open_for_all()
    assert goes_on(caller)
    assert first.done(), "the second call returned, so the first seal has ended"
    assert second[0].result(60).train_state == {"number": 2}
    optimizer.close()


def test_an_older_state_is_not_loaded_over_the_checkpoint_of_a_seal_in_flight(
    backend: Turnstile,
) -> None:
    """`load_state_dict` waits for the seal, and then refuses as it does after the seal."""
    model, optimizer = started(backend)
    optimizer.checkpoint().result(60)
    older = optimizer.state_dict()
    model.fill_gradients(2)
    optimizer.step()
    handle = held_checkpoint(backend, optimizer)
    errors: list[MismatchError] = []

    def load() -> None:
        try:
            optimizer.load_state_dict(older)
        except MismatchError as error:
            errors.append(error)

    loading = is_waiting(load)
    backend.open_for_all()
    assert goes_on(loading)
    assert "newer checkpoints" in str(errors)
    assert handle.result(60).step == 2
    assert [info.step for info in list_checkpoints(STORE, backend=backend)] == [1, 2]
    optimizer.close()


class TestFailedSeal:
    """The error of a seal comes out once, wherever the training thread looks next."""

    def failed(self, keep: int = 2, *, is_seen: bool = True) -> Training:
        backend = FaultBackend(MemoryBackend())
        training = Training(backend, keep=keep)
        training.steps_and_seal()
        training.step()
        training.optimizer.synchronize()
        backend.fail("write", 1, forever=False)  # the model file's
        handle = training.optimizer.checkpoint({"step": 2})
        if is_seen:
            with pytest.raises(SealError, match=r"sealing step 2 failed.*injected") as error:
                handle.result()
            assert "earlier checkpoints are untouched" in str(error.value)
        return training

    @pytest.mark.parametrize(("call", "keep"), [("step", 1), ("checkpoint", 2), ("synchronize", 1)])
    def test_is_raised_by_the_next_call_and_training_goes_on(self, call: str, keep: int) -> None:
        training = self.failed(keep)
        with pytest.raises(SealError, match="sealing step 2 failed"):
            getattr(training.optimizer, call)()
        training.optimizer.zero_grad()
        assert training.optimizer.num_steps == 2
        again = training.optimizer.checkpoint({"step": 2}).result()
        assert differences(again, training.backend, Reference().after(2)) == []
        training.steps_and_seal()
        with open_checkpoint(STORE, backend=training.backend) as found:
            assert differences(found, training.backend, Reference().after(3)) == []
        training.optimizer.close()

    @pytest.mark.parametrize("is_seen", [False, True], ids=["unseen", "seen"])
    def test_is_raised_by_close_unless_it_was_seen(self, is_seen: bool) -> None:
        training = self.failed(is_seen=is_seen)
        if not is_seen:
            with pytest.raises(SealError, match="sealing step 2 failed"):
                training.optimizer.close()
        training.optimizer.close()  # once is enough
        with Training(training.backend).optimizer as successor:
            found = successor.restore()
            assert found is not None
            assert found.step == 1

    def test_does_not_hide_the_error_that_ends_the_block(self) -> None:
        training = self.failed()
        with pytest.raises(ZeroDivisionError), training.optimizer:
            raise ZeroDivisionError

    @pytest.mark.parametrize("kind", ["sync", "sync_dir", "rename", "write_bytes"])
    def test_is_not_what_fails_in_tidying_up_behind_it(self, kind: Kind) -> None:
        """The new checkpoint is durable. That the old one was not withdrawn is another matter."""
        backend = FaultBackend(MemoryBackend())
        training = Training(backend, keep=1)
        training.steps_and_seal()
        training.step()
        seen: list[Kind] = []

        def behind_the_commit(what: Kind, path: str) -> bool:
            if "rename" in seen and "sync_dir" in seen[seen.index("rename") :]:
                return what == kind  # the commit's last operation is the sync of its rename
            seen.append(what)
            return False

        backend.fail_if(behind_the_commit)
        found = training.optimizer.checkpoint().result()
        assert backend.num_failed == 1
        assert differences(found, backend, Reference().after(2)) == []
        with pytest.warns(RuntimeWarning, match="this process reuses no slot any more"):
            training.step()
        training.steps_and_seal()
        training.optimizer.close()
        with Training(backend.inner).optimizer as successor:
            last = successor.restore()
            assert last is not None
            assert last.step == 4

    def test_leaves_no_slot_behind_for_every_attempt(self) -> None:
        training = self.failed(keep=1)
        for _ in range(5):
            with pytest.raises(SealError):
                training.optimizer.step()
            training.backend.fail("write", 1, forever=False)
            with pytest.raises(SealError):
                training.optimizer.checkpoint().result()
        with pytest.raises(SealError):
            training.optimizer.step()
        training.steps_and_seal()
        names = [n for n in training.backend.list_dir(STORE) if n != "LOCK"]
        assert len(names) <= 2, names
        training.optimizer.close()
