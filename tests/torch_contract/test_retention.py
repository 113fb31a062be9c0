"""Policies: which checkpoints a store keeps, and how many slots it has."""

from __future__ import annotations

from typing import Any

import pytest

from gds import Backend, MemoryBackend, WrapperBackend
from offload import BestBy, EverySteps, LastK, Retention, list_checkpoints, open_checkpoint
from offload.errors import StoreFullError
from tests.stores.small import STORE
from tests.threads import one_thread
from tests.torch_contract.retention_run import Run, name_of

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


class Counted(MemoryBackend):
    """Counts the slots that there are at most."""

    most = 0

    def make_dir(self, path: str) -> None:
        super().make_dir(path)
        if path.startswith(f"{STORE}/.slot-"):
            names = [n for n in self.list_dir(STORE) if n.startswith((".slot-", "step-"))]
            self.most = max(self.most, len(names))


class TestPolicies:
    def test_every_third_step_stays_beside_the_newest(self) -> None:
        run = Run(keep=LastK(2) | EverySteps(3))
        for step in range(1, 11):
            run.seal()
            kept = {s for s in range(1, step + 1) if s % 3 == 0 or s > step - 2}
            assert run.steps() == sorted(kept)
            assert len(run.slots()) <= len(kept) + 1
        for step in run.steps():
            with open_checkpoint(f"{STORE}/{name_of(step)}", backend=run.backend) as found:
                assert found.verify().ok
        run = run.next_process(keep=LastK(2) | EverySteps(3))
        run.seal()
        assert run.steps() == [3, 6, 9, 10, 11]
        run.optimizer.close()

    def test_as_many_slots_as_are_kept_and_one(self) -> None:
        """Also while seals are in flight, and however many have come to stay."""
        backend = Counted()
        run = Run(backend, keep=LastK(1) | EverySteps(2))
        for _ in range(7):
            run.step()
            run.optimizer.checkpoint()
        run.optimizer.close()
        assert run.steps() == [2, 4, 6, 7]
        assert backend.most == 4  # before step 7 is sealed: 2, 4, 6 and the slot it is written to

    @pytest.mark.parametrize("mode", ["min", "max"])
    def test_the_best_by_a_metric(self, mode: Any, caplog: pytest.LogCaptureFixture) -> None:
        losses = [3.0, 1.0, 2.0, 0.5, 4.0, 4.0]
        sign = 1 if mode == "min" else -1
        run = Run(keep=BestBy("loss", mode=mode))
        for step, loss in enumerate(losses, 1):
            run.seal(loss=sign * loss)
            best = min(range(step), key=lambda n: losses[n]) + 1
            assert run.steps() == sorted({best, step})
            assert len(run.slots()) <= 3
        run.optimizer.close()
        # No step has waited for a slot, and taken one more than retention has room for.
        assert [record.getMessage() for record in caplog.records] == []

    def test_the_best_stays_until_a_better_one_is_durable(self) -> None:
        """The one that is being sealed is the best so far; until it is a checkpoint it is not."""

        class Looking(WrapperBackend):
            def __init__(self, inner: Backend) -> None:
                super().__init__(inner)
                self.seen: list[list[str]] = []

            def rename(self, source: str, target: str) -> None:
                if target.endswith(name_of(4)):
                    self.seen.append([n for n in self.list_dir(STORE) if n.startswith("step-")])
                super().rename(source, target)

        backend = Looking(MemoryBackend())
        run = Run(backend, keep=LastK(2) | BestBy("loss"))
        for loss in (1.0, 2.0, 3.0):
            run.seal(loss=loss)
        run.seal(loss=0.5)
        assert backend.seen == [[name_of(1), name_of(3)]]
        assert run.steps() == [3, 4]
        run.optimizer.close()

    @pytest.mark.filterwarnings("ignore:.* no checkpoint has the metric 'none'")
    @pytest.mark.parametrize(
        "keep", [1, EverySteps(4), BestBy("loss"), LastK(1) | BestBy("none")], ids=str
    )
    def test_one_is_durable_at_every_instant(self, keep: int | Retention) -> None:
        class Looking(WrapperBackend):
            least = 9

            def rename(self, source: str, target: str) -> None:
                super().rename(source, target)
                names = [n for n in self.list_dir(STORE) if n.startswith("step-")]
                self.least = min(self.least, len(names))

        backend = Looking(MemoryBackend())
        run = Run(backend, keep=keep)
        for loss in (3.0, 2.0, 1.0, 4.0, 0.5, 6.0):
            run.step()
            run.optimizer.checkpoint(metrics={"loss": loss})
        run.optimizer.close()
        assert backend.least == 1

    def test_a_narrower_policy_gives_slots_back(self) -> None:
        run = Run(keep=EverySteps(1))
        for _ in range(6):
            run.seal()
        assert len(run.slots()) == 6
        run = run.next_process(keep=2)
        run.seal()
        assert run.steps() == [6, 7]
        assert len(run.slots()) == 3
        run.optimizer.close()

    def test_directories_that_are_not_usable_do_not_count(self) -> None:
        run = Run(keep=3)
        for _ in range(3):
            run.seal()
        run.optimizer.close()
        backend = run.backend.reopened()
        for step in (2, 3):
            backend.remove(f"{STORE}/{name_of(step)}/exp_avg.safetensors")
        run = Run(backend, keep=LastK(1) | EverySteps(2))
        with pytest.warns(RuntimeWarning, match=r"not using .*exp_avg.safetensors: missing"):
            assert run.optimizer.restore().step == 1
        run.step()
        with open_checkpoint(f"{STORE}/{name_of(1)}", backend=backend) as only:
            assert only.verify().ok  # the one durable checkpoint, two broken ones notwithstanding
        run.optimizer.close()

    def test_room_is_asked_for_at_construction(self) -> None:
        run = Run(keep=1)
        run.seal()
        slot_bytes = list_checkpoints(STORE, backend=run.backend)[0].bytes
        run.optimizer.close()
        policy = LastK(2) | BestBy("loss", 2) | EverySteps(1000)
        with pytest.raises(StoreFullError, match="needs 5 more slots") as caught:
            Run(MemoryBackend(capacity_bytes=5 * slot_bytes - 1), keep=policy)
        assert "LastK(k=2) | BestBy(metric='loss'" in str(caught.value)
        Run(MemoryBackend(capacity_bytes=5 * slot_bytes), keep=policy).optimizer.close()

    def test_the_number_that_keep_was_is_a_policy(self) -> None:
        a, b = Run(keep=2), Run(keep=LastK(2))
        for _ in range(4):
            for run in (a, b):
                run.seal()
        assert a.backend.list_dir(STORE) == b.backend.list_dir(STORE)
        for run in (a, b):
            run.optimizer.close()

    def test_something_else_is_refused(self) -> None:
        with pytest.raises(TypeError, match="a number of checkpoints or a policy"):
            Run(keep="best")
