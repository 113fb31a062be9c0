"""Who waits for a seal is told when it may go on, and who asks for its outcome hears all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gds import MemoryBackend, StorageError
from offload import (
    Checkpoint,
    SealError,
    load_parameters,
    open_checkpoint,
)
from tests.crash.fault_backend import FaultBackend
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
)
from tests.crash.trained import Training
from tests.eventually import eventually
from tests.stores.training import Reference, differences, same_bits

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


def test_resident_state_that_a_seal_is_about_to_write_is_not_stepped(backend: Turnstile) -> None:
    backend.file_name = "/exp_avg.safetensors"
    training = Training(backend, host_memory="1GiB")
    training.step()
    handle = held_checkpoint(backend, training.optimizer)
    stepping = is_waiting(training.step)
    backend.open_for_all()
    assert goes_on(stepping)
    assert differences(handle.result(60), backend, Reference().after(1)) == []
    training.optimizer.checkpoint().result(60)
    assert training.differences(2) == []
    training.optimizer.close()


def test_a_restore_waits_for_the_seal_in_flight(backend: Turnstile) -> None:
    _, optimizer = started(backend)
    handle = held_checkpoint(backend, optimizer)
    restored: list[Any] = []
    caller = is_waiting(lambda: restored.append(optimizer.restore()))
    backend.open_for_all()
    assert goes_on(caller)
    assert handle.done()
    assert restored[0].step == 1
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
