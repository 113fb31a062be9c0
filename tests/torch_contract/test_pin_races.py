"""A pin that is made while the training process wants the place of its checkpoint."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend, WrapperBackend
from offload import open_checkpoint
from offload.errors import PinError, SealError, StoreBusyError
from tests.stores.files import write
from tests.stores.small import STORE
from tests.threads import one_thread
from tests.torch_contract.retention_run import Run, name_of

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


class TestRaces:
    """Someone pins a checkpoint at the moment at which the training process wants it back."""

    class Meeting(WrapperBackend):
        """Lets something happen just before, or just after, an exclusive lock is taken."""

        before = after = staticmethod(lambda: None)
        where = f"{STORE}/{name_of(1)}"

        def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Any:
            if path != self.where or shared:
                return super().lock(path, shared=shared, create=create)
            before, self.before = self.before, lambda: None
            before()
            lock = super().lock(path)
            after, self.after = self.after, lambda: None
            after()
            return lock

    def test_before_it_is_locked_the_pin_is_in_time(self) -> None:
        backend = self.Meeting(MemoryBackend())
        run = Run(backend, keep=1)
        path = run.seal()
        happened = []
        backend.before = lambda: happened.append(offload.pin(path, "mine", backend=backend))
        with warnings.catch_warnings():  # it may have to look for another slot
            warnings.simplefilter("ignore", RuntimeWarning)
            for _ in range(3):
                run.seal()
        assert happened == [path]
        assert run.steps() == [1, 4]
        with open_checkpoint(path, backend=backend) as pinned:
            assert pinned.verify().ok
        run.optimizer.close()

    def test_before_it_is_locked_a_pin_has_become_unreadable(self) -> None:
        backend = self.Meeting(MemoryBackend())
        run = Run(backend, keep=1)
        run.seal()
        backend.make_dir(f"{STORE}/pins")
        backend.before = lambda: write(backend, f"{STORE}/pins/mine", b"half")
        with warnings.catch_warnings():  # it may have to look for another slot
            warnings.simplefilter("ignore", RuntimeWarning)
            for _ in range(2):
                run.seal()
        assert run.steps() == [1, 2, 3]
        run.optimizer.close()

    def test_while_it_goes_back_nothing_is_withdrawn(self) -> None:
        class Reading(WrapperBackend):
            meanwhile = staticmethod(lambda: None)

            def open(self, path: str, *, writable: bool = False) -> Any:
                if path == f"{STORE}/{name_of(1)}/train_state.safetensors":
                    meanwhile, self.meanwhile = self.meanwhile, lambda: None
                    meanwhile()
                return super().open(path, writable=writable)

        backend = Reading(MemoryBackend())
        run = Run(backend, keep=3)
        for _ in range(3):
            run.seal()
        run.optimizer.close()
        run = Run(backend, keep=3)
        backend.meanwhile = lambda: offload.pin(f"{STORE}/{name_of(2)}", "mine", backend=backend)
        with pytest.raises(PinError, match="'mine', and going back"):
            run.optimizer.restore(1, discard_newer=True)
        assert run.steps() == [1, 2, 3]
        assert run.optimizer.restore().step == 3
        run.optimizer.close()

    def test_while_the_pin_is_written_it_is_passed_over(self) -> None:
        class Writing(WrapperBackend):
            meanwhile = staticmethod(lambda: None)

            def create(self, path: str, size_bytes: int) -> Any:
                if path.startswith(f"{STORE}/pins/"):
                    self.meanwhile()
                return super().create(path, size_bytes)

        backend = Writing(MemoryBackend())
        run = Run(backend, keep=1)
        path = run.seal()
        backend.meanwhile = lambda: run.seal()  # after which the first one is to go
        assert offload.pin(path, "mine", backend=backend) == path
        run.seal()
        assert run.steps() == [1, 3]
        run.optimizer.close()

    def test_after_it_is_locked_the_pin_is_refused(self) -> None:
        backend = self.Meeting(MemoryBackend())
        run = Run(backend, keep=1)
        path = run.seal()
        refused = []

        def try_to_pin() -> None:
            with pytest.raises(StoreBusyError, match="being recycled") as caught:
                offload.pin(path, "mine", backend=backend)
            refused.append(caught.value)

        backend.after = try_to_pin
        for _ in range(3):
            run.seal()
        assert len(refused) == 1
        assert run.steps() == [4]
        assert "pins" not in backend.list_dir(STORE)
        run.optimizer.close()

    def test_while_a_seal_wants_its_place(self) -> None:
        backend = self.Meeting(MemoryBackend())
        run = Run(backend, keep=2)
        path = run.seal()
        backend.before = lambda: offload.pin(path, "mine", backend=backend)
        with torch.no_grad():
            run.model.weight.zero_()
        with pytest.raises(SealError, match="pinned as 'mine'"):
            run.optimizer.checkpoint().result()
        with pytest.raises(SealError, match="pinned as 'mine'"):
            run.step()
        run.seal()
        assert run.steps() == [1, 2]
        with open_checkpoint(path, backend=backend) as pinned:
            assert pinned.verify().ok
        run.optimizer.close()
