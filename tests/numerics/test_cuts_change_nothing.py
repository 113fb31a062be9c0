"""No byte of compressed state depends on how it is cut, streamed, kept or spread.

Models are random, with sizes that fit to no chunk and no block. Each is trained once in plain
settings, and then in others; parameters, everything that is stored, and the FP32 values that
readers make of it, must be the same bits.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import offload
import offload.update.updater
from gds import MemoryBackend
from tests.numerics.pairs import CASES, Case, Cut, Pair
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
    "chunks-of-4-KiB": (Way({"chunk_bytes": 4096}), "int8"),
    "chunks-of-12-KiB-in-small-blocks": (
        Way({"chunk_bytes": 12288}, hot_elements=777), "split-int8", "split-bfloat16",
    ),
    "small-blocks": (Way(hot_elements=100), "split-int8"),
    "resident": (Way({"chunk_bytes": 4096, "host_memory": 30_000}), "split-bfloat16"),
    "all-resident": (Way({"chunk_bytes": 8192, "host_memory": "1GiB"}), "bfloat16"),
    "beside-forward": (Way({"chunk_bytes": 4096, "overlap": "forward"}), "split-bfloat16"),
    "beside-backward": (Way({"chunk_bytes": 8192, "overlap": "backward"}), "int8"),
    "three-directories": (
        Way({"chunk_bytes": 8192, "drives": offload.DriveTuning(shares=(1, 1, 5))}, 3, 999),
        "split-bfloat16", "split-int8",
    ),
    "resumed": (Way({"chunk_bytes": 4096}, resumed=True), "int8", "split-bfloat16"),
}  # fmt: skip
"""Each with a form, or two."""


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


@functools.cache
def plainly(form: str) -> Result:
    return train(form, PLAIN)


def train(form: str, way: Way) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.update.updater, "HOT_ELEMENTS", way.hot_elements or 512 << 10)
        return _train(1, FORMATS[form], way)


def _train(seed: int, form: dict[str, Any], way: Way) -> Result:
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
    result = Result(
        {name: p.detach().clone() for name, p in model.named_parameters()},
        {name: offload.read_state(checkpoint, name) for name, _ in model.named_parameters()},
        {array: dict(tensors) for array, tensors in stored.arrays.items()},
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


@pytest.mark.parametrize(
    ("form", "way"), [(form, way) for way, (_, *forms) in WAYS.items() for form in forms]
)
def test_no_byte_depends_on_how_the_state_is_cut(form, way):
    assert_same(train(form, WAYS[way][0]), plainly(form))


@pytest.mark.parametrize("form", FORMATS)
def test_no_byte_depends_on_what_else_is_trained(form):
    """Nor on the order of parameters: only on their names."""
    whole = plainly(form)
    backend = MemoryBackend()
    model = Model(1)
    chosen = [name for n, name in enumerate(whole.parameters) if n % 2 and n not in model.seldom]
    given = {name: p for name, p in model.named_parameters() if name in chosen}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in given)
    settings = {**FORMATS[form], "chunk_bytes": 4096}
    options = offload.Options(backend=backend, allow_volatile=True, **settings)
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


def spread(case: Case, shares: tuple[int, ...], **settings: Any) -> Pair:
    cut = Cut(4096, 3, 777, {"drives": offload.DriveTuning(shares=shares), **settings})
    return Pair(case, cut, MemoryBackend(), DIRECTORIES[: len(shares)])


@pytest.mark.parametrize(
    ("name", "shares", "settings"),
    [
        ("adamw", (1, 1, 1), {}),
        ("sgd-momentum-in-some-groups", (1, 4, 2), {}),
        ("adamw", (2, 3), {"host_memory": 90_000}),
    ],
)
def test_several_directories_give_the_bits_of_state_in_memory(name, shares, settings):
    """A resume keeps the shares that the store was made with."""
    pair = spread(CASES[name], shares, **settings)
    for step in range(12):
        pair.step(step)
        pair.assert_same_parameters()
        if step % 4 == 3:
            stored = pair.assert_same_state()
            assert len(stored.manifest["parts"]) == len(shares) - 1
            assert stored.manifest["shares"] == list(shares)
        if step == 7:
            other = offload.DriveTuning(shares=(5, 1, 1)[: len(shares)])
            pair.reopen(cut=Cut(8192, 2, settings={**settings, "drives": other}))
            assert pair.optimizer.restore().step == 8
