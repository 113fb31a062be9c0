"""What a store keeps while it trains: policies, metrics and pins, and a disk that is full."""

from __future__ import annotations

import errno
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import offload
from gds import Backend, MemoryBackend, StorageError, WrapperBackend
from offload import (
    AdamW,
    BestBy,
    EverySteps,
    LastK,
    Options,
    Retention,
    list_checkpoints,
    open_checkpoint,
)
from offload.errors import (
    CheckpointNotFoundError,
    MetricError,
    PinError,
    SealError,
    StoreBusyError,
    StoreFullError,
)
from offload.format.manifest import Manifest, decode
from offload.format.metrics import check_metrics, usable_metrics
from offload.store.pruning import prune

STORE = "/run"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Run:
    """A small model in training, step by step."""

    def __init__(self, backend: Backend | None = None, **changes: Any) -> None:
        self.backend = backend or MemoryBackend()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = torch.nn.Linear(60, 40).to(torch.bfloat16)
        overlap = changes.pop("overlap", None)
        settings = Options(
            backend=self.backend,
            allow_volatile=True,
            chunk_bytes=4096,
            train_state_bytes=8192,
            overlap=overlap,
        )
        arguments = {"directory": STORE, "model": self.model, "options": settings, **changes}
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2, **arguments)

    @property
    def at(self) -> int:
        return self.optimizer.num_steps

    def backward(self) -> None:
        generator = torch.Generator().manual_seed(self.at)
        x = torch.randn(4, 60, generator=generator).to(torch.bfloat16)
        self.model(x).float().square().mean().backward()

    def step(self, num: int = 1) -> None:
        for _ in range(num):
            self.optimizer.zero_grad()
            self.backward()
            self.optimizer.step()

    def seal(self, num_steps: int = 1, **metrics: float) -> str:
        self.step(num_steps)
        return self.optimizer.checkpoint({"at": self.at}, metrics=metrics or None).result().path

    def steps(self) -> list[int]:
        """The steps of all checkpoints, each looked at as a reader would."""
        found = list_checkpoints(STORE, backend=self.backend)
        assert all(info.valid for info in found)
        return [info.step for info in found]

    def slots(self) -> list[str]:
        names = self.backend.list_dir(STORE)
        return [name for name in names if name.startswith((".slot-", "step-"))]

    def next_process(self, **changes: Any) -> Run:
        self.optimizer.close()
        assert isinstance(self.backend, MemoryBackend)
        successor = Run(self.backend.reopened(), **changes)
        successor.optimizer.restore()
        return successor

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def name_of(step: int) -> str:
    return f"step-{step:08d}"


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


class TestMetrics:
    def test_are_kept_with_the_checkpoint(self) -> None:
        run = Run()
        path = run.seal(loss=1.25, tokens=3)
        with open_checkpoint(path, backend=run.backend) as found:
            assert found.metrics == {"loss": 1.25, "tokens": 3.0}
            assert type(found.metrics["tokens"]) is float
        assert list_checkpoints(STORE, backend=run.backend)[0].metrics == found.metrics
        assert run.optimizer.checkpoint().result().metrics == {"loss": 1.25, "tokens": 3.0}
        run.seal()
        assert [i.metrics for i in list_checkpoints(STORE, backend=run.backend)][1] == {}
        run.optimizer.close()

    def test_can_be_measured_after_the_checkpoint_was_made(self) -> None:
        run = Run(keep=BestBy("loss"))
        run.seal(loss=1.0)
        run.seal()
        before = run.slots()
        handle = run.optimizer.checkpoint({"at": run.at}, metrics={"loss": 0.5})
        assert handle.result().metrics == {"loss": 0.5}
        assert run.slots() == before, "the checkpoint is the same directory"
        with open_checkpoint(STORE, backend=run.backend) as found:
            assert (found.step, found.metrics) == (2, {"loss": 0.5})
            assert found.verify().ok
        run.seal(loss=9.0)
        assert run.steps() == [2, 3]
        run = run.next_process(keep=BestBy("loss"))
        run.optimizer.checkpoint({"at": 3}, metrics={"loss": 0.1}).result()
        run.seal()
        assert run.steps() == [3, 4]
        run.optimizer.close()

    def test_one_that_is_never_given_is_warned_of_once(self) -> None:
        run = Run(keep=LastK(1) | BestBy("val_loss") | BestBy("accuracy", mode="max"))
        run.seal(accuracy=0.5)
        run.optimizer.checkpoint({"at": 1})  # of the same step, for which it may still be given
        with pytest.warns(
            RuntimeWarning, match=r"'val_loss', .* got 'loss' for step 2.*metrics=\{'val_loss': val"
        ) as said:
            run.seal(loss=1.0)
        assert len(said) == 1
        assert said[0].filename == __file__
        run.seal()  # warnings are errors in these tests
        run = run.next_process(keep=LastK(1) | BestBy("val_loss"))
        run.seal()
        with pytest.warns(RuntimeWarning, match=r"'val_loss'.*got no metrics for step 5"):
            run.seal()
        run.seal(val_loss=1.0)
        run = run.next_process(keep=LastK(1) | BestBy("val_loss"))
        for _ in range(3):
            run.seal()  # it was given before
        run.optimizer.close()

    @pytest.mark.parametrize("overlap", ["forward", "backward"])
    def test_with_a_step_beside_the_model(self, overlap: str) -> None:
        run = Run(overlap=overlap, keep=LastK(1) | BestBy("loss"))
        for loss in (2.0, 1.0, 3.0):
            run.step()
            handle = run.optimizer.checkpoint(metrics={"loss": loss})
            if loss == 1.0:
                run.optimizer.pin("lowest")  # waits for it
        assert handle.result().metrics == {"loss": 3.0}
        assert [i.pins for i in list_checkpoints(STORE, backend=run.backend)] == [("lowest",), ()]
        run.optimizer.close()

    @pytest.mark.parametrize(
        ("metrics", "message"),
        [
            ({"loss": True}, "metric 'loss' is a bool"),
            ({"loss": "low"}, "metric 'loss' is a str"),
            ({"loss": None}, "metric 'loss' is a NoneType"),
            ({"loss": torch.ones(2)}, r"metric 'loss' is a Tensor, expected one number, got tens"),
            ({"loss": torch.ones(0)}, "metric 'loss' is a Tensor, expected one number"),
            ({"loss": torch.tensor(True)}, "metric 'loss' is a Tensor"),
            ({"loss": torch.tensor(1j)}, "metric 'loss' is a Tensor"),
            ({"loss": torch.ones((), device="meta")}, "metric 'loss' is a Tensor"),
            ({"loss": np.ones(3)}, "metric 'loss' is a ndarray"),
            ({"nan": math.nan, "loss": "low"}, "metric 'loss' is a str"),  # said before the other
            ({"": 1.0}, "the name of a metric"),
            ({"x" * 65: 1.0}, "the name of a metric"),
            ({3: 1.0}, "the name of a metric"),
            ({str(n): 1.0 for n in range(17)}, "17 metrics, at most 16"),
            ([("loss", 1.0)], "metrics must be a dict"),
        ],
    )
    def test_that_cannot_be_ranked_are_refused(self, metrics: Any, message: str) -> None:
        run = Run()
        run.step()
        with pytest.raises(MetricError, match=message):
            run.optimizer.checkpoint(metrics=metrics)
        assert run.steps() == []
        run.optimizer.checkpoint(metrics={"loss": np.float64(1)}).result()
        run.optimizer.close()

    @pytest.mark.parametrize(
        "value",
        [2, torch.tensor(2.0), torch.tensor([[2]]), torch.tensor(2.0).half(), np.float32(2),
         np.int8(2), np.full((1, 1), 2.0), torch.nn.Parameter(torch.tensor(2.0)) * 1],
        ids=repr,
    )  # fmt: skip
    def test_tensors_and_values_of_numpy_are_numbers(self, value: Any) -> None:
        run = Run()
        run.step()
        assert run.optimizer.checkpoint(metrics={"loss": value}).result().metrics == {"loss": 2.0}
        run.optimizer.close()

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (math.nan, "nan"),
            (-math.inf, "-inf"),
            (10**400, "inf"),
            (-(10**400), "-inf"),
            (torch.tensor(math.nan), "nan"),
            (np.float32("inf"), "inf"),
        ],
    )
    def test_one_that_is_not_finite_is_left_out_and_the_checkpoint_is_made(
        self, value: Any, said: str
    ) -> None:
        run = Run()
        run.step()
        metrics = {"loss": value, "acc": 0.5}
        with pytest.warns(RuntimeWarning, match=f"metric 'loss' is {said}, .*without it") as warned:
            made = run.optimizer.checkpoint(metrics=metrics).result()
        assert made.metrics == {"acc": 0.5}
        assert [each.filename for each in warned] == [__file__]
        assert run.steps() == [1]
        run.optimizer.close()

    def test_one_that_was_left_out_takes_no_part_in_what_is_best(self) -> None:
        run = Run(keep=BestBy("loss") | LastK(1))
        for loss in (3.0, 1.0, math.nan, math.nan, 2.0):
            run.step()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                run.optimizer.checkpoint(metrics={"loss": loss}).result()
            assert [str(each.message)[:20] for each in said] == (
                ["metric 'loss' is nan"] if math.isnan(loss) else []
            )
        assert run.steps() == [2, 5]
        run.optimizer.close()

    def test_a_manifest_with_a_number_that_is_not_finite_is_refused(self) -> None:
        for value in (math.nan, math.inf):
            with pytest.raises(MetricError, match="metric 'loss' must be finite"):
                check_metrics({"loss": value})

    def test_what_a_library_has_measured_is_taken_as_far_as_it_can_be(self) -> None:
        measured = {
            "eval_loss": np.float32(0.5),
            "acc": torch.tensor([0.25]),
            "nan": math.nan,
            "huge": 10**400,
            "matrix": torch.zeros(2, 2),
            "name": "text",
            "none": None,
            "x" * 65: 1.0,
            "": 1.0,
        }
        found = usable_metrics(measured, ("absent", "acc"))
        assert found == {"acc": 0.25, "eval_loss": 0.5}
        many = {str(n): n for n in range(40)}
        assert list(usable_metrics(many, ("39",))) == ["39", *map(str, range(15))]
        assert check_metrics(found) == found

    def test_the_most_and_longest_fit(self) -> None:
        run = Run()
        metrics = {chr(0x1F600 + n) * 64: -1.7976931348623157e308 for n in range(16)}
        path = run.seal(**metrics)
        with open_checkpoint(path, backend=run.backend) as found:
            assert found.metrics == metrics
        run.optimizer.close()

    def test_a_checkpoint_without_metrics_is_written_as_before(self) -> None:
        run = Run()
        manifest = read_manifest(run.backend, run.seal())
        assert b'"metrics"' not in manifest.encode(1 << 20)
        measured = replace(manifest, metrics={"loss": 1.0})
        assert decode(measured.encode(1 << 20), "here") == measured
        run.optimizer.close()


def read(backend: Backend, path: str) -> bytes:
    file = backend.open(path)
    try:
        return file.read_bytes(0, file.size_bytes)
    finally:
        file.close()


def overwrite(backend: Backend, path: str, data: bytes) -> None:
    if backend.stat(path) is not None:
        backend.remove(path)
    file = backend.create(path, len(data))
    if data:
        file.write_bytes(data, 0)
    file.close()


def read_manifest(backend: Backend, path: str) -> Manifest:
    return decode(read(backend, f"{path}/manifest.json"), path)


class TestPins:
    def test_a_pinned_checkpoint_stays_whatever_keep_says(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        run = Run(keep=1)
        run.seal()
        run.optimizer.pin("best")
        for _ in range(4):
            run.seal()
        assert run.steps() == [1, 5]
        assert len(run.slots()) == 3
        run = run.next_process(keep=1)
        run.seal()
        assert run.steps() == [1, 6]
        run.optimizer.unpin("best")
        run.seal()
        assert run.steps() == [7]
        assert len(run.slots()) == 2
        run.optimizer.close()
        assert "one slot more" not in caplog.text, "a step waited for what is pinned"

    def test_a_name_moves(self) -> None:
        run = Run(keep=1)
        run.seal()
        run.optimizer.pin("best")
        run.seal()
        run.optimizer.pin("best", 2)
        run.optimizer.pin("also", f"{STORE}/{name_of(2)}")
        run.seal()
        assert run.steps() == [2, 3]
        infos = list_checkpoints(STORE, backend=run.backend)
        assert [info.pins for info in infos] == [("also", "best"), ()]
        run.optimizer.close()

    def test_a_name_is_never_gone_while_it_moves(self) -> None:
        class Looking(WrapperBackend):
            num_seen = 0

            def remove(self, path: str) -> None:
                super().remove(path)
                self.look()

            def rename(self, source: str, target: str) -> None:
                super().rename(source, target)
                self.look()

            def look(self) -> None:
                if self.num_seen:
                    assert self.inner.stat(f"{STORE}/pins/best") is not None
                    self.num_seen += 1

        backend = Looking(MemoryBackend())
        run = Run(backend, keep=2)
        run.seal()
        run.optimizer.pin("best")
        run.seal()
        backend.num_seen = 1
        run.optimizer.pin("best")
        assert backend.num_seen > 1
        run.optimizer.close()

    def test_by_another_process_beside_the_training(self) -> None:
        run = Run(keep=1)
        path = run.seal()
        assert offload.pin(STORE, "best", backend=run.backend) == path
        run.seal()
        run.seal()
        assert run.steps() == [1, 3]
        offload.unpin(STORE, "best", backend=run.backend)
        run.seal()
        assert run.steps() == [4]
        run.optimizer.close()

    def test_by_handle(self) -> None:
        run = Run(keep=1)
        run.step()
        first = run.optimizer.checkpoint().result()
        offload.pin(first, "first")
        run.seal()
        run.seal()
        assert run.steps() == [1, 3]
        run.optimizer.unpin("first")
        run.seal()
        with pytest.raises(CheckpointNotFoundError):
            offload.pin(first, "first")
        with pytest.raises(CheckpointNotFoundError):
            run.optimizer.pin("first", first)
        run.optimizer.close()

    def test_of_a_generation_that_is_gone_pin_nothing(self) -> None:
        run = Run(keep=2)
        run.step()
        first = run.optimizer.checkpoint().result()
        run.model.weight.data.zero_()
        run.seal(0)
        with pytest.raises(CheckpointNotFoundError, match="generation 1 has been recycled"):
            offload.pin(first, "first")
        run.optimizer.close()

    @pytest.mark.parametrize("which", [None, 7, "step-00000007"])
    def test_of_what_is_not_there(self, which: Any) -> None:
        run = Run()
        with pytest.raises(CheckpointNotFoundError):
            run.optimizer.pin("best", which)
        with pytest.raises(CheckpointNotFoundError, match=r"no pin 'best'.*it has: none"):
            run.optimizer.unpin("best")
        assert run.backend.list_dir(STORE) == ["LOCK"]
        run.optimizer.close()

    @pytest.mark.parametrize(
        "name", ["", ".", "..", "a/b", ".hidden", "x" * 65, "a b", "a\0", "ä", 3]
    )
    def test_names_never_become_paths(self, name: Any) -> None:
        run = Run()
        path = run.seal()
        before = run.backend.list_dir(STORE)
        for call in (
            lambda: run.optimizer.pin(name),
            lambda: run.optimizer.unpin(name),
            lambda: offload.pin(path, name, backend=run.backend),
            lambda: offload.unpin(STORE, name, backend=run.backend),
        ):
            with pytest.raises(PinError, match="cannot be the name of a pin"):
                call()
        assert run.backend.list_dir(STORE) == before
        run.optimizer.close()

    def test_a_checkpoint_outside_a_store_needs_none(self) -> None:
        run = Run()
        path = run.seal()
        run.optimizer.close()
        backend = run.backend.reopened()
        backend.make_dir("/kept")
        backend.rename(path, "/kept/step-00000001")
        with pytest.raises(PinError, match="needs no pin"):
            offload.pin("/kept/step-00000001", "best", backend=backend)

    def test_what_replaces_or_withdraws_a_pinned_one_is_refused(self) -> None:
        run = Run(keep=3)
        for _ in range(3):
            run.seal()
        run.optimizer.pin("mine", 3)
        before = run.parameters()
        with pytest.raises(PinError, match=r"step-00000003: pinned as 'mine', and going back"):
            run.optimizer.restore(1, discard_newer=True)
        assert all(map(torch.equal, before, run.parameters()))
        with torch.no_grad():
            run.model.weight.zero_()
        with pytest.raises(PinError, match=r"'mine', and sealing this step anew would replace it"):
            run.optimizer.checkpoint()
        assert run.steps() == [1, 2, 3]
        run.seal()  # training is able to go on
        run.optimizer.close()
        with pytest.raises(PinError, match=r"fresh=True would withdraw it. Call unpin\('mine'\)"):
            Run(run.backend.reopened(), fresh=True)
        run = Run(run.backend.reopened())  # the refusal has let go of the lock
        run.optimizer.unpin("mine")
        assert run.optimizer.restore(2, discard_newer=True).step == 2
        run.optimizer.close()

    def test_an_unusable_one_is_not_replaced_either(self) -> None:
        run = Run(keep=2)
        run.seal()
        run.seal()
        run.optimizer.pin("mine")
        run.optimizer.close()
        backend = run.backend.reopened()
        backend.remove(f"{STORE}/{name_of(2)}/exp_avg.safetensors")
        run = Run(backend, keep=2)
        with pytest.warns(RuntimeWarning, match="not using"):
            assert run.optimizer.restore().step == 1
        run.step()
        with pytest.raises(PinError, match="take another step first"):
            run.optimizer.checkpoint()
        assert [i.pins for i in list_checkpoints(STORE, backend=backend)] == [(), ("mine",)]
        run.seal()
        assert [i.step for i in list_checkpoints(STORE, backend=backend)] == [1, 2, 3]
        run.optimizer.close()

    def test_of_a_checkpoint_that_was_removed_by_hand_is_reported(self) -> None:
        run = Run(keep=2)
        run.seal()
        run.optimizer.pin("mine")
        run.seal()
        run.optimizer.close()
        backend = run.backend.reopened()
        for name in backend.list_dir(f"{STORE}/{name_of(1)}"):
            backend.remove(f"{STORE}/{name_of(1)}/{name}")
        backend.remove_dir(f"{STORE}/{name_of(1)}")
        with pytest.warns(RuntimeWarning, match=r"pinned as 'mine', step-00000001.*not there any"):
            run = Run(backend)
        run.optimizer.restore()
        run.seal()
        run.optimizer.restore(2, discard_newer=True)
        run.optimizer.unpin("mine")
        assert run.optimizer.restore().step == 2
        run.optimizer.close()

    def test_of_another_generation_of_the_same_name_keeps_nothing(self) -> None:
        run = Run(keep=1)
        run.seal()
        run.optimizer.pin("mine")
        document = json.loads(read(run.backend, f"{STORE}/pins/mine"))
        assert document["body"]["checkpoint"] == name_of(1)
        run.optimizer.unpin("mine")
        other = Run(keep=1)  # another store, with a checkpoint of the same name and generation
        other.seal()
        other.backend.make_dir(f"{STORE}/pins")
        overwrite(other.backend, f"{STORE}/pins/mine", json.dumps(document).encode().ljust(512))
        other.seal()
        assert other.steps() == [2]
        for one in (run, other):
            one.optimizer.close()

    @pytest.mark.parametrize(
        "damage",
        [
            pytest.param(lambda _: b"", id="empty"),
            pytest.param(lambda _: b"\xff" * 512, id="not text"),
            pytest.param(lambda _: b"{}".ljust(512), id="nothing in it"),
            pytest.param(lambda _: b"[]".ljust(512), id="a list"),
            pytest.param(lambda _: b"[" * 512, id="nested"),
            pytest.param(lambda _: b'{"format":2}'.ljust(512), id="another version"),
            pytest.param(
                lambda data: data.replace(b'"generation": 1', b'"generation": 3'), id="edited"
            ),
            pytest.param(lambda data: data + b" ", id="too long"),
        ],
    )
    def test_one_that_cannot_be_read_keeps_everything(
        self, damage: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        run = Run(keep=1)
        run.seal()
        run.optimizer.pin("mine")
        path = f"{STORE}/pins/mine"
        data = read(run.backend, path)
        assert damage(data) != data
        overwrite(run.backend, path, damage(data))
        for _ in range(2):
            run.seal()
        assert run.steps() == [1, 2, 3]
        assert "one slot more" not in caplog.text, "a step waited for what is kept"
        with pytest.raises(PinError, match="nothing is removed"):
            prune(STORE, LastK(1), backend=run.backend)
        run.optimizer.close()
        backend = run.backend.reopened()
        with pytest.warns(RuntimeWarning, match=r"pins/mine: cannot be read as a pin.*until then"):
            run = Run(backend, keep=1)
        run.optimizer.restore()
        with pytest.raises(PinError, match="cannot be read as a pin"):
            run.optimizer.restore(1, discard_newer=True)
        run.optimizer.unpin("mine")
        run.seal()
        assert run.steps() == [4]
        run.optimizer.close()

    def test_nothing_is_replaced_while_one_cannot_be_read(self) -> None:
        run = Run(keep=2)
        run.seal()
        run.optimizer.pin("mine")
        run.seal()
        overwrite(run.backend, f"{STORE}/pins/mine", b"half")
        with torch.no_grad():
            run.model.weight.zero_()
        with pytest.raises(PinError, match=r"would be replaced, and .*cannot be read as a pin"):
            run.optimizer.checkpoint()
        assert run.steps() == [1, 2]
        run.optimizer.close()

    def test_a_file_in_the_place_of_all_pins_keeps_everything(self) -> None:
        run = Run(keep=1)
        run.seal()
        overwrite(run.backend, f"{STORE}/pins", b"mine")
        run.seal()
        assert run.steps() == [1, 2]
        with pytest.raises(StorageError):
            run.optimizer.pin("mine")
        run.optimizer.close()
        with pytest.warns(RuntimeWarning, match="pins: a file, expected the directory of pins"):
            Run(run.backend.reopened(), keep=1).optimizer.close()

    def test_files_that_nobody_could_have_made_a_pin_are_ignored(self) -> None:
        run = Run(keep=1)
        run.seal()
        run.optimizer.pin("mine")
        overwrite(run.backend, f"{STORE}/pins/.mine.9-9.new", b"half")
        overwrite(run.backend, f"{STORE}/pins/~backup", b"")
        run.seal()
        run.seal()
        assert run.steps() == [1, 3]
        run.optimizer.close()

    def test_on_several_drives(self) -> None:
        backend = MemoryBackend()
        run = Run(backend, directory=[STORE, "/other"], keep=1)
        run.seal()
        run.optimizer.pin("best")
        for _ in range(3):
            run.seal()
        assert run.steps() == [1, 4]
        with open_checkpoint(f"{STORE}/{name_of(1)}", backend=backend) as pinned:
            assert pinned.verify().ok
        assert len([n for n in backend.list_dir("/other") if n.startswith("part-")]) == 3
        run.optimizer.unpin("best")
        run.seal()
        assert len([n for n in backend.list_dir("/other") if n.startswith("part-")]) == 2
        run.optimizer.close()


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
        backend.before = lambda: overwrite(backend, f"{STORE}/pins/mine", b"half")
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


def slot_bytes() -> int:
    run = Run(keep=1)
    run.seal()
    found = list_checkpoints(STORE, backend=run.backend)[0].bytes
    run.optimizer.close()
    return found


class TestFullDisk:
    @pytest.mark.parametrize("overlap", [None, "forward", "backward"])
    @pytest.mark.parametrize("remedy", ["unpin", "free space"])
    def test_during_an_extra_pin_training_can_go_on(self, remedy: str, overlap: Any) -> None:
        size = slot_bytes()
        backend = MemoryBackend(capacity_bytes=2 * size + 3000)
        run, reference = Run(backend, keep=1, overlap=overlap), Run(keep=1)
        for one in (run, reference):
            one.seal()
        run.optimizer.pin("best")
        run.seal()
        reference.seal()
        before, names = run.parameters(), everything(backend)

        def compute_gradients() -> None:
            run.optimizer.zero_grad()
            run.backward()

        def try_to_step() -> None:
            if overlap == "backward":
                compute_gradients()  # which is where the step begins
            run.optimizer.step()

        if overlap != "backward":
            compute_gradients()
        for _ in range(2):
            with pytest.raises(StoreFullError, match="the slot that the next step") as caught:
                try_to_step()
            assert isinstance(caught.value, StorageError)
            assert caught.value.errno == errno.ENOSPC
            said = str(caught.value)
            assert said.startswith(
                f"{STORE}: No space left on device: the slot that the next step writes to needs "
                f"{size / 1024:.1f} KiB ({backend.free_bytes(STORE) / 1024:.1f} KiB free)"
            )
            assert said.count("No space left") == 1
            assert len(said) < 420
            for part in (
                f"keeps 1 checkpoints and the pinned 'best' ({name_of(1)}): unpin with",
                f"`offload unpin {STORE} NAME`",
                f"`offload prune {STORE}`",
                "call again",
            ):
                assert part in said
            assert run.at == 2
            assert all(map(torch.equal, before, run.parameters()))
            assert everything(backend) == names, "nothing half-written"
        if remedy == "unpin":
            run.optimizer.unpin("best")
        else:
            backend._capacity_bytes = 3 * size + 3000
        try_to_step()
        reference.step()
        run.optimizer.synchronize()
        assert all(map(torch.equal, run.parameters(), reference.parameters()))
        for one in (run, reference):
            one.seal()
            one.optimizer.close()
        assert run.steps() == ([4] if remedy == "unpin" else [1, 4])
        ours, theirs = (
            {n: d for n, d in everything(b).items() if "exp_avg" in n and name_of(4) in n}
            for b in (backend, reference.backend)
        )
        assert ours == theirs

    def test_a_full_disk_is_found_at_construction_with_the_pins_counted(self) -> None:
        size = slot_bytes()
        run = Run(MemoryBackend(capacity_bytes=3 * size + 3000), keep=1)
        run.seal()
        run.optimizer.pin("best")
        run.seal()
        run.optimizer.close()
        backend = run.backend.reopened()
        Run(backend, keep=1).optimizer.close()
        backend = backend.reopened()
        backend.create("/other", size).close()
        with pytest.raises(StoreFullError, match=r"'best' \(step-00000001\) needs 1 more") as full:
            Run(backend, keep=1)
        assert f"offload unpin {STORE} NAME" in str(full.value)

    def test_a_pin_that_there_is_no_room_for_changes_nothing(self) -> None:
        size = slot_bytes()
        backend = MemoryBackend(capacity_bytes=2 * size + 600)
        run = Run(backend, keep=1)
        run.seal()
        run.seal()
        run.optimizer.pin("one")
        with pytest.raises(StorageError) as caught:
            run.optimizer.pin("two")
        assert caught.value.errno == errno.ENOSPC
        assert backend.list_dir(f"{STORE}/pins") == ["one"]
        run.optimizer.unpin("one")
        run.optimizer.pin("two")
        run.optimizer.unpin("two")
        run.seal()
        run.optimizer.close()

    def test_what_has_come_to_stay_fills_the_disk_by_name(self) -> None:
        size = slot_bytes()
        backend = MemoryBackend(capacity_bytes=4 * size + 100)
        policy: Retention = LastK(1) | EverySteps(2)
        run = Run(backend, keep=policy)
        with pytest.raises(StoreFullError, match=r"LastK\(k=1\) \| EverySteps\(steps=2\)"):  # noqa: PT012
            for _ in range(20):
                run.seal()
        assert run.steps() == [2, 4, 6, 7]
        at = run.at
        run.optimizer.close()
        backend = backend.reopened()
        prune(STORE, LastK(1), backend=backend)
        run = Run(backend, keep=policy)
        assert run.optimizer.restore().step == at
        run.seal()
        run.optimizer.close()


def everything(backend: Backend, path: str = STORE) -> dict[str, bytes]:
    found = {}
    for name in backend.list_dir(path):
        stat = backend.stat(f"{path}/{name}")
        assert stat is not None
        if stat.kind == "directory":
            found |= everything(backend, f"{path}/{name}")
        else:
            found[f"{path}/{name}"] = read(backend, f"{path}/{name}")
    return found
