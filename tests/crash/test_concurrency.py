"""Several processes, readers, and seals that take their time."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload.checkpoint.sealed_slot
import offload.format.manifest
import offload.model.model_file
import offload.store.slots.free
from gds import Backend, Buffer, IOFuture, MemoryBackend, PosixBackend, WrapperBackend
from gds.backends.wrapper import WrapperFile
from gds.contract import File, Lock
from offload import AdamW, Checkpoint, list_checkpoints, load_parameters, open_checkpoint
from offload.engine.seal import SEAL_THREAD, Seal
from offload.errors import SealError, StoreLockedError
from offload.format.layout import Layout
from offload.store.slots.slot import Slot
from tests.crash import children as child
from tests.crash.fault_backend import FaultBackend, Kind
from tests.eventually import eventually
from tests.forking import Children
from tests.stores.files import contents
from tests.stores.training import (
    HYPER,
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
    same_bits,
)

STORE = "/run"


def printed(output: str) -> list[str]:
    """Return the lines of a process, but for what the log says of steps without a checkpoint."""
    return [line for line in output.splitlines() if " lost: no checkpoint()" not in line]


class Training:
    """A model and its optimizer, step by step."""

    def __init__(
        self,
        backend: Backend,
        directory: str = STORE,
        *,
        reader_timeout_s: float = 0.2,
        **changes: object,
    ) -> None:
        self.backend = backend
        self.model = Model()
        settings = options(backend, reader_timeout_s=reader_timeout_s)
        self.optimizer: AdamW = optimizer_for(self.model, directory, settings, **changes)

    def step(self) -> None:
        backward(self.model, self.optimizer.num_steps + 1)
        self.optimizer.step()

    def steps_and_seal(self, num_steps: int = 1) -> str:
        for _ in range(num_steps):
            self.step()
        return self.optimizer.checkpoint().result().path


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    server = Children("tests.crash.children")
    yield server
    server.close()


class TestProcesses:
    def test_a_second_optimizer_is_refused(self, tmp_path: Path) -> None:
        store = str(tmp_path / "run")
        with optimizer_for(Model(), store, options()):
            (tmp_path / "link").symlink_to(store)
            for path in (store, str(tmp_path / "link")):
                with pytest.raises(StoreLockedError, match="another optimizer of this pr") as error:
                    optimizer_for(Model(), path, options())
                assert error.value.filename == path
        optimizer_for(Model(), store, options()).close()

    def test_a_second_process_is_refused_until_the_first_is_killed(
        self, children: Children, tmp_path: Path
    ) -> None:
        os.mkfifo(tmp_path / "announcements")
        holder = children.start(child.hold_the_store, tmp_path)
        assert (tmp_path / "announcements").read_text() == "held"
        found = children.run(child.refused, tmp_path)
        assert found.output.startswith("StoreLockedError")
        assert "another process" in found.output
        assert f"`fuser -v {tmp_path}/run/LOCK` says which process it is" in found.output
        assert f"(process {holder} on host {socket.gethostname()}, since 20" in found.output
        os.kill(holder, signal.SIGKILL)
        assert os.WTERMSIG(children.wait(holder, tmp_path).status or 0) == signal.SIGKILL
        assert children.run(child.refused, tmp_path).output == "opened\n"

    def test_a_forked_worker_does_not_keep_the_store_locked(
        self, children: Children, tmp_path: Path
    ) -> None:
        os.mkfifo(tmp_path / "announcements")
        holder = children.start(child.hold_the_store_and_fork, tmp_path)
        worker = int((tmp_path / "announcements").read_text())
        try:
            assert children.run(child.refused, tmp_path).output.startswith("StoreLockedError")
            os.kill(holder, signal.SIGKILL)
            children.wait(holder, tmp_path)
            os.kill(worker, 0)  # it lives
            assert children.run(child.refused, tmp_path).output == "opened\n"
        finally:
            os.kill(worker, signal.SIGKILL)

    def test_use_after_a_fork_is_refused_and_does_no_harm(
        self, children: Children, tmp_path: Path
    ) -> None:
        ended = children.run(child.use_after_fork, tmp_path)
        lines = ended.output.splitlines()
        for call, line in zip(("step", "checkpoint", "restore"), lines, strict=False):
            assert line.startswith(f"{call}: OffloadError: this optimizer was made in another")
            assert "fork workers before constructing it" in line
        assert lines[3:] == ["worker ended with 0", "3"]
        assert ended.status == 0

    @pytest.mark.parametrize(
        ("work", "status"),
        [
            (child.end_while_sealing, 0),
            (child.end_by_an_error_while_sealing, 1),
            (child.close_while_sealing, 0),
        ],
        ids=["end", "uncaught-error", "close"],
    )
    def test_a_seal_in_flight_is_not_lost_at_the_end(
        self,
        work: Callable[[str], None],
        status: int,
        children: Children,
        tmp_path: Path,
    ) -> None:
        ended = children.run(work, tmp_path)
        assert ended.status is not None, "it hangs"
        assert os.waitstatus_to_exitcode(ended.status) == status, ended.output
        with open_checkpoint(tmp_path / "run") as found:
            assert found.train_state == {"step": 2}
            assert differences(found, PosixBackend(), Reference().after(2)) == []

    def test_a_checkpoint_in_an_exit_handler_is_made(
        self, children: Children, tmp_path: Path
    ) -> None:
        ended = children.run(child.checkpoint_in_an_exit_handler, tmp_path)
        assert ended.status == 0, ended
        assert ended.output == "2\n"
        with open_checkpoint(tmp_path / "run") as found:
            assert differences(found, PosixBackend(), Reference().after(2)) == []

    def test_collection_on_the_seals_own_thread_does_not_deadlock(
        self, children: Children, tmp_path: Path
    ) -> None:
        ended = children.run(child.collected_on_the_seals_thread, tmp_path)
        assert ended.status == 0, ended
        assert ended.output == "2\n"

    def test_an_interrupted_step_can_be_closed(self, children: Children, tmp_path: Path) -> None:
        ended = children.run(child.interrupted_in_a_step, tmp_path)
        assert ended.status == 0, ended
        assert printed(ended.output) == ["interrupted", "closed"]

    def test_one_thread_for_all_transfers_is_enough(
        self, children: Children, tmp_path: Path
    ) -> None:
        ended = children.run(child.close_with_one_thread_for_all_transfers, tmp_path)
        assert ended.status == 0, ended
        assert printed(ended.output) == ["closed"]

    @pytest.mark.parametrize(
        "work",
        [child.checkpoint_within_a_step, child.restore_within_a_step, child.step_within_a_step],
        ids=["checkpoint", "restore", "step"],
    )
    def test_a_signal_handler_that_finds_half_a_step_is_refused(
        self, work: Callable[[str], None], children: Children, tmp_path: Path
    ) -> None:
        ended = children.run(work, tmp_path)
        assert ended.status == 0, ended
        assert ended.output.startswith("OffloadError: "), "it must not work on half a step"
        assert "signal handler" in ended.output
        with open_checkpoint(tmp_path / "run") as found:
            assert found.step == 4
            assert differences(found, PosixBackend(), Reference().after(4)) == []

    @pytest.mark.parametrize("sealing", [False, True], ids=["idle", "sealing"])
    def test_a_dropped_optimizer_frees_its_store(self, tmp_path: Path, sealing: bool) -> None:
        store = str(tmp_path / "run")
        model = Model()
        before = set(threading.enumerate())
        optimizer = optimizer_for(model, store, options())
        backward(model, 1)
        optimizer.step()
        if sealing:
            optimizer.checkpoint()
        own = set(threading.enumerate()) - before
        assert own
        del optimizer
        # Another thread may be the one that finds it: then it is closed a little later.
        deadline = time.monotonic() + 60
        while any(thread.is_alive() for thread in own) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert not any(thread.is_alive() for thread in own)
        with optimizer_for(model, store, options()) as successor:
            found = successor.restore()
            assert (found.step if found else 0) == int(sealing)


@pytest.mark.parametrize("keep", [1, 2, 3, 5], ids="keep={}".format)
def test_the_newest_are_kept_and_nothing_else_grows(keep: int) -> None:
    training = Training(MemoryBackend(), keep=keep)
    for step in range(1, 9):
        training.steps_and_seal()
        names = training.backend.list_dir(STORE)
        sealed = [name for name in names if name.startswith("step-")]
        kept = range(max(step - keep, 0) + 1, step + 1)
        assert sealed == [f"step-{number:08d}" for number in kept]
        assert len(names) <= 1 + keep + 1, "LOCK, what is kept, and a slot to work in"
    assert all(c.verify().ok for c in opened(training.backend, sealed))
    training.optimizer.close()


@pytest.mark.parametrize("keep", [1, 2, 3], ids="keep={}".format)
def test_there_is_never_more_than_one_slot_to_work_in(keep: int) -> None:
    """Also while seals are in flight: disks are sized for `keep` and one more."""

    asked = threading.Event()
    """A step has got a slot, or waits for one: until then every seal is held up."""

    class Counted(WrapperBackend):
        most = 0

        def make_dir(self, path: str) -> None:
            super().make_dir(path)
            if path.startswith(f"{STORE}/"):
                self.most = max(self.most, len(self.list_dir(STORE)) - 1)  # but for LOCK

        def sync_dir(self, path: str) -> None:
            if threading.current_thread().name.startswith(SEAL_THREAD) and path != STORE:
                assert asked.wait(60.0)
            super().sync_dir(path)

    backend = Counted(MemoryBackend())
    training = Training(backend, keep=keep)
    store = training.optimizer._engine.store
    acquire, wait = store.acquire, store._changed.wait_until

    def acquired(layout: Layout, num_groups: int) -> Slot:
        slot = acquire(layout, num_groups)
        asked.set()
        return slot

    def waiting(reached: Callable[[], Any]) -> Any:
        def looked() -> Any:
            found = reached()
            asked.set()
            return found

        return wait(looked)

    store.acquire, store._changed.wait_until = acquired, waiting
    handle = None
    for _ in range(8):
        training.step()
        if handle is not None:
            handle.result()  # it may have got as far as being held up only now
        asked.clear()
        handle = training.optimizer.checkpoint()
    asked.set()
    training.optimizer.close()
    assert backend.most == keep + 1


def opened(backend: Backend, names: list[str]) -> Iterator[Checkpoint]:
    for name in names:
        with open_checkpoint(f"{STORE}/{name}", backend=backend) as checkpoint:
            yield checkpoint


class TestReaders:
    def test_a_reader_sees_the_same_bits_while_training_goes_on(self) -> None:
        training = Training(MemoryBackend(), keep=2)
        path = training.steps_and_seal()
        with open_checkpoint(path, backend=training.backend) as reader:
            for _ in range(2):  # the step after that has no slot left
                training.steps_and_seal()
                assert differences(reader, training.backend, Reference().after(1)) == []
            assert reader.step == 1
            other = Model(history=5)
            assert load_parameters(other, path, backend=training.backend) == 1
            assert same_bits(other.state_dict(), Reference().after(1).model)
        training.steps_and_seal()
        assert training.backend.stat(path) is None
        training.optimizer.close()

    @pytest.mark.parametrize("in_memory", [False, True], ids=["posix", "memory"])
    def test_a_reader_that_nobody_closed_lets_go_when_it_is_dropped(
        self, tmp_path: Path, in_memory: bool
    ) -> None:
        store = STORE if in_memory else str(tmp_path / "run")
        backend = MemoryBackend() if in_memory else PosixBackend()
        training = Training(backend, store, keep=1)
        path = training.steps_and_seal()
        enabled = gc.isenabled()
        gc.collect()
        gc.disable()  # when Python next collects cycles is nothing that a step may depend on
        try:
            with pytest.warns(ResourceWarning, match="step-00000001: never closed; use `with`"):
                assert open_checkpoint(path, backend=backend if in_memory else None).step == 1
            training.steps_and_seal()
            training.steps_and_seal()
        finally:
            if enabled:
                gc.enable()
        training.optimizer.close()

    def test_a_waiting_step_goes_on_when_the_reader_closes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        training = Training(MemoryBackend(), keep=1, reader_timeout_s=600.0)
        reader = open_checkpoint(training.steps_and_seal(), backend=training.backend)
        training.steps_and_seal()
        waits = []

        class Clock:
            """The time of the module that waits, and of nobody else."""

            monotonic = staticmethod(time.monotonic)

            @staticmethod
            def sleep(seconds: float) -> None:
                waits.append(seconds)
                reader.close()

        monkeypatch.setattr(offload.store.slots.free, "time", Clock)
        training.step()
        assert len(waits) == 1
        assert len([n for n in training.backend.list_dir(STORE) if n != "LOCK"]) == 2
        assert same_bits(training.model.state_dict(), Reference().after(3).model)
        training.optimizer.close()

    def test_a_checkpoint_that_is_read_survives_a_fresh_start_and_is_not_the_newest(self) -> None:
        backend = MemoryBackend()
        training = Training(backend, keep=2)
        training.steps_and_seal(2)
        path = training.steps_and_seal(2)
        training.optimizer.close()
        with open_checkpoint(path, backend=backend) as reader:
            training = Training(backend, keep=2, fresh=True)
            training.steps_and_seal()
            training.optimizer.close()
            names = [name for name in backend.list_dir(STORE) if name.startswith("step-")]
            assert names == ["step-00000001", "step-00000004"]
            assert differences(reader, backend, Reference().after(4)) == []
        training = Training(backend, keep=2)
        found = training.optimizer.restore()
        assert found is not None
        assert found.step == 1, "the history that was begun last, not the highest step"
        training.optimizer.pin("mine")
        training.optimizer.close()
        pinned = [i.step for i in list_checkpoints(STORE, backend=backend) if i.pins == ("mine",)]
        assert pinned == [1], "the newest is what is pinned if nothing is named"

    def test_a_checkpoint_that_is_read_is_not_replaced_by_another_of_its_step(self) -> None:
        training = Training(MemoryBackend(), keep=2)
        path = training.steps_and_seal()
        with open_checkpoint(path, backend=training.backend) as reader:
            training.model.norm.running_mean.add_(1)  # so that it has to be sealed once more
            with pytest.raises(SealError, match="still being read"):
                training.optimizer.checkpoint().result()
            assert differences(reader, training.backend, Reference().after(1)) == []
        with pytest.raises(SealError):
            training.optimizer.step()
        training.optimizer.checkpoint().result()
        with open_checkpoint(path, backend=training.backend) as reader:
            assert differences(reader, training.backend, Reference().after(1)) == [
                "parameters or buffers"
            ]
            assert reader.verify().ok
        training.optimizer.close()

    def test_one_that_is_replaced_while_it_is_being_opened_is_not_what_is_locked(self) -> None:
        """The lock is on what had the name, which is free by now: it would keep nothing."""
        training = Training(LateLockBackend(), keep=2)
        path = training.steps_and_seal()

        def seal_this_step_again() -> None:
            training.model.norm.running_mean.add_(1)
            training.optimizer.checkpoint().result()

        training.backend.before_next_lock = seal_this_step_again
        with open_checkpoint(path, backend=training.backend) as reader:
            assert reader.generation == training.optimizer.state_dict()["generation"]
            for _ in range(2):  # the step after that has no slot left
                training.steps_and_seal()
            assert reader.verify().ok, "it has not been recycled: the lock is on the right one"
        training.steps_and_seal(2)  # nothing has kept its lock
        training.optimizer.close()

    @pytest.mark.parametrize("when", ["listed", "listed again", "found"])
    @pytest.mark.parametrize("again", [False, True], ids=["next-step", "same-step"])
    def test_a_stores_newest_that_has_just_been_recycled_is_the_one_after_it(
        self, when: str, again: bool
    ) -> None:
        """Of a store there always is a newest one; which it is may change while one looks."""
        training = Training(LateLockBackend(), keep=1)
        training.steps_and_seal()
        model = training.model

        def seal() -> None:
            if again:
                model.norm.running_mean.add_(1)
                training.optimizer.checkpoint().result()
            else:
                training.steps_and_seal()

        if when == "found":
            training.backend.before_next_lock = seal
        else:
            training.backend.after_list = seal
            training.backend.num_lists = 1 if when == "listed" else 2
        with open_checkpoint(STORE, backend=training.backend) as reader:
            assert training.backend.before_next_lock is None
            assert training.backend.num_lists == 0
            assert reader.step == (1 if again else 2)
            assert reader.verify().ok
        training.steps_and_seal(2)  # nothing has kept its lock
        training.optimizer.close()

    def test_a_slot_that_is_still_read_is_not_rewritten_by_the_next_process(self) -> None:
        """A reader's lock moves with the directory, whatever that is called by now."""
        backend = MemoryBackend()
        training = Training(backend, keep=1)
        path = training.steps_and_seal()
        training.optimizer.close()
        training = Training(backend, keep=1)
        training.optimizer.restore()
        training.steps_and_seal()
        training.optimizer.close()
        (slot,) = [name for name in backend.list_dir(STORE) if name.startswith(".slot-")]
        backend.rename(f"{STORE}/step-00000002", path)  # what a reader may hold on to
        backend.exchange(path, f"{STORE}/{slot}")
        lock = backend.lock(f"{STORE}/{slot}", shared=True)
        before = contents(backend, f"{STORE}/{slot}")
        training = Training(backend, keep=1, fresh=True)
        training.steps_and_seal(2)
        assert contents(backend, f"{STORE}/{slot}") == before
        lock.release()
        training.optimizer.close()


class LateLockBackend(WrapperBackend):
    """Lets something happen between the opening of what is to be locked, and the lock.

    Or when a directory has been listed, `num_lists` times from now.
    """

    before_next_lock: Callable[[], object] | None = None
    after_list: Callable[[], object] | None = None
    num_lists = 0

    def __init__(self) -> None:
        super().__init__(MemoryBackend())

    def list_dir(self, path: str) -> list[str]:
        names = super().list_dir(path)
        if self.num_lists:
            self.num_lists -= 1
            if self.num_lists == 0:
                self.after_list()
        return names

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Lock:
        happens, self.before_next_lock = self.before_next_lock, None
        if happens is None:
            return super().lock(path, shared=shared, create=create)
        opened = self.stat(path)
        happens()
        store = os.path.dirname(path)
        names = {self.stat(f"{store}/{name}"): name for name in self.list_dir(store)}
        (moved,) = [name for stat, name in names.items() if stat.inode == opened.inode]
        return super().lock(f"{store}/{moved}", shared=shared)


class SealGate(WrapperBackend):
    """Lets writes to ``model.safetensors`` through one by one, when told."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.is_open = threading.Event()
        self.is_open.set()
        self.reached = threading.Event()

    def wrap_file(self, file: File) -> File:
        return _GatedFile(file, self)

    def shut(self) -> None:
        self.reached.clear()
        self.is_open.clear()


class _GatedFile(WrapperFile):
    def __init__(self, inner: File, backend: SealGate) -> None:
        super().__init__(inner)
        self._backend = backend

    def write(self, source: Buffer, offset: int) -> IOFuture:
        if self.path.endswith("model.safetensors"):
            self._backend.reached.set()
            assert self._backend.is_open.wait(60)
        return super().write(source, offset)


class Rows(torch.nn.Module):
    """Eight bf16 parameters, each one block of the model file and two chunks of state."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.nn.ParameterList(
            torch.randn(2048, generator=generator).to(torch.bfloat16) for _ in range(8)
        )
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bfloat16))  # behind the rows

    def fill_gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for row in self.rows:
            row.grad = torch.randn(row.shape, generator=generator).to(row.dtype)


class Kinds(Rows):
    """Rows behind which are a transposed, a frozen and a frozen transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        for name, trained in (("turned", True), ("frozen", False), ("frozen_turned", False)):
            table = torch.arange(2048, dtype=torch.bfloat16).reshape(32, 64).t()
            setattr(self, name, torch.nn.Parameter(table, requires_grad=trained))
        self.turned.grad = torch.zeros_like(self.turned)


def _vector(model: torch.nn.Module) -> None:
    rows = [p for p in model.parameters() if p.is_contiguous()]
    vector = torch.nn.utils.parameters_to_vector(rows)
    torch.nn.utils.vector_to_parameters(vector.detach() * 0.5, rows)


def _each(change: Callable[[torch.nn.Parameter], object]) -> Callable[[torch.nn.Module], None]:
    def changed(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            change(parameter)

    return changed


def _assigned(model: torch.nn.Module) -> None:
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _swapped(parameter: torch.nn.Parameter) -> None:
    parameter.grad = None
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.zeros_like(parameter)))


@torch.no_grad()
def _set(parameter: torch.nn.Parameter) -> None:
    parameter.set_(torch.zeros_like(parameter))


REBUILDS: dict[str, Callable[[Any], object]] = {
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "meta": lambda model: model.to("meta"),
    "vector": _vector,
    "data": _each(lambda p: setattr(p, "data", torch.zeros_like(p))),
    "nothing": _each(lambda p: setattr(p, "data", torch.empty(0, dtype=p.dtype))),
    "assign": _assigned,
    "swap": _each(_swapped),
    "deleted": lambda model: model._parameters.clear() or model.rows.__init__(),
}
REFUSED: dict[str, Callable[[Any], object]] = {
    "set": _each(_set),
    "resize": _each(lambda p: p.requires_grad_(False).resize_(8192)),
    "freed": _each(lambda p: p.untyped_storage().resize_(0)),
}


class TestSealBehindTraining:
    @pytest.fixture(autouse=True)
    def small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (
            offload.format.manifest,
            offload.model.model_file,
            offload.checkpoint.sealed_slot,
        ):
            monkeypatch.setattr(module, "MODEL_BLOCK_BYTES", 4096)

    @pytest.fixture
    def gate(self) -> Iterator[SealGate]:
        gate = SealGate()
        yield gate
        gate.is_open.set()

    def start(self, gate: Backend, kind: type[Rows] = Rows, **hyper: object) -> tuple[Rows, AdamW]:
        model = kind()
        optimizer = AdamW(
            model.parameters(),
            directory=STORE,
            model=model,
            options=options(gate, ring_chunks=4),
            **{**HYPER, **hyper},
        )
        model.fill_gradients(1)
        optimizer.step()
        return model, optimizer

    def test_the_next_step_waits_only_for_what_it_overwrites(
        self, gate: SealGate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, optimizer = self.start(gate)
        at_checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
        waiting_for: list[int] = []
        waits = threading.Event()
        original = Seal.wait_copied

        def watched(seal: Seal, nbytes: int) -> None:
            if seal._copied < nbytes:
                waiting_for.append(nbytes)
            original(seal, nbytes)

        monkeypatch.setattr(Seal, "wait_copied", watched)
        gate.shut()
        handle = optimizer.checkpoint()
        assert gate.reached.wait(60)  # the first block has been copied, and is being written
        progress = optimizer._engine.state.seal._progress
        wait = progress.wait_until

        def waiting(reached: Callable[[], bool]) -> bool:
            waits.set()  # only now: whoever is about to wait might find that it need not
            return wait(reached)

        monkeypatch.setattr(progress, "wait_until", waiting)
        model.fill_gradients(2)
        step = threading.Thread(target=optimizer.step)
        step.start()
        assert waits.wait(60)
        assert waiting_for == [2 * 4096], "the second parameter, which is the second block"
        rows = {f"rows.{i}": row for i, row in enumerate(model.rows)}
        changed = [n for n, row in rows.items() if not torch.equal(row, at_checkpoint[n])]
        assert changed == ["rows.0"], "the step has begun, and stopped where it must"
        assert not handle.done()

        gate.is_open.set()
        step.join(60)
        sealed = handle.result(60)
        assert optimizer.num_steps == 2
        assert not any(torch.equal(row, at_checkpoint[n]) for n, row in rows.items())
        loaded = Rows()
        load_parameters(loaded, sealed.path, backend=gate)
        assert same_bits(loaded.state_dict(), at_checkpoint)
        assert sealed.verify().ok
        assert optimizer.stats().wait_seal_s > 0
        optimizer.close()

    def test_everything_but_parameters_is_captured_by_value(self, gate: SealGate) -> None:
        rate = torch.tensor(0.25)
        model, optimizer = self.start(gate, lr=rate)
        state = {"losses": [1.0], "tensor": torch.ones(3)}
        gate.shut()
        handle = optimizer.checkpoint(state)
        assert gate.reached.wait(60)
        model.seen.fill_(7)
        state["losses"].append(2.0)
        state["tensor"].zero_()
        rate.fill_(0.125)
        optimizer.param_groups[0]["lr"].fill_(0.125)
        optimizer.param_groups[0]["weight_decay"] = 0.75
        gate.is_open.set()
        sealed = handle.result(60)
        assert sealed.train_state["losses"] == [1.0]
        assert torch.equal(sealed.train_state["tensor"], torch.ones(3))
        assert sealed.hyperparameters[0]["lr"] == 0.25
        assert sealed.hyperparameters[0]["weight_decay"] == HYPER["weight_decay"]
        loaded = Rows()
        load_parameters(loaded, sealed.path, backend=gate)
        assert not loaded.seen.any()
        optimizer.close()

    def test_an_edit_before_the_copy_is_an_error_that_names_the_parameter(
        self, gate: SealGate
    ) -> None:
        model, optimizer = self.start(gate)
        first = optimizer.checkpoint().result()
        model.fill_gradients(2)
        optimizer.step()
        gate.shut()
        handle = optimizer.checkpoint()
        assert gate.reached.wait(60)
        with torch.no_grad():
            model.rows[6].mul_(0.5)
        gate.is_open.set()
        with pytest.raises(SealError, match=r"'rows\.6' was changed in place") as error:
            handle.result(60)
        assert "call .result() on the handle before editing" in str(error.value)
        assert [n for n in gate.list_dir(STORE) if n.startswith("step-")] == ["step-00000001"]
        assert first.verify().ok
        with pytest.raises(SealError):
            optimizer.step()
        # Seen and noted: the edit counts, as in plain torch, and the next checkpoint has it.
        edited = model.rows[6].detach().clone()
        sealed = optimizer.checkpoint().result(60)
        loaded = Rows()
        load_parameters(loaded, sealed.path, backend=gate)
        assert torch.equal(loaded.rows[6], edited)
        optimizer.close()

    @pytest.mark.parametrize("rebuild", REBUILDS)
    def test_memory_that_the_model_has_no_more_is_sealed(
        self, gate: SealGate, rebuild: str
    ) -> None:
        """The seal has the values of the call, whatever memory the parameters are given then."""
        model, optimizer = self.start(gate, Kinds)
        at_checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
        gate.shut()
        handle = optimizer.checkpoint()
        assert gate.reached.wait(60)
        REBUILDS[rebuild](model)
        gc.collect()
        junk = [torch.full((2048,), 7, dtype=torch.bfloat16) for _ in range(64)]
        gate.is_open.set()
        sealed = handle.result(60)
        del junk
        loaded = Kinds()
        load_parameters(loaded, sealed.path, backend=gate)
        assert same_bits(loaded.state_dict(), at_checkpoint)
        assert sealed.verify().ok
        optimizer.close()

    @pytest.mark.parametrize("rebuild", REFUSED)
    def test_memory_that_is_taken_from_the_seal_is_an_error_that_names_the_parameter(
        self, gate: SealGate, rebuild: str
    ) -> None:
        model, optimizer = self.start(gate, Kinds)
        gate.shut()
        handle = optimizer.checkpoint()
        assert gate.reached.wait(60)
        REFUSED[rebuild](model)
        gate.is_open.set()
        with pytest.raises(
            SealError, match=r"'(rows\.\d|turned|frozen)' was changed|'rows.\d' was f"
        ):
            handle.result(60)
        optimizer.close()
        assert not [name for name in gate.list_dir(STORE) if name.startswith("step-")]

    @pytest.mark.parametrize("then", ["the seal goes on", "a step begins"])
    def test_an_edit_that_ends_after_the_copy_is_an_error(self, gate: SealGate, then: str) -> None:
        """Torch counts an edit when it ends, so nobody knows whether the copy has half of it."""
        model, optimizer = self.start(gate)
        gate.shut()
        handle = optimizer.checkpoint()
        assert gate.reached.wait(60)
        with torch.no_grad():
            edited = model.rows[0].mul_(0.5).clone()
        model.fill_gradients(2)
        step = threading.Thread(target=optimizer.step)
        if then == "a step begins":
            step.start()
            eventually(lambda: not torch.equal(model.rows[0], edited))
        gate.is_open.set()
        with pytest.raises(SealError, match=r"'rows\.0' was changed in place"):
            handle.result(60)
        if then == "a step begins":
            step.join(60)
        optimizer.close()

    def test_an_edit_that_is_not_over_is_an_error(self, gate: SealGate) -> None:
        """The memory changes under the copy, and nothing has been counted yet."""
        model, optimizer = self.start(gate)
        gate.shut()
        handle = optimizer.checkpoint()
        assert gate.reached.wait(60)
        model.rows[0].data.mul_(0.5)  # as half of an edit is: torch counts only its end
        ended, caller = threading.Event(), threading.get_ident()

        def go_on() -> None:
            eventually(lambda: sys._current_frames()[caller].f_code.co_name == "wait")
            gate.is_open.set()
            handle.wait()
            ended.set()

        other = threading.Thread(target=go_on)
        other.start()
        assert ended.wait(60)  # one call, as an edit is
        other.join()
        with pytest.raises(SealError, match="the model was being changed in place while"):
            handle.result(60)
        optimizer.close()

    def test_an_edit_after_the_result_is_fine(self, gate: SealGate) -> None:
        model, optimizer = self.start(gate)
        optimizer.checkpoint().result()
        with torch.no_grad():
            model.rows[6].mul_(0.5)
        model.fill_gradients(2)
        optimizer.step()
        assert optimizer.checkpoint().result().verify().ok
        optimizer.close()

    def test_a_second_checkpoint_waits_for_the_first(self, gate: SealGate) -> None:
        _, optimizer = self.start(gate)
        gate.shut()
        first = optimizer.checkpoint({"number": 1})
        assert gate.reached.wait(60)
        second = []
        caller = threading.Thread(target=lambda: second.append(optimizer.checkpoint({"number": 2})))
        caller.start()
        assert not second
        assert not first.done()
        gate.is_open.set()
        caller.join(60)
        assert first.done(), "the second call returned, so the first seal has ended"
        assert second[0].result(60).train_state == {"number": 2}
        optimizer.close()

    @pytest.mark.parametrize("timeout_s", [0.0, 0.01])
    def test_a_result_that_is_not_there_in_time(self, gate: SealGate, timeout_s: float) -> None:
        _, optimizer = self.start(gate)
        gate.shut()
        handle = optimizer.checkpoint()
        with pytest.raises(TimeoutError):
            handle.result(timeout_s)
        gate.is_open.set()
        assert handle.result(60).step == 1
        optimizer.close()


class TestFailedSeal:
    """The error of a seal comes out once, wherever the training thread looks next."""

    def failed(self, keep: int = 2, *, is_seen: bool = True) -> Training:
        backend = FaultBackend(MemoryBackend())
        training = Training(backend, keep=keep)
        training.steps_and_seal()
        training.step()
        num_writes = backend.num_done["write"]
        training.optimizer.synchronize()
        assert backend.num_done["write"] == num_writes
        backend.fail("write", 1, forever=False)  # the model file's
        handle = training.optimizer.checkpoint({"step": 2})
        if is_seen:
            with pytest.raises(SealError, match=r"sealing step 2 failed.*injected") as error:
                handle.result()
            assert "earlier checkpoints are untouched" in str(error.value)
            assert backend.num_failed == 1
        return training

    @pytest.mark.parametrize("keep", [1, 2], ids="keep={}".format)
    @pytest.mark.parametrize("call", ["step", "checkpoint", "synchronize"])
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
        assert found.step == 2
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
