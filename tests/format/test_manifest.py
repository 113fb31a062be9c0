"""What a manifest can hold, and that nothing is sealed which could not be read again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offload
from offload.errors import CheckpointError, OffloadError, UnsupportedOptimizerError
from offload.format._manifest_fields import TENSOR_DTYPES, decode_group, encode_group
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.manifest import Manifest, decode, reserved_bytes
from offload.format.strict_json import MAX_VALUES
from offload.stream.drives import as_directories
from offload.update.hyperparameters import check_hyperparameters
from offload.update.rules import UpdateRule
from tests.attacks import good

PATH = "run/step-00000002/manifest.json"


def a_manifest(**changes: Any) -> Manifest:
    return dataclasses.replace(decode(good.manifest(), PATH), **changes)


def through_the_file(manifest: Manifest) -> Manifest:
    return decode(manifest.encode(1 << 16), PATH)


@pytest.mark.parametrize(
    "value",
    [
        True,
        None,
        -(2**63) + 1,
        2**63 - 1,
        0.1,
        1e308,
        float("inf"),
        "é\n",
        (1, (2.0, "x")),
        [1, [None]],
        torch.tensor(0.25),
        torch.tensor([[7]], dtype=torch.int64),
        torch.tensor(1e-3, dtype=torch.bfloat16),
        *(torch.ones(1, dtype=getattr(torch, name)) for name in TENSOR_DTYPES),
    ],
    ids=repr,
)
def test_a_hyperparameter_comes_back_the_same(value: Any) -> None:
    (found,) = through_the_file(a_manifest(groups=({"lr": value},))).groups
    assert type(found["lr"]) is type(value)
    if isinstance(value, torch.Tensor):
        assert (found["lr"].dtype, found["lr"].shape) == (value.dtype, value.shape)
    assert found["lr"] == value


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        -(2**64),
        "\ud800",
        torch.tensor(True),
        torch.tensor(1j),
        torch.ones(2),
        object(),
    ],
    ids=lambda value: "object" if type(value) is object else repr(value),
)
def test_what_would_not_come_back_is_refused_when_it_is_sealed(value: Any) -> None:
    with pytest.raises(TypeError, match=r"param_groups\[3\]\['x'\]"):
        encode_group(3, {"x": value})
    with pytest.raises(TypeError, match=r"param_groups\[3\] has the key"):
        encode_group(3, {"\ud800": 1})


def test_parameters_are_no_hyperparameters() -> None:
    assert encode_group(0, {"params": [1], "param_names": ["a"], "lr": 1.0}) == {"lr": 1.0}
    for key in ("params", "param_names"):
        with pytest.raises(ValueError, match="not a hyper-parameter"):
            decode_group({key: []})


def test_scalars_of_numpy_are_written_as_numbers() -> None:
    scalars = ((("mu", "float", np.float64(0.5)), ("n", "int", 3)), None, None, None)
    found = through_the_file(a_manifest(scalars=scalars))
    assert found.scalars[0] == (("mu", "float", 0.5), ("n", "int", 3))


def test_two_that_say_nan_say_the_same() -> None:
    nan = a_manifest(scalars=((("eta", "f32", float("nan")),), None, None, None))
    assert through_the_file(nan).digest == nan.digest
    assert nan.digest != a_manifest().digest


@pytest.mark.parametrize("field", ["generation", "step"])
def test_numbers_that_could_not_be_read_again_are_not_sealed(field: str) -> None:
    assert getattr(through_the_file(a_manifest(**{field: 2**63 - 1})), field) == 2**63 - 1
    with pytest.raises(OffloadError, match="remove it, and continue from another one"):
        a_manifest(**{field: 2**63}).encode(1 << 16)


def test_a_manifest_too_large_to_be_read_is_refused_before_there_is_one() -> None:
    size = 1024 * 10**7
    spec = ParameterSpec("w", "F32", (size,), 0, ("exp_avg",))
    layout = Layout((spec,), (ModelTensor("w", "F32", (size,)),), 1024)
    with pytest.raises(OffloadError, match=rf"at most {MAX_VALUES} .*chunk_bytes"):
        reserved_bytes(layout, 1)


def test_a_state_array_must_be_able_to_name_a_file() -> None:
    class Keeping(torch.optim.SGD):
        key = "../../x"

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p].setdefault(self.key, torch.zeros_like(p)).add_(p.grad)

    group = {**UpdateRule(Keeping, {"lr": 0.1}).defaults}
    for key in ("../../x", "model", "train_state", "a\0b", "", "a" * 65):
        Keeping.key = key
        with pytest.raises(UnsupportedOptimizerError, match="a state array names a file"):
            UpdateRule(Keeping, {"lr": 0.1}).rule(group)
    Keeping.key = "sum_of_gradients"
    assert UpdateRule(Keeping, {"lr": 0.1}).rule(group).arrays == ("sum_of_gradients",)


def test_a_store_has_no_more_directories_than_are_read(tmp_path: Path) -> None:
    assert len(as_directories([tmp_path / str(n) for n in range(64)])) == 64
    with pytest.raises(ValueError, match="at most 64 directories, got 65"):
        as_directories([tmp_path / str(n) for n in range(65)])


@pytest.mark.parametrize(
    "name", ["AdamW", "Adam", "SGD", "NAdam", "RAdam", "Adagrad", "Rprop", "ASGD", "Adadelta"]
)
def test_the_defaults_of_every_class_fit_themselves(name: str) -> None:
    defaults = dict(UpdateRule(getattr(torch.optim, name), {}).defaults)
    check_hyperparameters(a_manifest(groups=(defaults,)), defaults, PATH)
    # What users set: a tensor, an integer, a scheduler's own key.
    changed = {**defaults, "lr": torch.tensor(0.5), "weight_decay": 1, "initial_lr": float("nan")}
    check_hyperparameters(a_manifest(groups=(changed,)), defaults, PATH)
    with pytest.raises(CheckpointError, match=rf"{PATH}: param_groups\[0\]\['lr'\] is 'x'"):
        check_hyperparameters(a_manifest(groups=({"lr": "x"},)), defaults, PATH)


def test_a_checkpoint_just_sealed_verifies_although_its_groups_have_names(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    options = offload.Options(allow_volatile=True)
    with offload.AdamW(
        model.named_parameters(), directory=tmp_path, model=model, options=options
    ) as optimizer:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        checkpoint = optimizer.checkpoint().result()
        assert checkpoint.verify().problems == ()
        assert "param_names" not in checkpoint.hyperparameters[0]
