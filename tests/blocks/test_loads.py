"""What is loaded, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.blocks.models import HYPER, Model, batch, make, pair
from tests.dying import dying
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
LAYERS = 6


def test_a_steady_loop_loads_nothing_in_vain(tmp_path: Path) -> None:
    both = pair(tmp_path / "run", layers=LAYERS)
    model, optimizer = both.streamed, both.optimizer

    def iterate() -> None:
        for seed in range(2):
            model.loss(batch(seed)).backward()
        optimizer.step()
        model.zero_grad()

    iterate()
    before = optimizer.stats()
    for _ in range(3):
        iterate()
    after = optimizer.stats()
    assert after.block_loads_unused == 0
    assert after.block_buffers == 3
    loads = after.block_loads - before.block_loads
    # All blocks are loaded after a step. What is in a buffer when a direction ends is not again.
    assert loads == 3 * (LAYERS + 3 * (LAYERS - 3))
    assert after.block_loads_ahead - before.block_loads_ahead == loads
    block = sum(-(-p.nbytes // 64) * 64 for p in model.layers[0].parameters())
    assert after.block_bytes == after.block_loads * block


def test_frozen_blocks_stay_loaded_over_a_step(tmp_path: Path) -> None:
    def prepare(model: Model) -> None:
        model.requires_grad_(requires_grad=False)
        model.head.requires_grad_()

    both = pair(tmp_path / "run", prepare, layers=3)
    for step in range(3):
        both.streamed.loss(batch(step)).backward()
        both.optimizer.step()
    assert both.optimizer.stats().block_loads == 3


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a fresh process takes, for two models of which one is four times as deep."""
    found = []
    for layers in (6, 24):
        directory = tmp_path_factory.mktemp("peak")
        result = subprocess.run(
            dying([sys.executable, "-m", "tests.blocks.peak", str(directory), str(layers)]),
            capture_output=True,
            text=True,
            timeout=HANG_S,
            cwd=ROOT,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        found.append(json.loads(result.stdout))
    return found


def test_memory_besides_the_parameters_does_not_depend_on_depth(
    peaks: list[dict[str, Any]],
) -> None:
    small, large = peaks
    assert large["parameters"] == pytest.approx(4 * small["parameters"], rel=0.01)
    assert small["buffers"] == large["buffers"] == 3
    assert abs(large["above"] - small["above"]) < 24 << 20


def refused(directory: Path, **changes: Any) -> str:
    model = changes.pop("model", make)()
    given = {"directory": directory, "model": model, **HYPER, **changes.pop("arguments", {})}
    options = offload.Options(**{"parameters": "host", **changes})
    with pytest.raises((ValueError, offload.OffloadError)) as caught:
        offload.AdamW(model.parameters(), options=options, **given)
    assert not any(directory.parent.iterdir()), "nothing is made before the refusal"
    return str(caught.value)


def quantized() -> Model:
    class Packed(torch.nn.Parameter):
        pass

    model = make()
    model.layers[1].up.weight = Packed(torch.zeros(4, 4))
    return model


def lazy() -> Model:
    model = make()
    model.layers[1].up = torch.nn.LazyLinear(4)
    return model


class Wrapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = torch.nn.Linear(3, 3)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"arguments": {"model": None}}, "needs model="),
    "forward": ({"overlap": "forward"}, "overlap='forward'"),
    "backward": ({"overlap": "backward"}, "overlap='backward'"),
    "device": ({"placement": "device"}, "placement="),
    "a server": ({"arguments": {"directory": "offload://127.0.0.1:1/run"}}, "a server"),
    "no blocks": ({"model": Wrapped}, "there is no block"),
    "no such block": ({"blocks": ["layers.*", "encoder.*"]}, "'encoder.*'"),
    "an empty block": ({"blocks": "layers.0.relu", "model": make}, "matches no module"),
    "a subclass": ({"model": quantized}, "'layers.1.up.weight'"),
    "a lazy module": ({"model": lazy}, "has no shape yet"),
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_streamed_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    said = refused(tmp_path / "new", **changes)
    assert words in said
    assert len(said.partition(": ")[0].split()) <= 30


@pytest.mark.parametrize("value", [3, [""], [1]])
def test_names_of_blocks_are_checked(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        offload.Options(parameters="host", blocks=value)


def test_names_of_blocks_need_parameters() -> None:
    with pytest.raises(ValueError, match="set parameters as well"):
        offload.Options(blocks=["layers.*"])


CONVERSIONS: dict[str, Callable[[Model], Any]] = {
    "half": lambda model: model.half(),
    "to": lambda model: model.to(torch.float64),
    "data": lambda model: setattr(model.layers[2].scale, "data", torch.ones(3)),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_conversion_after_construction_is_refused(
    tmp_path: Path, convert: Callable[[Model], Any]
) -> None:
    both = pair(tmp_path / "run")
    both.train(0)
    both.step()

    def go_on() -> None:
        convert(both.streamed)
        both.optimizer.step()

    with pytest.raises(offload.MismatchError, match="cannot be converted or moved"):
        go_on()
    both.optimizer.close()


def test_blocks_are_named_by_patterns(tmp_path: Path) -> None:
    both = pair(tmp_path / "run", options={"blocks": "layers.[13]"})
    both.train(0)
    both.step()
    before = both.optimizer.stats().block_loads
    both.streamed(batch(0))
    assert both.optimizer.stats().block_loads - before <= 2
