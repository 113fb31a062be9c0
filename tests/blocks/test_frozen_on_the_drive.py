"""Frozen parameters of blocks that are on the drive: in the newest checkpoint, and nowhere else."""

from __future__ import annotations

import copy
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import offload
from offload.errors import DamagedError, SealError, UnsupportedParameterError
from tests.blocks.models import Model, Pair, batch, make, pair
from tests.blocks.test_on_the_drive import ALL_DRIVE, DRIVE, on_the_drive
from tests.numerics.reference import assert_same_bits, assert_same_parameters
from tests.process_memory import resident_bytes

FREEZE = ("up.weight", "qkv.weight", "down.weight")


def freeze(model: Any) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(requires_grad=not name.endswith(FREEZE))


def values(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(n, p.detach().clone()) for n, p in model.named_parameters()]


class Program:
    """A random program of steps, checkpoints, edits, and changes of what is trained."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        options = {**self.random.choice([DRIVE, ALL_DRIVE]), "chunk_bytes": 16384}
        self.both = pair(directory, options=options)
        for model in self.both:
            freeze(model)
        self.sealed: Any = None
        self.handle: Any = None
        self.step_number = 0

    def train(self) -> None:
        self.step_number += 1
        self.both.train(self.step_number)
        self.both.step()

    def checkpoint(self) -> None:
        self.handle = self.both.optimizer.checkpoint()
        self.sealed = copy.deepcopy((self.both.plain, self.both.reference))
        if self.random.random() < 0.6:
            self.handle.result()

    def edit(self) -> None:
        if self.handle is not None:
            self.handle.result()  # as an edit must not come before the next step otherwise
        layer, factor = self.random.randrange(5), self.random.choice([0.5, 2.0, -1.0])
        name = self.random.choice(FREEZE)
        for model in self.both:
            with torch.no_grad():
                model.layers[layer].get_parameter(name).mul_(factor)

    def change(self) -> None:
        layer, name = self.random.randrange(5), self.random.choice(FREEZE)
        for model in self.both:
            p = model.layers[layer].get_parameter(name)
            p.requires_grad_(requires_grad=not p.requires_grad)
            p.grad = None

    def restore(self) -> None:
        if self.handle is None:
            return
        assert self.both.optimizer.restore() is not None
        plain, reference = copy.deepcopy(self.sealed)
        for now, one in zip(self.both.streamed.parameters(), plain.parameters(), strict=True):
            one.requires_grad_(now.requires_grad)
            one.grad = now.grad = None
        self.both = Pair(plain, self.both.streamed, reference, self.both.optimizer)
        self.both.compare()

    def run(self, num: int) -> None:
        kinds = [self.train] * 3 + [self.checkpoint] * 2 + [self.edit, self.change, self.restore]
        for _ in range(num):
            self.random.choice(kinds)()
            if self.random.random() < 0.5:
                self.both.compare()


@pytest.mark.parametrize("seed", range(10))
def test_random_programs_have_the_bits_of_torch(seed: int, tmp_path: Path) -> None:
    program = Program(tmp_path / "run", seed)
    program.train()
    program.run(24)
    program.both.compare()
    program.checkpoint()
    program.both.optimizer.close()
    model = make(seed=9)
    freeze(model)
    with on_the_drive(model, tmp_path / "run") as optimizer:
        path = optimizer.restore().path
        assert_same_parameters(values(model), values(program.sealed[0]))
    stored = safetensors.torch.load_file(f"{path}/model.safetensors")
    for name, value in values(program.sealed[0]):
        assert_same_bits(stored[name], value, name)


def imported(directory: Path, plain: Model) -> Any:
    """Return a model that was never in memory, whose weights a store has."""
    safetensors.torch.save_file(plain.state_dict(), directory / "model.safetensors")
    offload.import_checkpoint(directory / "model.safetensors", directory / "run", torch.optim.AdamW)
    with offload.outside_memory():
        return Model(width=plain.embedding.embedding_dim).to(torch.bfloat16)


def train(model: Any, optimizer: Any, seed: int) -> None:
    model.zero_grad()
    model.loss(batch(seed)).backward()
    optimizer.step()


def test_an_older_checkpoint_has_its_own_frozen_values(tmp_path: Path) -> None:
    model = imported(tmp_path, make())
    freeze(model)
    sealed = {}
    with on_the_drive(model, tmp_path / "run", keep=5) as optimizer:
        optimizer.restore()
        for step in range(1, 5):
            train(model, optimizer, step)
            with torch.no_grad():
                model.layers[step].up.weight.fill_(step)
                model.layers[0].qkv.weight.mul_(0.5)
            optimizer.checkpoint().result()
            sealed[step] = values(model)
        for step in (3, 1):
            optimizer.restore(step, discard_newer=True)
            assert_same_parameters(values(model), sealed[step])
            train(model, optimizer, step)
            path = optimizer.checkpoint().result().path
            stored = safetensors.torch.load_file(f"{path}/model.safetensors")
            for name, value in values(model):
                assert_same_bits(stored[name], value, name)


def test_frozen_values_are_written_once_for_each_slot(tmp_path: Path) -> None:
    model = imported(tmp_path, make(width=256))
    freeze(model)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert frozen > 6 << 20
    with on_the_drive(model, tmp_path / "run") as optimizer:
        optimizer.restore()
        written = []
        for step in range(5):
            train(model, optimizer, step)
            before = optimizer.stats().seal_bytes
            optimizer.checkpoint().result()
            written.append(optimizer.stats().seal_bytes - before)
    assert sum(written[2:]) < sum(written[:2]) / 4, written


def test_a_model_that_was_built_in_memory_leaves_it_with_the_first_checkpoint(
    tmp_path: Path,
) -> None:
    model = make(layers=5)
    for layer in model.layers:  # glibc gives memory of this size back at once
        layer.add_module("base", torch.nn.Linear(1, 33 << 20, bias=False, dtype=torch.bfloat16))
    model.layers.requires_grad_(requires_grad=False)
    with on_the_drive(model, tmp_path / "run", chunk_bytes=1 << 20) as optimizer:
        train(model, optimizer, 0)
        before = resident_bytes("VmRSS")
        optimizer.checkpoint().result()
        train(model, optimizer, 1)
        # 330 MiB are gone; a block and buffers of the seal have come.
        assert before - resident_bytes("VmRSS") > 130 << 20


def test_an_edit_of_a_large_frozen_parameter_reaches_every_slot(tmp_path: Path) -> None:
    """A seal skips 16 MiB without reading them if it knows that its slot has them already."""
    model = make(layers=2)
    for layer in model.layers:
        layer.add_module("base", torch.nn.Linear(1, 20 << 20, bias=False, dtype=torch.bfloat16))
        layer.base.requires_grad_(requires_grad=False)
    base = model.layers[1].base.weight
    expected = base.detach().clone()
    expected[10 << 20] = 7.0
    with on_the_drive(model, tmp_path / "run", chunk_bytes=1 << 20) as optimizer:
        for step in range(6):
            train(model, optimizer, step)
            if step == 2:
                with torch.no_grad():
                    base[10 << 20] = 7.0
            path = optimizer.checkpoint().result().path
            if step >= 2:
                stored = safetensors.torch.load_file(f"{path}/model.safetensors")
                assert_same_bits(stored["layers.1.base.weight"], expected, f"step {step}")


def test_damage_of_frozen_values_is_not_sealed(tmp_path: Path) -> None:
    """The third slot gets the values of the second, which this process has written."""
    model = imported(tmp_path, make(width=256))
    freeze(model)
    with on_the_drive(model, tmp_path / "run", keep=3) as optimizer:
        optimizer.restore()
        train(model, optimizer, 0)
        path = optimizer.checkpoint().result().path
        train(model, optimizer, 1)
        with open(f"{path}/model.safetensors", "r+b") as file:
            middle = os.path.getsize(file.name) // 2
            file.seek(middle)
            byte = file.read(1)
            file.seek(middle)
            file.write(bytes([byte[0] ^ 4]))
        with pytest.raises(SealError, match="digests") as caught:
            optimizer.checkpoint().result()
        assert isinstance(caught.value.__cause__, DamagedError)


@pytest.mark.parametrize("is_stepped", [False, True])
@pytest.mark.parametrize("how", ["add_param_group", "append"])
def test_a_block_that_is_given_later_joins_with_its_values(
    how: str, is_stepped: bool, tmp_path: Path
) -> None:
    """The slot that steps write has never had the values; no use of the block brings them."""
    both = pair(tmp_path / "run", lambda m: m.layers.requires_grad_(False), options=DRIVE)

    def step(seed: int) -> None:
        for model, one in ((both.plain, both.reference), (both.streamed, both.optimizer)):
            train(model, one, seed)

    for seed in range(3):
        step(seed)
        if seed == 0:
            both.optimizer.checkpoint().result()
    added = []
    for model in both:
        block = model.layers[1].requires_grad_(True)
        added.append([(f"layers.1.{n}", p) for n, p in block.named_parameters()])
    if how == "add_param_group":
        both.reference.add_param_group({"params": added[0]})
        both.optimizer.add_param_group({"params": added[1]})
    else:
        for _, p in added[0]:
            both.reference.masters[p] = p.detach().float()
            both.reference.inner.param_groups[0]["params"].append(both.reference.masters[p])
        group = both.optimizer.param_groups[0]
        group["params"] += [p for _, p in added[1]]
        group["param_names"] += [n for n, _ in added[1]]
    if is_stepped:
        step(3)
    path = both.optimizer.checkpoint().result().path
    stored = safetensors.torch.load_file(f"{path}/model.safetensors")
    for name, value in values(both.plain):
        assert_same_bits(stored[name], value, name)
    step(4)
    both.compare()


def test_a_checkpoint_that_is_removed_by_others_stays_the_source(tmp_path: Path) -> None:
    """The files are open still. An older checkpoint has other values."""
    model = imported(tmp_path, make())
    freeze(model)
    with on_the_drive(model, tmp_path / "run", keep=3) as optimizer:
        optimizer.restore()
        for step in range(2):
            train(model, optimizer, step)
            path = optimizer.checkpoint().result().path
            with torch.no_grad():
                model.layers[1].up.weight.fill_(7 + step)
            train(model, optimizer, step)
        path = optimizer.checkpoint().result().path
        train(model, optimizer, 3)
        shutil.rmtree(path)
        with pytest.warns(RuntimeWarning, match="was removed"):
            optimizer.pin("good")  # which looks at the directory
        train(model, optimizer, 4)
        path = optimizer.checkpoint().result().path
        stored = safetensors.torch.load_file(f"{path}/model.safetensors")
        for name, value in values(model):
            assert_same_bits(stored[name], value, name)


@pytest.mark.parametrize("is_first", [True, False])
def test_another_optimizer_does_not_seal_what_is_on_the_drive(
    is_first: bool, tmp_path: Path
) -> None:
    model = make()
    blocks = [(n, p) for n, p in model.named_parameters() if n.startswith("layers.")]
    others = [(n, p) for n, p in model.named_parameters() if not n.startswith("layers.")]

    def other() -> Any:
        return offload.SGD(others, lr=0.01, directory=tmp_path / "b", model=model)

    second = None if is_first else other()
    options = offload.Options(parameters="drive", chunk_bytes=32768)
    with offload.AdamW(blocks, directory=tmp_path / "a", model=model, options=options) as first:
        model.loss(batch(0)).backward()
        first.step()
        first.checkpoint().result()
        with pytest.raises(UnsupportedParameterError, match=r"'layers.* without model=|leave out"):
            (second or other()).checkpoint().result()
    if second is not None:
        second.close()
