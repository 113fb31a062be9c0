"""Who waits for a seal is told when it may go on, and who asks for its outcome hears all of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import gds.waiting
import offload.checkpoint.sealed_slot
import offload.format.manifest
import offload.model.model_file
from gds import Buffer, IOFuture, MemoryBackend, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from gds.contract import File
from gds.waiting import Monitor, Pending
from offload import AdamW, Checkpoint, list_checkpoints, load_parameters
from offload.engine.seal import Seal, SealHandle
from offload.errors import MismatchError, SealError
from offload.store.opening import StoredCheckpoint
from offload.store.sealing import Prepared, Sealing
from tests.crash.test_concurrency import Rows
from tests.crash.test_protocol_steps import STORE, Training
from tests.eventually import eventually
from tests.limits import HANG_S
from tests.stores.training import HYPER, options, same_bits

BLOCK_BYTES = 4096


class Turnstile(WrapperBackend):
    """Lets writes to ``model.safetensors`` through one at a time, once it has been shut."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.is_shut = False
        self.fails = False
        self.reached = threading.Semaphore(0)
        self.turns = threading.Semaphore(0)

    def wrap_file(self, file: File) -> File:
        return _TurnstileFile(file, self)

    def open_for_all(self) -> None:
        self.is_shut = False
        self.turns.release(1000)


class _TurnstileFile(WrapperFile):
    def __init__(self, inner: File, backend: Turnstile) -> None:
        super().__init__(inner)
        self._backend = backend

    def write(self, source: Buffer, offset: int) -> IOFuture:
        backend = self._backend
        if backend.is_shut and self.path.endswith("model.safetensors"):
            backend.reached.release()
            assert backend.turns.acquire(timeout=60)
            if backend.fails:
                raise StorageError(5, "the drive is gone", self.path)
        return super().write(source, offset)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turnstile]:
    """A turnstile; what is not told is not seen a second later, either."""
    for module in (
        offload.format.manifest,
        offload.model.model_file,
        offload.checkpoint.sealed_slot,
    ):
        monkeypatch.setattr(module, "MODEL_BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(gds.waiting, "_LOST_S", 3600.0)
    backend = Turnstile()
    yield backend
    backend.open_for_all()


def started(backend: Turnstile, **changes: Any) -> tuple[Rows, AdamW]:
    """Return a model of eight parameters, one block each, and its optimizer, after a step."""
    model = Rows()
    optimizer = AdamW(
        model.parameters(),
        directory=STORE,
        model=model,
        options=options(backend, ring_chunks=4),
        **HYPER,
        **changes,
    )
    model.fill_gradients(1)
    optimizer.step()
    return model, optimizer


def held_checkpoint(backend: Turnstile, optimizer: AdamW) -> SealHandle:
    """Begin a checkpoint; return when its first block has been copied and waits to be written."""
    backend.is_shut = True
    handle = optimizer.checkpoint()
    assert backend.reached.acquire(timeout=60)
    return handle


def seal_of(optimizer: AdamW) -> Seal:
    seal = optimizer._engine.state.seal
    assert isinstance(seal, Seal)
    return seal


def is_waiting(monitor: Monitor | Pending[Any], action: Callable[[], object]) -> threading.Thread:
    """Do something on another thread, and return once that waits to be told."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    assert eventually(lambda: monitor._tickets or not thread.is_alive())
    assert thread.is_alive(), "it does not wait"
    return thread


def goes_on(thread: threading.Thread) -> bool:
    thread.join(HANG_S)
    return not thread.is_alive()


def test_who_waits_for_a_parameter_goes_on_as_soon_as_that_has_been_copied(
    backend: Turnstile,
) -> None:
    _, optimizer = started(backend)
    handle = held_checkpoint(backend, optimizer)
    seal = seal_of(optimizer)
    thread = is_waiting(seal._progress, lambda: seal.wait_copied_of("rows.1"))
    backend.turns.release()
    assert backend.reached.acquire(timeout=60)  # the second one, and no more than that
    assert goes_on(thread)
    assert not handle.done()
    backend.open_for_all()
    assert handle.result(60).verify().ok
    optimizer.close()


def test_who_waits_for_a_seal_that_fails_goes_on_and_the_error_says_why(
    backend: Turnstile,
) -> None:
    _, optimizer = started(backend)
    handle = held_checkpoint(backend, optimizer)
    seal = seal_of(optimizer)
    thread = is_waiting(seal._progress, seal.wait_all_copied)
    backend.fails = True
    backend.turns.release()
    assert goes_on(thread)
    with pytest.raises(SealError, match=r"sealing step 1 failed.*the drive is gone") as failed:
        handle.result(60)
    assert isinstance(failed.value.__cause__, StorageError)
    backend.fails = False
    backend.open_for_all()
    with pytest.raises(SealError):
        optimizer.synchronize()
    assert optimizer.checkpoint().result(60).verify().ok
    optimizer.close()


def test_who_waits_for_the_end_of_a_seal_goes_on_when_it_has_ended(backend: Turnstile) -> None:
    _, optimizer = started(backend)
    handle = held_checkpoint(backend, optimizer)
    thread = is_waiting(handle._future, handle.wait)
    assert not handle.done()
    backend.open_for_all()
    assert goes_on(thread)
    assert handle.done()
    optimizer.close()


def test_a_seal_that_has_ended_holds_up_no_step(backend: Turnstile) -> None:
    _, optimizer = started(backend)
    handle = optimizer.checkpoint()
    seal = seal_of(optimizer)
    handle.result(60)
    layout = optimizer._engine.state.layout
    assert list(seal.stops(layout)) == [0] * layout.num_chunks
    seal.wait_copied_of("rows.7")
    optimizer.close()


@pytest.mark.parametrize("fails", [False, True], ids=["sealed", "failed"])
def test_a_step_that_waits_for_the_slot_of_an_expired_checkpoint_gets_it(
    fails: bool, backend: Turnstile
) -> None:
    """While the only checkpoint that is kept is being replaced, there is no slot for a step."""
    model, optimizer = started(backend, keep=1)
    optimizer.checkpoint().result(60)
    model.fill_gradients(2)
    optimizer.step()
    handle = held_checkpoint(backend, optimizer)
    store, layout = optimizer._engine.store, optimizer._engine.state.layout
    errors: list[BaseException] = []

    def acquire() -> None:
        try:
            store.release(store.acquire(layout, 1))
        except StorageError as error:
            errors.append(error)

    thread = is_waiting(store._changed, acquire)
    backend.fails = fails
    backend.open_for_all()
    assert goes_on(thread)
    assert errors == []
    handle.wait()
    with pytest.raises(SealError) if fails else nullcontext():
        optimizer.close()


def test_a_step_beside_the_model_waits_for_the_seal_which_has_the_values_before_it(
    backend: Turnstile,
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(6)))
    optimizer = AdamW(
        model.parameters(),
        directory=STORE,
        model=model,
        options=options(backend, overlap="forward"),
        **HYPER,
    )
    model(torch.ones(2, 32)).square().mean().backward()
    optimizer.step()
    model.zero_grad()
    model(torch.ones(2, 32)).square().mean().backward()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    handle = held_checkpoint(backend, optimizer)
    progress = seal_of(optimizer)._progress
    optimizer.step()
    assert eventually(lambda: progress._tickets)
    assert not handle.done()
    backend.open_for_all()
    sealed = handle.result(HANG_S)
    loaded = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(6)))
    load_parameters(loaded, sealed.path, backend=backend)
    assert same_bits(loaded.state_dict(), expected)
    optimizer.close()


def test_what_is_done_with_a_sealed_checkpoint_is_done_once_it_is_durable(
    backend: Turnstile,
) -> None:
    _, optimizer = started(backend)
    handle = held_checkpoint(backend, optimizer)
    used: list[Checkpoint] = []
    handle.when_sealed(used.append)
    assert used == []
    backend.open_for_all()
    sealed = handle.result(60)
    assert eventually(lambda: used)
    handle.when_sealed(used.append)
    assert used == [sealed, sealed]
    optimizer.close()


def test_nothing_is_done_with_a_checkpoint_that_failed(
    backend: Turnstile, caplog: pytest.LogCaptureFixture
) -> None:
    _, optimizer = started(backend)
    backend.is_shut = backend.fails = True
    backend.turns.release(1000)
    handle = optimizer.checkpoint()
    used: list[Checkpoint] = []
    handle.wait()
    handle.when_sealed(used.append)
    assert used == []
    assert caplog.messages == [], "nor does it go wrong"
    with pytest.raises(SealError):
        optimizer.close()


def test_the_copy_of_the_model_is_freed_before_the_seal_is_done(backend: Turnstile) -> None:
    """Who waits for the seal may need as much memory for something else."""
    _, optimizer = started(backend)
    handle = held_checkpoint(backend, optimizer)
    seal = seal_of(optimizer)
    held = [weakref.ref(seal._model), weakref.ref(seal._flush)]
    found: list[object] = []
    handle.when_sealed(lambda _: found.extend(reference() for reference in held))
    backend.open_for_all()
    handle.result(60)
    assert eventually(lambda: found)
    assert found == [None, None]
    optimizer.close()


def test_hyper_parameters_of_a_checkpoint_are_without_the_parameters(backend: Turnstile) -> None:
    _, optimizer = started(backend)
    (group,) = optimizer.checkpoint().result(60).hyperparameters
    assert group["lr"] == HYPER["lr"]
    assert "params" not in group
    optimizer.close()


def test_a_frozen_parameter_that_is_not_in_the_model_can_be_given(backend: Turnstile) -> None:
    model = Rows()
    foreign = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = AdamW(
        [*model.parameters(), foreign],
        directory=STORE,
        model=model,
        options=options(backend),
        **HYPER,
    )
    model.fill_gradients(1)
    optimizer.step()
    assert optimizer.checkpoint().result(60).verify().ok
    optimizer.close()


@pytest.mark.parametrize(
    "error", [SealError("rank 1 has failed"), OSError("no")], ids=["of-all-ranks", "of-this-one"]
)
def test_a_seal_that_failed_is_told_to_all_others_and_over_before_its_handle_says_so(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks are told first; the error of a seal that they have agreed on is raised as is."""
    training = Training(MemoryBackend(), keep=2)
    training.step()
    told: list[tuple[str, bool]] = []
    end, abandon = Sealing.end, Sealing.abandon

    def unpublished(sealing: Sealing, prepared: Prepared) -> StoredCheckpoint:
        raise error

    def is_done() -> bool:
        return seal_of(training.optimizer).handle.done()

    def ended(sealing: Sealing) -> None:
        told.append(("ended", is_done()))
        end(sealing)

    def abandoned(sealing: Sealing, why: BaseException) -> None:
        assert why is error
        told.append(("abandoned", is_done()))
        abandon(sealing, why)

    with monkeypatch.context() as patch:
        patch.setattr(Sealing, "publish", unpublished)
        patch.setattr(Sealing, "end", ended)
        patch.setattr(Sealing, "abandon", abandoned)
        with pytest.raises(SealError) as failed:
            training.optimizer.checkpoint().result(60)
    assert told == [("abandoned", False), ("ended", False)]
    if isinstance(error, SealError):
        assert failed.value is error
        assert error.__cause__ is None
    else:
        assert failed.value.__cause__ is error
    with pytest.raises(SealError):
        training.optimizer.synchronize()
    training.steps_and_seal()
    training.optimizer.close()


def test_an_older_state_is_not_loaded_over_the_checkpoint_of_a_seal_in_flight(
    monkeypatch: pytest.MonkeyPatch, backend: Turnstile
) -> None:
    """`load_state_dict` waits for the seal, and then refuses as it does after the seal."""
    training = Training(backend, keep=2)
    training.steps_and_seal()
    older = training.optimizer.state_dict()
    training.step()
    backend.is_shut = True
    handle = training.optimizer.checkpoint()
    wait = SealHandle.wait

    def go_on(handle: SealHandle) -> None:
        backend.open_for_all()
        wait(handle)

    monkeypatch.setattr(SealHandle, "wait", go_on)
    with pytest.raises(MismatchError, match="newer checkpoints"):
        training.optimizer.load_state_dict(older)
    monkeypatch.undo()
    assert handle.result().step == 2
    assert [info.step for info in list_checkpoints(STORE, backend=backend)] == [1, 2]
    training.optimizer.close()
