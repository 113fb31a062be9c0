"""Several processes and readers at one store: who is let in, and what stays while one reads."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gds import MemoryBackend, PosixBackend
from offload import (
    SealError,
    StoreLockedError,
    list_checkpoints,
    load_parameters,
    open_checkpoint,
)
from tests.crash import children as child
from tests.crash.trained import STORE, Training
from tests.eventually import eventually
from tests.forking import Children
from tests.stores.files import contents
from tests.stores.training import (
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
    same_bits,
)


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
        """Whatever workers it has forked: they do not keep the lock."""
        os.mkfifo(tmp_path / "announcements")
        holder = children.start(child.hold_the_store_and_fork, tmp_path)
        worker = int((tmp_path / "announcements").read_text())
        try:
            found = children.run(child.refused, tmp_path)
            assert found.output.startswith("StoreLockedError")
            assert "another process" in found.output
            assert f"`fuser -v {tmp_path}/run/LOCK` says which process it is" in found.output
            assert f"(process {holder} on host {socket.gethostname()}, since 20" in found.output
            os.kill(holder, signal.SIGKILL)
            children.wait(holder, tmp_path)
            os.kill(worker, 0)  # it lives
            assert children.run(child.refused, tmp_path).output == "opened\n"
        finally:
            os.kill(worker, signal.SIGKILL)

    @pytest.mark.parametrize(
        ("work", "status"),
        [
            (child.checkpoint_in_an_exit_handler, 0),
            (child.end_amid_a_backward, 1),
        ],
        ids=["in an exit handler", "amid a backward"],
    )
    def test_what_was_asked_for_is_there_when_a_program_ends(
        self,
        work: Callable[[str], None],
        status: int,
        children: Children,
        tmp_path: Path,
    ) -> None:
        """`tests/kernel/test_endings.py` has other ends."""
        ended = children.run(work, tmp_path)
        assert ended.status is not None, "it hangs"
        assert os.waitstatus_to_exitcode(ended.status) == status, ended.output
        with open_checkpoint(tmp_path / "run") as found:
            assert found.train_state == {"step": 2}
            assert differences(found, PosixBackend(), Reference().after(2)) == []

    def test_a_signal_handler_that_finds_half_a_step_is_refused(
        self, children: Children, tmp_path: Path
    ) -> None:
        ended = children.run(child.called_within_a_step, tmp_path)
        assert ended.status == 0, ended
        calls = ("checkpoint", "restore", "step", "close")
        for call, line in zip(calls, ended.output.splitlines(), strict=True):
            assert line.startswith(f"{call}: OffloadError: "), "it must not work on half a step"
            assert "signal handler" in line
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
        assert eventually(lambda: gc.collect() < 0 or not any(t.is_alive() for t in own))
        with optimizer_for(model, store, options()) as successor:
            found = successor.restore()
            assert (found.step if found else 0) == int(sealing)


class TestReaders:
    def test_a_reader_sees_the_same_bits_while_training_goes_on(self) -> None:
        training = Training(MemoryBackend(), keep=2)
        path = training.steps_and_seal()
        with open_checkpoint(path, backend=training.backend) as reader:
            for _ in range(2):  # the step after that has no slot left
                training.steps_and_seal()
                assert differences(reader, training.backend, Reference().after(1)) == []
            other = Model(history=5)
            assert load_parameters(other, path, backend=training.backend) == 1
            assert same_bits(other.state_dict(), Reference().after(1).model)
        training.steps_and_seal()
        assert training.backend.stat(path) is None
        training.optimizer.close()

    @pytest.mark.parametrize("action", ["always", "error"])
    def test_a_reader_that_nobody_closed_lets_go_when_it_is_dropped(
        self, tmp_path: Path, action: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        raised: list[BaseException | None] = []
        monkeypatch.setattr(sys, "unraisablehook", lambda found: raised.append(found.exc_value))
        training = Training(PosixBackend(), str(tmp_path / "run"), keep=1)
        path = training.steps_and_seal()
        enabled = gc.isenabled()
        gc.collect()
        gc.disable()  # when Python next collects cycles is nothing that a step may depend on
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter(action)
                assert open_checkpoint(path).step == 1
            said = [str(warning.message) for warning in caught] + [str(error) for error in raised]
            assert any("step-00000001: never closed; use `with`" in line for line in said)
            training.steps_and_seal(2)
        finally:
            if enabled:
                gc.enable()
        assert not os.path.exists(path)
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
            found = differences(reader, training.backend, Reference().after(1))
            assert found == ["parameters or buffers"]
            assert reader.verify().ok
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
