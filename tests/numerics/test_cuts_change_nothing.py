"""Compressed state: no byte depends on how it is cut, streamed, kept or spread.

Models are random, with sizes that fit to no chunk and no block. Each is trained once in plain
settings, and then in others; parameters, everything that is stored, and the FP32 values that
readers make of it, must be the same bits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

import offload
import offload.update.host_place
from gds import MemoryBackend
from offload.format.chunk_plan import Piece
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.update.coding.coder import StateCoder
from offload.update.dtypes import DTYPES
from offload.update.pool import BlockMemory
from tests.numerics.reference import assert_same_bits, read_state

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"state_dtype": "int8"},
    "bfloat16": {"state_dtype": "bfloat16", "rounding_seed": 11},
    "split-int8": {"state_dtype": "int8", "master": "split"},
    "split-bfloat16": {"state_dtype": "bfloat16", "master": "split"},
}
NUM_STEPS = 7
DIRECTORIES = ["/one", "/two", "/three"]


@dataclass(frozen=True)
class Way:
    """How a model is trained."""

    options: dict[str, Any] = field(default_factory=dict)
    num_directories: int = 1
    hot_elements: int | None = None
    resumed: bool = False
    """Whether each step is taken by another optimizer, which restores the checkpoint before it."""


PLAIN = Way()
WAYS = {
    "chunks-of-4-KiB": Way({"chunk_bytes": 4096}),
    "chunks-of-8-KiB": Way({"chunk_bytes": 8192}),
    "chunks-of-12-KiB-in-small-blocks": Way({"chunk_bytes": 12288}, hot_elements=777),
    "small-blocks": Way(hot_elements=100),
    "resident": Way({"chunk_bytes": 4096, "host_memory": 30_000}),
    "all-resident": Way({"chunk_bytes": 8192, "host_memory": "1GiB"}),
    "beside-forward": Way({"chunk_bytes": 4096, "overlap": "forward"}),
    "beside-backward": Way({"chunk_bytes": 8192, "overlap": "backward"}),
    "two-directories": Way({"chunk_bytes": 4096, "drives": offload.DriveTuning(shares=(2, 3))}, 2),
    "three-directories": Way(
        {"chunk_bytes": 8192, "drives": offload.DriveTuning(shares=(1, 1, 5))}, 3, hot_elements=999
    ),
    "resumed": Way({"chunk_bytes": 4096}, resumed=True),
}


class Part(torch.nn.Module):
    """One parameter whose gradient does not depend on any parameter."""

    def __init__(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        self.number = number

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + self.number)
        gradient = torch.randn(self.weight.shape, generator=generator)
        return (self.weight * gradient.to(self.weight.dtype)).float().sum()


class Model(torch.nn.Module):
    """Parts of random sizes, most of them odd; some are tiny, some are of several chunks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        shapes: list[tuple[int, ...]] = [(0,), ()]
        for _ in range(draw.randint(5, 9)):
            shapes.append((draw.choice([1, 5, 31, 33, 61, 300]),))
            shapes.append((draw.randint(1, 70), draw.randint(1, 90)))
        # One ends just after the edge of a chunk, within a block.
        shapes.append(
            (1024 - sum(torch.Size(s).numel() for s in shapes) % 1024 + draw.randint(1, 30),)
        )
        shapes.append((draw.randint(1000, 3000),))
        dtypes = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]
        self.parts = torch.nn.ModuleList(
            Part(number, shape, draw.choice(dtypes)) for number, shape in enumerate(shapes)
        )
        self.seldom = draw.sample(range(len(shapes)), 2)

    def forward(self, step: int) -> torch.Tensor:
        """Return a loss, in which some parts take part in every third step only."""
        parts = [p for n, p in enumerate(self.parts) if n not in self.seldom or step % 3 == 1]
        return torch.stack([part(step) for part in parts]).sum()


@dataclass(frozen=True)
class Result:
    """What a training has led to."""

    parameters: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]
    stored: dict[str, dict[str, torch.Tensor]]
    version: int


def train(seed: int, form: dict[str, Any], way: Way, monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setattr(offload.update.host_place, "HOT_ELEMENTS", way.hot_elements or 512 << 10)
    backend = MemoryBackend()
    model = Model(seed)

    def construct() -> offload.AdamW:
        options = offload.Options(backend=backend, allow_volatile=True, **form, **way.options)
        return offload.AdamW(
            model.parameters(),
            lr=1e-2,
            directory=DIRECTORIES[: way.num_directories],
            model=model,
            options=options,
        )

    optimizer = construct()
    for step in range(NUM_STEPS):
        if way.resumed and step:
            optimizer.checkpoint().result()
            optimizer.close()
            backend = backend.reopened()
            model = Model(seed)
            optimizer = construct()
            optimizer.restore()
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint = optimizer.checkpoint().result()
    assert checkpoint.verify().ok
    stored = read_state(checkpoint.path, backend)
    file = backend.open(f"{checkpoint.path}/manifest.json")
    version = json.loads(file.read_bytes(0, file.size_bytes))["format"]
    result = Result(
        {name: p.detach().clone() for name, p in model.named_parameters()},
        {name: offload.read_state(checkpoint, name) for name, _ in model.named_parameters()},
        {array: dict(tensors) for array, tensors in stored.arrays.items()},
        version,
    )
    optimizer.close()
    return result


def assert_same(found: Result, expected: Result) -> None:
    for name, parameter in expected.parameters.items():
        assert_same_bits(found.parameters[name], parameter, name)
        for array, values in expected.state[name].items():
            assert_same_bits(found.state[name][array], values, f"{array} of {name}")
    assert found.stored.keys() == expected.stored.keys()
    for array, tensors in expected.stored.items():
        assert found.stored[array].keys() == tensors.keys()
        for name, values in tensors.items():
            assert_same_bits(
                found.stored[array][name].flatten(), values.flatten(), f"{array} of {name}"
            )
    assert found.version == expected.version == 3


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_no_byte_depends_on_how_the_state_is_cut(form, seed, monkeypatch):
    expected = train(seed, form, PLAIN, monkeypatch)
    for name, way in WAYS.items():
        found = train(seed, form, way, monkeypatch)
        try:
            assert_same(found, expected)
        except AssertionError as error:
            error.add_note(name)
            raise


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_no_byte_depends_on_what_else_is_trained(form, monkeypatch):
    """Nor on the order of parameters: only on their names."""
    whole = train(1, form, PLAIN, monkeypatch)
    backend = MemoryBackend()
    model = Model(1)
    chosen = [name for n, name in enumerate(whole.parameters) if n % 2 and n not in model.seldom]
    given = {name: p for name, p in model.named_parameters() if name in chosen}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in given)
    options = offload.Options(backend=backend, allow_volatile=True, chunk_bytes=4096, **form)
    optimizer = offload.AdamW(
        list(given.values())[::-1], lr=1e-2, directory="/run", model=model, options=options
    )
    for step in range(NUM_STEPS):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint = optimizer.checkpoint().result()
    for name, parameter in given.items():
        assert_same_bits(parameter.detach(), whole.parameters[name], name)
        for array, values in offload.read_state(checkpoint, name).items():
            assert_same_bits(values, whole.state[name][array], f"{array} of {name}")


ROWS, COLUMNS = 48, 62
"""Three ranks that get 16 rows each would cut at 992 elements, a multiple of 32."""


def pieces_of(cuts: list[int]) -> Iterator[Piece]:
    for start, stop in pairwise(cuts):
        yield Piece(1, start, stop, start)


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_rows_that_are_cut_at_a_multiple_of_32_elements_are_coded_as_the_whole(state_dtype):
    """Whoever has a part of a parameter, and says where it lies in it, codes it as the whole."""
    arrays = ("exp_avg", "exp_avg_sq")
    stored = {"bfloat16": arrays, "int8": (*arrays, *(f"{a}_scale" for a in arrays))}[state_dtype]
    specs = tuple(
        ParameterSpec(name, "F32", (ROWS, COLUMNS), 0, stored) for name in ("other", "weight")
    )
    model = tuple(ModelTensor(spec.name, spec.dtype, spec.shape) for spec in specs)
    layout = Layout(specs, model, 1024, state_dtype)
    values = torch.randn(ROWS * COLUMNS, generator=torch.Generator().manual_seed(0)).abs()

    def encoded(cuts: list[int]) -> dict[str, torch.Tensor]:
        out: dict[str, list[torch.Tensor]] = {name: [] for name in stored}
        for piece in pieces_of(cuts):
            length = piece.stop - piece.start
            here = {
                name: torch.empty(-(-length // form.block), dtype=DTYPES[form.dtype])
                for name, form in layout.formats.items()
            }
            coder, memory = StateCoder(layout, 5, 9), BlockMemory()
            for name in arrays:
                part = values[piece.start : piece.stop].clone()
                coder.store(memory, {name: part}, here, [piece], 12345)
            for name, tensor in here.items():
                out[name].append(tensor)
        return {name: torch.cat(tensors) for name, tensors in out.items()}

    whole = encoded([0, ROWS * COLUMNS])
    for cuts in ([0, 992, 1984, ROWS * COLUMNS], [0, 32, 2944, ROWS * COLUMNS]):
        for name, tensor in encoded(cuts).items():
            assert_same_bits(tensor, whole[name], name)
