"""Parameters on the drive where their values might get lost, old or unchecked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import offload
from offload.errors import (
    BrokenOptimizerError,
    DamagedError,
    MismatchError,
    NotRestoredError,
    UnsupportedParameterError,
)
from tests.blocks.models import HYPER, Model, batch, make
from tests.blocks.test_on_the_drive import on_the_drive
from tests.numerics.reference import assert_same_bits, assert_same_parameters


def train(model: Any, optimizer: Any, seed: int) -> None:
    model.zero_grad()
    model.loss(batch(seed)).backward()
    optimizer.step()


def values(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.detach().clone()) for name, p in model.named_parameters()]


def test_weights_are_imported_into_a_model_that_has_other_values(tmp_path: Path) -> None:
    plain, model = make(), make(seed=5)
    safetensors.torch.save_file(plain.state_dict(), tmp_path / "model.safetensors")
    offload.import_checkpoint(tmp_path / "model.safetensors", tmp_path / "run", torch.optim.AdamW)
    with on_the_drive(model, tmp_path / "run") as optimizer:
        optimizer.restore()
        assert_same_parameters(values(model), values(plain))


def with_frozen_block(directory: Path, *, steps: int) -> list[tuple[str, torch.Tensor]]:
    model = make()
    model.layers[1].requires_grad_(requires_grad=False)
    with on_the_drive(model, directory) as optimizer:
        for step in range(steps):
            train(model, optimizer, step)
        optimizer.checkpoint().result()
        return values(model)


def test_a_block_that_was_frozen_in_the_checkpoint_is_restored_and_trained(tmp_path: Path) -> None:
    wanted = with_frozen_block(tmp_path / "run", steps=1)
    model = make(seed=7)
    with on_the_drive(model, tmp_path / "run") as optimizer:
        optimizer.restore()
        assert_same_parameters(values(model), wanted)
        train(model, optimizer, 1)
        optimizer.checkpoint().result()
        found = values(model)
        train(model, optimizer, 2)
        model.layers[1].requires_grad_(requires_grad=False)
        optimizer.restore(1, discard_newer=True)
        assert_same_parameters(values(model), wanted)
        train(model, optimizer, 3)
        optimizer.checkpoint().result()
        assert_same_parameters(values(model.layers[1]), of_second(wanted))
    assert all(torch.isfinite(value).all() for _, value in found)


def of_second(named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    start = "layers.1."
    return [(name.removeprefix(start), one) for name, one in named if name.startswith(start)]


@pytest.mark.parametrize("is_outside", [False, True])
def test_a_block_that_the_optimizer_was_not_given_stays_as_it_is(
    is_outside: bool, tmp_path: Path
) -> None:
    wanted = of_second(with_frozen_block(tmp_path / "run", steps=1))
    if is_outside:
        with offload.outside_memory():
            model = Model().to(torch.bfloat16)
    else:
        model = make(seed=7)
    given = [p for n, p in model.named_parameters() if not n.startswith("layers.1.")]
    options = offload.Options(parameters="drive", chunk_bytes=32768)
    with offload.AdamW(
        given, directory=tmp_path / "run", model=model, options=options, **HYPER
    ) as optimizer:
        optimizer.restore()
        for step in range(1, 4):
            train(model, optimizer, step)
            path = optimizer.checkpoint().result().path
            assert_same_parameters(values(model.layers[1]), wanted)
    stored = safetensors.torch.load_file(f"{path}/model.safetensors")
    for name, value in wanted:
        assert_same_bits(stored[f"layers.1.{name}"], value, name)


def test_a_step_without_gradients_loses_nothing(tmp_path: Path) -> None:
    model, plain = make(), make()
    with on_the_drive(model, tmp_path / "run") as optimizer:
        optimizer.step()
        assert_same_parameters(values(model), values(plain))
        train(model, optimizer, 0)
        model.zero_grad()
        with torch.no_grad():
            model.layers[0].scale.fill_(3)
        optimizer.step()
        assert bool((model.layers[0].scale == 3).all())
        assert optimizer.restore() is None  # there is no checkpoint: training goes on
        assert bool((model.layers[0].scale == 3).all())


def test_a_model_outside_of_memory_is_not_trained_if_nothing_is_restored(tmp_path: Path) -> None:
    with offload.outside_memory():
        model = Model().to(torch.bfloat16)
    with on_the_drive(model, tmp_path / "run") as optimizer:
        assert optimizer.restore() is None
        with pytest.raises(NotRestoredError, match="call restore"):
            model.loss(batch(0))
        for call in (optimizer.step, optimizer.checkpoint, optimizer.full_state_dict):
            with pytest.raises(NotRestoredError, match="call restore"):
                call()


def by_hand(model: torch.nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones(p.shape, dtype=p.dtype)


def edited(model: Any) -> None:
    with torch.no_grad():
        model.norm.weight.fill_(2)


def with_damage(directory: Path, **options: Any) -> Model:
    """Make two checkpoints, of which the second is damaged; return a new model.

    The damage is in the second of three ranges, which is on the drive only.
    """
    model = make(width=720, layers=3)
    with on_the_drive(model, directory, **options) as optimizer:
        for _ in range(2):
            by_hand(model)
            optimizer.step()
            path = Path(optimizer.checkpoint().result().path)
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    return make(width=720, layers=3)


@pytest.mark.parametrize(
    ("before", "call"), [(by_hand, "step"), (edited, "checkpoint")], ids=["step", "checkpoint"]
)
def test_damage_is_found_before_a_value_is_used_and_an_older_checkpoint_goes_on(
    before: Any, call: str, tmp_path: Path
) -> None:
    small = {"gradients": None, "master": "split", "state_dtype": "int8", "chunk_bytes": 1 << 22}
    model = with_damage(tmp_path / "run", **small)
    with on_the_drive(model, tmp_path / "run", **small) as optimizer:
        assert optimizer.restore().step == 2
        before(model)
        with pytest.raises(DamagedError, match=r"(?s)model\.safetensors.*step-00000001"):
            getattr(optimizer, call)()
        with pytest.raises(BrokenOptimizerError, match="is damaged"):
            optimizer.step()
        with pytest.warns(RuntimeWarning, match="step-00000002"):
            assert optimizer.restore().step == 1


def test_a_restore_that_verifies_finds_damage_at_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradients": None, "chunk_bytes": 1 << 22}
    model = with_damage(tmp_path / "run", **options)
    with on_the_drive(model, tmp_path / "run", **options) as optimizer:
        with pytest.warns(RuntimeWarning, match="step-00000002"):
            assert optimizer.restore(verify=True).step == 1
        by_hand(model)
        optimizer.step()


@pytest.mark.parametrize("master", [None, "split"])
def test_the_whole_state_is_read_and_that_of_torch_refused(master: Any, tmp_path: Path) -> None:
    found = []
    for options in ({"parameters": None, "gradients": None}, {}):
        model = make()
        settings = {**options, **({"master": master} if master else {})}
        with on_the_drive(model, tmp_path / str(len(found)), **settings) as optimizer:
            train(model, optimizer, 0)
            with torch.no_grad():
                model.layers[0].up.weight.mul_(0.5)
            found.append(optimizer.full_state_dict())
            if not options:
                with pytest.raises(MismatchError, match="use offload import"):
                    optimizer.load_state_dict(found[0])
                path = optimizer.checkpoint().result().path
                with pytest.raises(UnsupportedParameterError, match="call its restore"):
                    offload.load_parameters(model, path)
                train(model, optimizer, 1)
    assert_same_tree(found[1], found[0])


def assert_same_tree(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_tree(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert_same_bits(one, other, "the state")
