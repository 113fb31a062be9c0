"""Gradients in host memory or on the drive: torch's own code works on them, to the bit."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from gds import PosixBackend, StorageError
from offload.errors import OverlapError, UnsupportedParameterError
from tests.crash.fault_backend import FaultBackend
from tests.dying import dying
from tests.numerics.reference import Reference, assert_same_bits, assert_same_parameters

KINDS = pytest.mark.parametrize("kind", ["host", "drive"])
CLASSES = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
}
WORDS = 400


class Tied(torch.nn.Module):
    """A model with gradients of all sizes: on the drive, too small for it, and tied."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, 160)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(160, 240), torch.nn.GELU(), torch.nn.Linear(240, 160)
        )
        self.norm = torch.nn.LayerNorm(160)
        self.image = torch.nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.head = torch.nn.Linear(160, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.body(self.words(tokens)))
        extra = self.image(found[None, None, 0]).mean()
        return self.head(found).float() + extra.float()


def loss(model: torch.nn.Module, seed: int, scale: float = 7.0) -> torch.Tensor:
    tokens = torch.randint(WORDS, (8, 16), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) * scale


def options(kind: str | None, **settings: Any) -> offload.Options:
    return offload.Options(gradients=kind, chunk_bytes=1 << 17, allow_volatile=True, **settings)


def same_gradients(model: torch.nn.Module, plain: torch.nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same_bits(p.grad.clone(), q.grad, name)


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", CLASSES)
def test_training_has_the_bits_of_torch(name, dtype, kind, tmp_path):
    optimizer_class, hyper = CLASSES[name]
    model, plain = Tied(dtype), Tied(dtype)
    expected = Reference(optimizer_class, plain.parameters(), **hyper)
    with offload.OffloadedOptimizer(
        optimizer_class,
        model.parameters(),
        directory=tmp_path / "run",
        model=model,
        options=options(kind, overlap="forward" if dtype == torch.float32 else None),
        **hyper,
    ) as optimizer:
        for step, num_micro in enumerate((1, 3, 2)):
            for each in (model, plain):
                for micro in range(num_micro):
                    loss(each, 10 * step + micro).backward()
            same_gradients(model, plain)
            norms = [
                torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (model, plain)
            ]
            assert_same_bits(*norms, "norm")
            if step == 1:
                for each in (model, plain):
                    torch.nn.utils.clip_grad_value_(each.parameters(), 1e-3)
            optimizer.step()
            expected.step()
            assert_same_parameters(model.named_parameters(), plain.named_parameters())
            optimizer.zero_grad(set_to_none=step != 1)
            for p in plain.parameters():
                p.grad = None if step != 1 else torch.zeros_like(p)
        state = optimizer.full_state_dict()["state"]
        for number, p in enumerate(plain.parameters()):
            for key, value in expected.state(p).items():
                assert_same_bits(state[number][key], torch.as_tensor(value), key)


@KINDS
@pytest.mark.parametrize(
    "settings",
    [{"master": "split"}, {"state_dtype": "int8"}, {"state_dtype": "bfloat16"}],
    ids=["split", "int8", "bfloat16"],
)
def test_compressed_state_has_the_bits_that_it_has_otherwise(settings, kind, tmp_path):
    found = []
    for gradients in (None, kind):
        model = Tied(torch.bfloat16)
        with offload.AdamW(
            model.parameters(),
            directory=tmp_path / str(gradients),
            options=options(gradients, **settings),
        ) as optimizer:
            for step in range(3):
                loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(dict(model.named_parameters()))
    assert_same_parameters(found[1].items(), found[0].items())


@KINDS
def test_a_resumed_run_goes_on_with_the_same_bits(kind, tmp_path):
    def train(model: torch.nn.Module, optimizer: offload.OffloadedOptimizer, steps: range) -> None:
        for step in steps:
            loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, model = Tied(torch.bfloat16), Tied(torch.bfloat16)
    with offload.AdamW(whole.parameters(), directory=tmp_path / "a", options=options(kind)) as one:
        train(whole, one, range(4))
    with offload.AdamW(model.parameters(), directory=tmp_path / "b", options=options(kind)) as two:
        train(model, two, range(2))
        two.checkpoint()
    model = Tied(torch.bfloat16)
    with offload.AdamW(model.parameters(), directory=tmp_path / "b", options=options(kind)) as two:
        assert two.restore() is not None
        train(model, two, range(2, 4))
    assert_same_parameters(model.named_parameters(), whole.named_parameters())


@KINDS
@pytest.mark.parametrize("overflows", [False, True])
def test_a_loss_scaler_unscales_and_skips_as_in_torch(overflows, kind, tmp_path):
    model, plain = Tied(torch.float32), Tied(torch.float32)
    inner = torch.optim.AdamW(plain.parameters())
    with offload.AdamW(
        model.parameters(), directory=tmp_path / "run", options=options(kind)
    ) as optimizer:
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
        for step in range(2):
            for each, one, scaler in zip((model, plain), (optimizer, inner), scalers, strict=True):
                scaler.scale(loss(each, step)).backward()
                if overflows and step == 0:
                    with torch.no_grad():
                        each.head.weight.grad.fill_(float("inf"))
                scaler.unscale_(one)
                torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
                if not overflows:
                    assert each.head.weight.grad.abs().max() < 1
                scaler.step(one)
                scaler.update()
                one.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same_parameters(model.named_parameters(), plain.named_parameters())
        assert optimizer.stats().steps == (1 if overflows else 2)


@KINDS
def test_fp16_gradients_are_unscaled_in_the_step(kind, tmp_path):
    found = []
    for gradients in (None, kind):
        model = Tied(torch.float16)
        with offload.AdamW(
            model.parameters(), directory=tmp_path / str(gradients), options=options(gradients)
        ) as optimizer:
            scaler = offload.GradScaler("cpu", init_scale=64.0)
            for step in range(2):
                scaler.scale(loss(model, step)).backward()
                norm = scaler.clip_grad_norm_(optimizer, 0.25)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            found.append({"norm": norm, **dict(model.named_parameters())})
    assert_same_parameters(found[1].items(), found[0].items())


@KINDS
def test_other_code_reads_and_changes_gradients_as_always(kind, tmp_path):
    model, plain = Tied(torch.bfloat16), Tied(torch.bfloat16)
    with offload.AdamW(model.parameters(), directory=tmp_path / "run", options=options(kind)):
        for each in (model, plain):
            loss(each, 1).backward()
        grad, torchs = model.head.weight.grad, plain.head.weight.grad
        assert (grad.shape, grad.dtype, grad.device) == (torchs.shape, torchs.dtype, torchs.device)
        assert_same_bits(grad.abs().max(), torchs.abs().max(), "largest")
        assert_same_bits(grad.float().norm(), torchs.float().norm(), "norm of a copy")
        assert_same_bits(copy.deepcopy(grad), torchs, "deepcopy")
        saved = io.BytesIO()
        torch.save(grad, saved)
        saved.seek(0)
        assert_same_bits(torch.load(saved), torchs, "torch.save")
        for p in (model.head.weight, plain.head.weight):
            p.grad.data.mul_(0.37)
            p.grad += 1e-3
            p.grad.copy_(p.grad.clamp(-0.01, 0.01))
            p.grad[0].zero_()
        assert_same_bits(model.head.weight.grad.clone(), plain.head.weight.grad, "changed")


def test_a_gradient_that_a_step_beside_the_model_has_taken_is_refused(tmp_path):
    model = Tied(torch.bfloat16)
    with offload.AdamW(
        model.parameters(),
        directory=tmp_path / "run",
        model=model,
        options=options("drive", overlap="forward"),
    ) as optimizer:
        loss(model, 0).backward()
        kept = model.head.weight.grad
        optimizer.step()
        assert model.head.weight.grad is None
        with pytest.raises(OverlapError, match="step\\(\\) has taken this gradient"):
            kept.add_(1)


def test_sparse_gradients_and_graphs_stay_as_they_are(tmp_path):
    words = torch.nn.Embedding(WORDS, 160, sparse=True)
    with offload.AdamW(
        words.parameters(), directory=tmp_path / "run", options=options("drive")
    ) as optimizer:
        words(torch.tensor([1, 2])).sum().backward()
        assert words.weight.grad.is_sparse
        with pytest.raises(UnsupportedParameterError, match="sparse"):
            optimizer.step()
        words.weight.grad = None
        with pytest.warns(UserWarning, match="create_graph"):
            words.weight.square().sum().backward(create_graph=True)
        assert words.weight.grad.requires_grad


def test_parameters_that_join_later_have_their_gradients_moved(tmp_path):
    model = Tied(torch.bfloat16)
    late = model.body[0].weight.requires_grad_(False)
    with offload.AdamW(
        [model.head.weight, late], directory=tmp_path / "run", options=options("drive")
    ) as optimizer:
        optimizer.add_param_group({"params": [model.body[2].weight]})
        for step in range(2):
            late.requires_grad_(step > 0)
            loss(model, step).backward()
            assert "outside" in repr(model.body[2].weight.grad)
            optimizer.step()
            optimizer.zero_grad()
        loss(model, 2).backward()
        assert "outside" in repr(late.grad)


def test_a_drive_without_room_is_named_when_the_optimizer_is_made(tmp_path):
    class Nearly(PosixBackend):
        def free_bytes(self, directory: str) -> int:
            return 100_000

    model = torch.nn.Linear(200_000, 1, bias=False, dtype=torch.bfloat16)
    settings = {"directory": tmp_path / "run", "keep": 1}
    with offload.AdamW(model.parameters(), options=options(None), **settings) as optimizer:
        for _ in range(2):  # now no slot is missing
            model(torch.ones(200_000, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.checkpoint()
    with Nearly() as backend, pytest.raises(StorageError, match=r"401408 bytes .* make room"):
        offload.AdamW(model.parameters(), options=options("drive", backend=backend), **settings)


@pytest.mark.parametrize("when", ["at once", "in time", "later"])
def test_a_write_that_fails_refuses_the_step_and_training_can_go_on(when, tmp_path):
    model, plain = Tied(torch.bfloat16), Tied(torch.bfloat16)
    expected = Reference(torch.optim.AdamW, plain.parameters())
    backend = FaultBackend(PosixBackend(), when)
    with offload.AdamW(
        model.parameters(), directory=tmp_path / "run", options=options("drive", backend=backend)
    ) as optimizer:
        for each, one in ((model, optimizer), (plain, expected)):
            loss(each, 0).backward()
            one.step()
        optimizer.zero_grad()
        optimizer.checkpoint().result()
        optimizer.synchronize()
        backend.fail("write", 1, forever=True)
        with pytest.raises(StorageError):
            optimizer.step(lambda: loss(model, 1).backward())
        backend.repair()
        optimizer.zero_grad()
        plain.zero_grad()
        for each, one in ((model, optimizer), (plain, expected)):
            loss(each, 1).backward()
            one.step()
        assert_same_parameters(model.named_parameters(), plain.named_parameters())


def test_files_of_gradients_have_no_name_and_old_ones_are_removed(tmp_path):
    model = Tied(torch.bfloat16)
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / ".gradients-0123").write_bytes(b"left by a process that was killed")
    with offload.AdamW(
        model.parameters(), directory=directory, options=options("drive")
    ) as optimizer:
        loss(model, 0).backward()
        optimizer.step()
        assert not [name for name in os.listdir(directory) if name.startswith(".gradients")]
        kept = model.head.weight.grad
    with pytest.raises(StorageError, match="is closed"):
        kept.clone()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradients": "disk"}, "gradients must be one of"),
        ({"gradients": "host", "placement": "device"}, "does not go with placement"),
        ({"gradients": "drive", "overlap": "backward"}, "applies gradients at once"),
    ],
)
def test_options_that_exclude_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        offload.Options(**settings)


PROGRAM = """
import ctypes, json, sys, torch, offload
ctypes.CDLL(None).mallopt(-3, 64 << 10)  # M_MMAP_THRESHOLD: else glibc keeps freed gradients
depth, kind, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
model = torch.nn.ModuleList(
    torch.nn.Linear(2048, 1024, bias=False, dtype=torch.bfloat16) for _ in range(depth)
)
optimizer = offload.SGD(
    model.parameters(), lr=0.1, directory=directory, keep=1,
    options=offload.Options(gradients=kind if kind != "None" else None, chunk_bytes=1 << 20),
)
def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) << 10
def train():
    for layer in model:
        layer(torch.ones(1, 2048, dtype=torch.bfloat16)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
train()
optimizer.step()
before = optimizer.stats()
optimizer.zero_grad()
start = status("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")
train()
peak = status("VmHWM:") - start
optimizer.step()
optimizer.synchronize()
after = optimizer.stats()
print(json.dumps({"peak": peak, "spilled": after.spilled_gradient_bytes,
                  "gradients": depth * 2048 * 1024 * 2,
                  "written": after.bytes_written - before.bytes_written,
                  "read": after.bytes_read - before.bytes_read}))
optimizer.close()
"""


def test_gradients_on_the_drive_take_no_memory_and_four_bytes_of_traffic(tmp_path):
    """Two depths, four times apart: the same peak; a clipped step moves 6 + 6 bytes."""
    found = {}
    for depth, kind in ((8, "drive"), (32, "drive"), (32, "None")):
        result = subprocess.run(
            dying(
                [sys.executable, "-c", PROGRAM, str(depth), kind, str(tmp_path / f"{depth}{kind}")]
            ),
            capture_output=True,
            text=True,
            timeout=240,
            cwd=Path(__file__).parents[2],
            check=False,
        )
        assert result.returncode == 0, result.stderr
        found[depth, kind] = json.loads(result.stdout)
    small, large = found[8, "drive"], found[32, "drive"]
    assert found[32, "None"]["peak"] > 0.9 * large["gradients"]
    assert large["peak"] < 40 << 20
    assert large["spilled"] == large["gradients"]
    assert abs(large["peak"] - small["peak"]) < 16 << 20
    num_elements = large["gradients"] // 2
    for name in ("written", "read"):
        assert large[name] == pytest.approx(6 * num_elements, rel=0.04), name
        assert found[32, "None"][name] == pytest.approx(4 * num_elements, rel=0.04), name
