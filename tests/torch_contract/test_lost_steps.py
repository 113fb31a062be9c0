"""Steps of which no checkpoint was made are reported when an optimizer is closed."""

from __future__ import annotations

import errno
import weakref
from typing import Any

import pytest
import torch

from gds import MemoryBackend, StorageError, WrapperBackend
from offload.errors import SealError
from tests.eventually import eventually, is_freed
from tests.stores.small import make_model, make_optimizer, memory_store, step
from tests.threads import one_thread

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


class TestClosing:
    """Not refused, as there are runs without checkpoints, but said."""

    STORE = "/run-that-is-closed"
    """Optimizers that other tests have dropped may be collected now, and say the same of theirs."""

    def said(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [message for message in caplog.messages if self.STORE in message]

    @pytest.mark.parametrize("overlap", [None, "forward", "backward"])
    @pytest.mark.parametrize("how", ["close", "with", "drop"])
    def test_steps_of_which_no_checkpoint_was_made(
        self, how: str, overlap: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, backend = make_model(), MemoryBackend()
        settings = {"overlap": overlap}
        optimizer = make_optimizer(model, backend, directory=self.STORE, settings=settings)
        for _ in range(2):
            model(torch.zeros(1, 30, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        if how == "close":
            optimizer.close()
            optimizer.close()
        elif how == "with":
            with optimizer:
                pass
        else:
            gone = weakref.ref(optimizer)
            del optimizer
            assert is_freed(gone)
            eventually(lambda: self.said(caplog))  # on another thread, if that has collected it
        (said,) = self.said(caplog)
        assert said == (
            f"{self.STORE}: 2 optimizer steps are lost: no checkpoint() was made after them; the "
            "store has none"
        )

    def test_after_a_restore(self, caplog: pytest.LogCaptureFixture) -> None:
        model, backend = make_model(), memory_store(2, directory=self.STORE)
        with make_optimizer(model, backend, directory=self.STORE) as optimizer:
            optimizer.restore()
        assert not self.said(caplog), "there was no step"
        with make_optimizer(model, backend, directory=self.STORE) as optimizer:
            optimizer.restore()
            step(optimizer)
        (said,) = self.said(caplog)
        assert "1 optimizer step is lost" in said
        assert said.endswith(f"the newest checkpoint is {self.STORE}/step-00000002")

    @pytest.mark.parametrize("overlap", [None, "forward", "backward"])
    @pytest.mark.parametrize("num_later", [0, 1, 2])
    def test_after_a_checkpoint(
        self, num_later: int, overlap: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, settings = make_model(), {"overlap": overlap}
        with make_optimizer(
            model, MemoryBackend(), directory=self.STORE, settings=settings
        ) as optimizer:
            for number in range(2 + num_later):
                model(torch.zeros(1, 30, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
                if number < 2:
                    optimizer.checkpoint()  # without later steps it ends within close()
        if num_later:
            (said,) = self.said(caplog)
            steps, them = ("step is", "it") if num_later == 1 else ("steps are", "them")
            assert said == (
                f"{self.STORE}: {num_later} optimizer {steps} lost: no checkpoint() was made after "
                f"{them}; the newest checkpoint is {self.STORE}/step-00000002"
            )
        else:
            assert not self.said(caplog)

    def test_steps_that_restore_has_given_up_are_not_lost(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = make_model()
        with make_optimizer(model, MemoryBackend(), directory=self.STORE) as optimizer:
            step(optimizer)
            optimizer.checkpoint()
            step(optimizer)
            optimizer.restore()
        assert not self.said(caplog)

    def test_steps_whose_checkpoint_failed_are_lost(self, caplog: pytest.LogCaptureFixture) -> None:
        class CannotName(WrapperBackend):
            def rename(self, source: str, target: str) -> None:
                if target.endswith("/step-00000002"):
                    raise StorageError(errno.EIO, "rename", target)
                super().rename(source, target)

        model = make_model()
        backend = CannotName(MemoryBackend())
        with make_optimizer(model, backend, directory=self.STORE) as optimizer:
            step(optimizer)
            optimizer.checkpoint().result()
            step(optimizer)
            optimizer.checkpoint()
            with pytest.raises(SealError):
                optimizer.synchronize()
        (said,) = self.said(caplog)
        assert "1 optimizer step is lost" in said
