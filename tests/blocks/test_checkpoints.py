"""Checkpoints of a model whose blocks are streamed are those of the model in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import offload
from tests.blocks.models import HYPER, Model, Pair, batch, make, pair
from tests.numerics.reference import assert_same_bits, assert_same_parameters


def only_some(model: Model) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up" in name or "head" in name)


def run(both: Pair, steps: range) -> None:
    for step in steps:
        both.train(step)
        both.step()


PREPARED: dict[str, Callable[[Any], Any]] = {"all trained": lambda _: None, "some": only_some}


@pytest.mark.parametrize("prepare", PREPARED.values(), ids=PREPARED)
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, prepare: Callable[[Any], Any]) -> None:
    both = pair(tmp_path / "run", prepare)
    run(both, range(2))
    path = both.optimizer.checkpoint({"step": 2}).result().path
    stored = safetensors.torch.load_file(f"{path}/model.safetensors")
    assert_same_parameters(sorted(stored.items()), sorted(both.plain.state_dict().items()))
    both.train(9)  # lost with this process
    both.optimizer.step()
    both.optimizer.close()
    both.plain.zero_grad()

    resumed = make(seed=5)
    prepare(resumed)
    optimizer = offload.AdamW(
        [(n, p) for n, p in resumed.named_parameters() if p.requires_grad],
        directory=tmp_path / "run",
        model=resumed,
        options=offload.Options(parameters="host", chunk_bytes=32768),
        **HYPER,
    )
    checkpoint = optimizer.restore()
    assert checkpoint is not None
    assert checkpoint.train_state == {"step": 2}
    again = Pair(both.plain, resumed, both.reference, optimizer)
    again.compare()
    run(again, range(2, 4))
    optimizer.close()


def test_a_checkpoint_has_the_edits_before_it(tmp_path: Path) -> None:
    both = pair(tmp_path / "run")
    run(both, range(1))
    for model in both:
        with torch.no_grad():
            model.layers[1].up.weight.clamp_(-0.01, 0.01)
        model.layers[3].down.weight.data.mul_(0.5)
    path = both.optimizer.checkpoint().result().path
    stored = safetensors.torch.load_file(f"{path}/model.safetensors")
    assert_same_parameters(sorted(stored.items()), sorted(both.plain.state_dict().items()))
    for model in both:
        model.layers[2].scale.data.fill_(3.0)
    both.optimizer.restore()
    with torch.no_grad():
        both.plain.layers[2].scale.copy_(stored["layers.2.scale"])
    run(both, range(1, 3))


def test_a_checkpoint_is_sealed_beside_forwards_that_load_blocks(tmp_path: Path) -> None:
    both = pair(tmp_path / "run")
    run(both, range(1))
    handle = both.optimizer.checkpoint()
    for seed in range(3):
        both.train(seed)
    stored = safetensors.torch.load_file(f"{handle.result().path}/model.safetensors")
    assert_same_parameters(sorted(stored.items()), sorted(both.plain.state_dict().items()))
    both.step()


@pytest.mark.parametrize("before", ["host", None])
def test_stores_are_the_same_with_and_without_streaming(tmp_path: Path, before: Any) -> None:
    both = pair(tmp_path / "run", options={"parameters": before})
    run(both, range(1))
    both.optimizer.checkpoint()
    both.optimizer.close()
    after = "host" if before is None else None
    other = pair(tmp_path / "run", options={"parameters": after})
    other.optimizer.restore()
    again = Pair(both.plain, other.streamed, both.reference, other.optimizer)
    again.compare()
    run(again, range(1, 3))


FORMATS = [{"master": "split"}, {"state_dtype": "bfloat16"}, {"state_dtype": "int8"}]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: "-".join(map(str, form.values())))
def test_state_in_fewer_bytes_is_the_same_with_streaming(tmp_path: Path, form: Any) -> None:
    found = []
    for place in ("host", None):
        both = pair(tmp_path / str(place), options={"parameters": place, **form})
        for step in range(3):
            both.train(step)
            both.optimizer.step()
            both.streamed.zero_grad()
            both.plain.load_state_dict(both.streamed.state_dict())
        found.append(both.streamed)
    assert_same_parameters(found[0].state_dict().items(), found[1].state_dict().items())


def test_a_frozen_block_joins_the_training_later(tmp_path: Path) -> None:
    both = pair(tmp_path / "run", only_some)
    run(both, range(1))
    for model in both:
        model.layers[2].requires_grad_()
    new = [
        [(n, p) for n, p in model.layers[2].named_parameters() if "up" not in n] for model in both
    ]
    both.reference.add_param_group({"params": [p for _, p in new[0]], "lr": 1e-3})
    both.optimizer.add_param_group({"params": new[1], "lr": 1e-3})
    run(both, range(1, 3))
    both.optimizer.checkpoint().result()


def test_the_whole_state_leaves_and_enters_as_torch_has_it(tmp_path: Path) -> None:
    both = pair(tmp_path / "one")
    run(both, range(2))
    whole = both.optimizer.full_state_dict()
    other = pair(tmp_path / "two")
    kept = other.streamed.layers[0].up.weight.detach()
    other.optimizer.load_state_dict(whole)
    assert_same_bits(kept, both.plain.layers[0].up.weight.detach(), "an alias")
    other.streamed.load_state_dict(both.plain.state_dict())  # what is not trained
    again = Pair(both.plain, other.streamed, both.reference, other.optimizer)
    again.compare()
    run(again, range(2, 4))


def test_parameters_of_a_checkpoint_are_loaded_into_streamed_blocks(tmp_path: Path) -> None:
    both = pair(tmp_path / "one")
    run(both, range(1))
    path = both.optimizer.checkpoint().result().path
    other = pair(tmp_path / "two", seed=3)
    other.streamed(batch(0))  # some blocks are loaded
    offload.load_parameters(other.streamed, path)
    assert_same_parameters(other.streamed.state_dict().items(), both.plain.state_dict().items())


def test_a_load_hook_of_the_model_sees_restored_values(tmp_path: Path) -> None:
    both = pair(tmp_path / "run")
    seen: list[float] = []

    def note(module: Any, *_: Any) -> None:
        seen.append(module.up.weight.float().sum().item())

    both.streamed.layers[1].register_load_state_dict_post_hook(note)
    run(both, range(1))
    both.optimizer.checkpoint().result()
    wanted = both.plain.layers[1].up.weight.float().sum().item()
    both.train(3)
    both.optimizer.step()
    both.optimizer.restore()
    assert seen == [wanted]
