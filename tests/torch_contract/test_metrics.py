"""Metrics of checkpoints: what is taken for a number, and what is kept with a checkpoint."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from offload import BestBy, LastK, list_checkpoints, open_checkpoint, usable_metrics
from offload.errors import MetricError
from tests.stores.files import read
from tests.stores.small import STORE
from tests.threads import one_thread
from tests.torch_contract import retention_run
from tests.torch_contract.retention_run import Run, closed_runs

__all__ = ["closed_runs", "one_thread"]  # fixtures: small tensors on many threads are slow


def test_are_kept_with_the_checkpoint() -> None:
    run = Run()
    path = run.seal(loss=1.25, tokens=3)
    with open_checkpoint(path, backend=run.backend) as found:
        assert found.metrics == {"loss": 1.25, "tokens": 3.0}
        assert type(found.metrics["tokens"]) is float
    assert list_checkpoints(STORE, backend=run.backend)[0].metrics == found.metrics
    assert run.optimizer.checkpoint().result().metrics == {"loss": 1.25, "tokens": 3.0}
    path = run.seal()
    assert [i.metrics for i in list_checkpoints(STORE, backend=run.backend)][1] == {}
    manifest = read(run.backend, f"{path}/manifest.json")
    assert b'"metrics"' not in manifest, "as it was written before there were any"
    most = {chr(0x1F600 + n) * 64: -1.7976931348623157e308 for n in range(16)}
    with open_checkpoint(run.seal(**most), backend=run.backend) as found:
        assert found.metrics == most


def test_can_be_measured_after_the_checkpoint_was_made() -> None:
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


def test_one_that_is_never_given_is_warned_of_once() -> None:
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


REFUSED: list[tuple[Any, str]] = [
    *(({"loss": value}, "metric 'loss' is a") for value in (True, "low", None, np.ones(3))),
    ({"loss": torch.ones(2)}, "metric 'loss' is a Tensor, expected one number, got tens"),
    ({"loss": torch.tensor(1j)}, "metric 'loss' is a Tensor"),
    ({"loss": torch.ones((), device="meta")}, "metric 'loss' is a Tensor"),
    ({"nan": math.nan, "loss": "low"}, "metric 'loss' is a str"),  # said before the other
    *(({name: 1.0}, "the name of a metric") for name in ("", "x" * 65, 3)),
    ({str(n): 1.0 for n in range(17)}, "17 metrics, but a checkpoint holds at most 16"),
    ([("loss", 1.0)], "metrics must be a dict"),
]


def test_what_cannot_be_ranked_is_refused_and_numbers_of_libraries_are_taken() -> None:
    run = Run()
    run.step()
    for metrics, message in REFUSED:
        with pytest.raises(MetricError, match=message):
            run.optimizer.checkpoint(metrics=metrics)
    assert run.steps() == []
    one = torch.tensor(2.0)
    numbers = [2, one, torch.tensor([[2]]), one.half(), torch.nn.Parameter(one) * 1]
    for value in [*numbers, np.float32(2), np.int8(2), np.full((1, 1), 2.0)]:
        made = run.optimizer.checkpoint(metrics={"loss": value}).result()
        assert made.metrics == {"loss": 2.0}, repr(value)


@pytest.mark.parametrize(
    ("value", "said"),
    [(math.nan, "nan"), (-(10**400), "-inf"), (np.float32("inf"), "inf")],
    ids=["nan", "a huge integer", "inf"],
)
def test_one_that_is_not_finite_is_left_out_and_the_checkpoint_is_made(
    value: Any, said: str
) -> None:
    run = Run(keep=BestBy("loss") | LastK(1))
    for loss in (3.0, 1.0, value, value, 2.0):
        run.step()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            made = run.optimizer.checkpoint(metrics={"loss": loss, "acc": 0.5}).result()
        if loss is value:
            assert made.metrics == {"acc": 0.5}
            (warning,) = warned
            assert f"metric 'loss' is {said}, " in str(warning.message)
            assert warning.filename == __file__
        else:
            assert not warned
    assert run.steps() == [2, 5]


def test_what_a_library_has_measured_is_taken_as_far_as_it_can_be() -> None:
    measured = {
        "eval_loss": np.float32(0.5),
        "acc": torch.tensor([0.25], requires_grad=True),
        "nan": math.nan,
        "huge": 10**400,
        "matrix": torch.zeros(2, 2),
        "complex": torch.tensor(1j),
        "meta": torch.ones((), device="meta"),
        "name": "1.5",
        "flag": True,
        "none": None,
        "x" * 65: 1.0,
        "": 1.0,
        ("a",): 1.0,
        b"a": 1.0,
        # Of the run, and left out unless asked for:
        "eval_runtime": 0.75,
        "eval_samples_per_second": 91.0,
        "eval_model_preparation_time": 0.1,
        "epoch": 0.25,
        "step": 6,
        "runtime_error_rate": 0.5,
    }
    found = {"acc": 0.25, "eval_loss": 0.5, "runtime_error_rate": 0.5}
    assert usable_metrics(measured, ("absent", "acc")) == found
    asked = {"eval_runtime": 0.75, "epoch": 0.25}
    assert usable_metrics(measured, tuple(asked)) == asked | found
    many = {str(n): n for n in range(40)}
    assert list(usable_metrics(many, ("39",))) == ["39", *map(str, range(15))]
    run = Run()
    run.seal(**found)
    assert list_checkpoints(STORE, backend=run.backend)[0].metrics == found
