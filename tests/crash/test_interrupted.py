"""Ctrl-C while a seal is in flight, and damage that only the first step after a resume can see."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import offload.engine.seal
from gds import MemoryBackend, PosixBackend
from gds.backends.wrapper import WrapperBackend, WrapperFile
from gds.contract import File
from offload import open_checkpoint
from offload.errors import BrokenOptimizerError, CheckpointError
from tests.stores.training import Model, Reference, backward, differences, optimizer_for, options


class GatedSync(WrapperBackend):
    """Syncs of ``model.safetensors`` wait for `gate`."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.gate = threading.Event()

    def wrap_file(self, file: File) -> File:
        return _GatedFile(file, self)


class _GatedFile(WrapperFile):
    def __init__(self, inner: File, backend: GatedSync) -> None:
        super().__init__(inner)
        self._backend = backend

    def sync(self) -> None:
        if self.path.endswith("model.safetensors"):
            self._backend.gate.wait()
        super().sync()


@pytest.mark.parametrize("then", ["steps", "closes"])
def test_an_interrupted_wait_leaves_the_seal_in_flight(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = GatedSync()
    model = Model()
    optimizer = optimizer_for(model, "/run", options(backend), keep=3)
    backward(model, 1)
    optimizer.step()
    handle = optimizer.checkpoint()

    def interrupted(handle: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(offload.engine.seal.SealHandle, "wait", interrupted)
        for call in (optimizer.synchronize, optimizer.close):
            with pytest.raises(KeyboardInterrupt):
                call()
    assert not handle.done()
    if then == "steps":
        backward(model, 2)
        optimizer.step()
    backend.gate.set()
    assert handle.result().step == 1
    for step in (3, 4) if then == "steps" else ():
        optimizer.checkpoint().result()
        backward(model, step)
        optimizer.step()
    optimizer.close()
    with open_checkpoint("/run/step-00000001", backend=backend) as found:
        assert found.verify().ok
        assert differences(found, backend, Reference().after(1)) == []


@pytest.mark.parametrize("array", ["master", "exp_avg", "exp_avg_sq"])
def test_damaged_state_is_not_trained_on(tmp_path: Path, array: str) -> None:
    model = Model()
    with optimizer_for(model, str(tmp_path), options()) as optimizer:
        for step in (1, 2):
            backward(model, step)
            optimizer.step()
            optimizer.checkpoint().result()
    damaged = tmp_path / "step-00000002" / f"{array}.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-9] ^= 0x10
    damaged.write_bytes(data)

    model = Model()
    optimizer = optimizer_for(model, str(tmp_path), options())
    assert optimizer.restore() is not None
    backward(model, 3)
    with pytest.raises(CheckpointError, match=rf"{array}\.safetensors: bytes .* are damaged"):
        optimizer.step()
    with pytest.raises(BrokenOptimizerError):
        optimizer.checkpoint()
    with pytest.warns(RuntimeWarning, match="not using .*step-00000002"):
        found = optimizer.restore()
    assert found is not None
    backward(model, 2)
    optimizer.step()
    sealed = optimizer.checkpoint().result()
    assert differences(sealed, PosixBackend(), Reference().after(2)) == []
    optimizer.close()


def test_one_collected_on_a_thread_that_is_being_started_is_closed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There no thread can be joined: closing on the spot would wait for ever."""
    model = Model()
    optimizer = optimizer_for(model, str(tmp_path), options())
    backward(model, 1)
    optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr("offload.engine.finalizer._is_starting_thread", lambda: True)
        optimizer._finalizer()
    with optimizer_for(Model(), str(tmp_path), options()) as other:  # the lock is free
        assert other.restore() is None
