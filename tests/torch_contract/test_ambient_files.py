"""Reading, exporting and importing checkpoints in every mode of torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import export_checkpoint, import_checkpoint
from tests.numerics.conftest import one_thread
from tests.numerics.reference import assert_same_bits, read_state
from tests.stores.small import make_optimizer, step
from tests.torch_contract.modes import MODES

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]
FORMATS = ("pt", "hf", "safetensors", "dcp")


def make_model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(50, 30).bfloat16(), torch.nn.BatchNorm1d(30))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one checkpoint, of which everything is stored in fewer bits."""
    path = tmp_path_factory.mktemp("ambient") / "run"
    model = make_model()
    optimizer = make_optimizer(
        model, directory=path, lr=torch.tensor(0.01), settings={"state_dtype": "int8"}
    )
    step(optimizer)
    optimizer.checkpoint({"state": torch.arange(7), "empty": torch.empty(0, 3)}).result()
    optimizer.close()
    return path


def files_of(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {p.name: p.read_bytes() for p in path.iterdir()}


def assert_ordinary(tensor: torch.Tensor) -> None:
    assert (tensor.device.type, tensor.is_inference(), tensor.requires_grad) == (
        "cpu",
        False,
        False,
    )


@pytest.mark.parametrize("mode", MODES)
def test_what_is_read_is_the_same_and_can_be_changed_later(store: Path, mode: str) -> None:
    with offload.open_checkpoint(store) as opened:
        expected = {name: offload.read_state(opened, name) for name in NAMES}
        path = opened.path
    with MODES[mode](), offload.open_checkpoint(store) as opened:
        found = {name: offload.read_state(opened, name) for name in NAMES}
        train_state = opened.train_state
        (group,) = opened.hyperparameters
        assert opened.verify().ok
        assert [info.step for info in offload.list_checkpoints(store)] == [1]
    for name, arrays in found.items():
        assert arrays.keys() == expected[name].keys()
        for array, values in arrays.items():
            assert_ordinary(values)
            assert_same_bits(values, expected[name][array], f"{array} of {name}")
            values.zero_()
    assert_ordinary(group["lr"])
    assert_same_bits(group["lr"], torch.tensor(0.01), "lr")
    for value, wanted in zip(
        train_state.values(), (torch.arange(7), torch.empty(0, 3)), strict=True
    ):
        assert_ordinary(value)
        assert_same_bits(value, wanted, "the train state")
        value.add_(1)
    assert opened.path == path


@pytest.mark.parametrize("mode", MODES)
def test_parameters_are_loaded_in_any_mode(store: Path, mode: str) -> None:
    expected = read_state(str(store / "step-00000001")).model
    model = make_model()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    with MODES[mode]():
        assert offload.load_parameters(model, store) == 1
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, expected[name], name)
    model(torch.ones(2, 50).bfloat16()).float().sum().backward()


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad"])
def test_parameters_are_loaded_into_a_model_that_was_made_in_inference_mode(
    store: Path, mode: str
) -> None:
    expected = read_state(str(store / "step-00000001")).model
    with torch.inference_mode():
        model = make_model()
        model[0].weight.data = torch.zeros(50, 30).bfloat16().t()  # copied through other memory
        model[1].weight.zero_()
    with MODES[mode]():
        offload.load_parameters(model, store)
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, expected[name], name)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_exported_and_imported_is_the_same(store: Path, tmp_path: Path, mode: str) -> None:
    called: list[tuple[bool, str]] = []

    def progress(*_: int) -> None:
        called.append((torch.is_inference_mode_enabled(), torch.empty(1).device.type))

    def exchange(place: Path, within: Callable[[], Any]) -> None:
        place.mkdir()
        for to in FORMATS:
            with within(), offload.open_checkpoint(store) as opened:
                export_checkpoint(opened, place / to, to, progress=progress)
        for to in ("pt", "hf", "dcp"):
            with within():
                imported = import_checkpoint(
                    place / to,
                    place / f"store of {to}",
                    options=offload.Options(chunk_bytes=4096, allow_volatile=True),
                    progress=progress,
                )
                imported.close()

    exchange(tmp_path / "expected", nullcontext)
    called.clear()
    exchange(tmp_path / "found", MODES[mode])
    with MODES[mode]():
        progress()  # is the user's, and so are the modes that it runs in
    assert len(called) > 10
    assert len(set(called)) == 1
    for to in FORMATS:
        expected, found = (files_of(tmp_path / side / to) for side in ("expected", "found"))
        assert found.keys() == expected.keys()
        for name in expected.keys() - {".metadata"}:  # which has a time of its own
            assert found[name] == expected[name], (to, name)
    for to in ("pt", "hf", "dcp"):
        expected, found = (
            read_state(str(tmp_path / side / f"store of {to}" / "step-00000001"))
            for side in ("expected", "found")
        )
        assert found.scalars == expected.scalars
        for array, tensors in {**expected.arrays, "model": expected.model}.items():
            other = found.model if array == "model" else found.arrays[array]
            for name, tensor in tensors.items():
                assert_same_bits(other[name], tensor, f"{array} of {name}")
