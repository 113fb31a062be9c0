"""Metrics of checkpoints: what is taken for a number, and what is kept with a checkpoint."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from offload import BestBy, LastK, list_checkpoints, open_checkpoint
from offload.errors import MetricError
from offload.format.manifest import decode
from offload.format.metrics import check_metrics, usable_metrics
from tests.stores.small import STORE
from tests.threads import one_thread
from tests.torch_contract import retention_run
from tests.torch_contract.retention_run import Run, read_manifest

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


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
        assert said[0].filename == retention_run.__file__
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
            ({str(n): 1.0 for n in range(17)}, "17 metrics, but a checkpoint holds at most 16"),
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


def test_of_a_librarys_measurements_those_of_the_run_are_left_out_unless_asked_for() -> None:
    measured = {
        "eval_loss": 1.5,
        "eval_runtime": 0.7,
        "eval_samples_per_second": 91.0,
        "eval_steps_per_second": 5.7,
        "eval_model_preparation_time": 0.1,
        "eval_jit_compilation_time": 0.1,
        "epoch": 0.24,
        "step": 6,
        "runtime_error_rate": 0.5,
    }
    assert usable_metrics(measured) == {"eval_loss": 1.5, "runtime_error_rate": 0.5}
    assert usable_metrics(measured, ("eval_runtime", "epoch")) == {
        "eval_runtime": 0.7,
        "epoch": 0.24,
        "eval_loss": 1.5,
        "runtime_error_rate": 0.5,
    }


def test_of_a_librarys_measurements_only_numbers_with_names_are_taken() -> None:
    measured = {
        "loss": torch.tensor(1.5, requires_grad=True),
        "complex": torch.tensor(1j),
        "meta": torch.ones((), device="meta"),
        "text": "1.5",
        "flag": True,
        ("a",): 1.0,
        b"a": 1.0,
    }
    assert usable_metrics(measured) == {"loss": 1.5}
