"""accelerate's own `prepare`, `accumulate`, `clip_grad_norm_`, `save_state` and `load_state`."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, ProjectConfiguration

import offload
from gds import MemoryBackend
from offload.errors import MismatchError, OffloadError
from offload.integrations.accelerate import follow
from tests.numerics.reference import assert_same_bits, bits


@pytest.fixture(autouse=True)
def accelerator_of_its_own() -> Iterator[None]:
    """Its settings are the process's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_model(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(3)
    layers = torch.nn.Linear(6, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
    return torch.nn.Sequential(*layers).to(dtype)


def make_optimizer(
    model: torch.nn.Module, directory: Any, **settings: Any
) -> offload.OffloadedOptimizer:
    options = offload.Options(chunk_bytes=4096, **settings.pop("options", {}))
    return offload.AdamW(
        model.parameters(),
        lr=0.02,
        directory=directory,
        model=model,
        keep=1,
        options=options,
        **settings,
    )


class Loop:
    """A loop as accelerate's documentation has it; `total_limit` is accelerate's own rotation."""

    def __init__(
        self, root: Path, *, discard_newer: bool = False, total_limit: int | None = None
    ) -> None:
        GradientState._reset_state()
        config = ProjectConfiguration(
            str(root / "out"), automatic_checkpoint_naming=True, total_limit=total_limit
        )
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            mixed_precision="bf16",
            project_config=config,
        )
        model = make_model(torch.float32)
        model[2].bfloat16()
        self.offloaded = make_optimizer(model, root / "run")
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.offloaded, T_max=8)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, self.offloaded, scheduler
        )
        self.following = follow(self.accelerator, self.optimizer, discard_newer=discard_newer)
        self.losses: list[float] = []

    def train(self, first: int, last: int, *, save_every: int = 2) -> Loop:
        for step in range(first, last):
            for part in range(2):
                data = torch.Generator().manual_seed(10 * step + part)
                with self.accelerator.accumulate(self.model):
                    self.accelerator.gradient_state._set_sync_gradients(part == 1)
                    x = torch.randn(5, 6, generator=data)
                    loss = (self.model(x) - x.sum(1, keepdim=True)).float().square().mean()
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.item())
            if (step + 1) % save_every == 0:
                self.accelerator.save_state()
        return self

    def close(self) -> None:
        self.offloaded.close()


def pinned(root: Path) -> list[int]:
    infos = offload.list_checkpoints(root / "run")
    return [info.step for info in infos if f"accelerate-{info.step}" in info.pins]


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    whole = Loop(tmp_path / "whole").train(0, 7)
    cut = Loop(tmp_path / "cut").train(0, 5)
    cut.close()
    resumed = Loop(tmp_path / "cut")
    resumed.accelerator.load_state()
    assert resumed.offloaded.stats().bytes_read < 4096, "parameters are not read, nor is the state"
    resumed.accelerator.project_configuration.iteration = 2  # accelerate wants to be told
    resumed.train(4, 7)
    assert resumed.losses == whole.losses[8:]
    assert resumed.scheduler.state_dict() == whole.scheduler.state_dict()
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert_same_bits(mine, theirs, "parameter")
    whole.close()
    resumed.close()


def test_losses_are_those_of_plain_torch(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    plain = make_model(torch.float32)
    plain[2].bfloat16()
    masters = [p.detach().float().clone() for p in plain.parameters()]
    reference = torch.optim.AdamW(masters, lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(reference, T_max=8)
    loop.train(0, 3)
    losses = []
    torch.manual_seed(3)
    make_model()  # draws what Loop has drawn for its model
    for step in range(3):
        for part in range(2):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + part))
            with torch.autocast("cpu", torch.bfloat16):
                y = plain(x)
            loss = (y.float() - x.sum(1, keepdim=True)).float().square().mean()
            (loss / 2).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for master, parameter in zip(masters, plain.parameters(), strict=True):
            master.grad = parameter.grad.float()
        reference.step()
        scheduler.step()
        with torch.no_grad():
            for master, parameter in zip(masters, plain.parameters(), strict=True):
                parameter.copy_(master)
                parameter.grad = None
    assert loop.losses == losses
    loop.close()


def test_prepare_moves_no_state() -> None:
    """It calls `state_dict`, moves all tensors in it to the device, and `load_state_dict`."""
    Accelerator(cpu=True)
    model, backend = make_model(), MemoryBackend()
    options = {"backend": backend, "allow_volatile": True}
    optimizer = make_optimizer(model, "/store", options=options)
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5 + step)
        optimizer.step()
    expected = copy.deepcopy(optimizer.full_state_dict())
    optimizer.synchronize()
    before = optimizer.stats()

    calls: list[str] = []
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("load_state_dict"))
    prepared = AcceleratedOptimizer(optimizer, device_placement=True)
    assert calls == ["load_state_dict"], "what this is about has happened"
    after = optimizer.stats()
    assert (after.bytes_read, after.bytes_written) == (before.bytes_read, before.bytes_written)
    assert len(optimizer.state) == 0
    with pytest.warns(RuntimeWarning, match="of step 3 in /store is not a checkpoint"):
        reference = optimizer.state_dict()
    found: list[Any] = [reference]
    for value in found:
        found.extend(value.values() if isinstance(value, dict) else ())
        found.extend(value if isinstance(value, list | tuple) else ())
    assert not any(isinstance(value, torch.Tensor) for value in found)
    state = prepared.optimizer.full_state_dict()
    assert state["param_groups"] == expected["param_groups"]
    for number, values in expected["state"].items():
        for name, value in values.items():
            assert state["state"][number][name].dtype == torch.float32
            assert_same_bits(state["state"][number][name], value, name)
    optimizer.close()


def test_accelerate_rewrites_params_after_construction(tmp_path: Path) -> None:
    """As FSDP2 and TP do: names and shapes must not be those of the placeholders."""
    Accelerator(cpu=True)
    results = []
    for switch in (False, True):
        model = make_model()
        optimizer = make_optimizer(model, tmp_path / f"run-{switch}")
        prepared = AcceleratedOptimizer(optimizer)
        if switch:
            placed = {}
            for module in model:
                for name, parameter in list(module.named_parameters()):
                    placed[parameter] = torch.nn.Parameter(parameter.detach().clone())
                    setattr(module, name, placed[parameter])
            prepared._switch_parameters(placed)
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5 + step)
            prepared.step()
        names = optimizer.checkpoint().result().manifest.layout.parameters
        results.append(([spec.name for spec in names], [bits(p) for p in model.parameters()]))
        optimizer.close()
    (names, expected), (switched, found) = results
    assert switched == names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_folders_that_accelerate_removes_let_go(tmp_path: Path) -> None:
    loop = Loop(tmp_path, total_limit=2).train(0, 4, save_every=1)
    assert pinned(tmp_path) == [3, 4]
    loop.accelerator.save_state()  # checkpoint_4, another folder of the same step
    shutil.rmtree(tmp_path / "out/checkpoints/checkpoint_4")
    loop.train(4, 5, save_every=1)
    assert pinned(tmp_path) == [4, 5], "checkpoint_3 is still there"
    loop.train(5, 6, save_every=1)
    assert pinned(tmp_path) == [5, 6]
    loop.close()


def test_an_older_folder_is_loaded_only_if_told_to(tmp_path: Path) -> None:
    whole = Loop(tmp_path).train(0, 6)
    whole.close()
    older = str(tmp_path / "out/checkpoints/checkpoint_0")
    refused = Loop(tmp_path)
    with pytest.raises(MismatchError, match=r"checkpoint_1 refers to.*discard_newer=True"):
        refused.accelerator.load_state(older)
    assert pinned(tmp_path) == [2, 4, 6]
    refused.close()
    told = Loop(tmp_path, discard_newer=True)
    with pytest.warns(RuntimeWarning, match="the newer checkpoints are withdrawn: step-00000004"):
        told.accelerator.load_state(older)
    told.train(2, 6, save_every=10)
    assert told.losses == whole.losses[4:]
    told.close()


def test_without_follow_nothing_is_sealed_and_loading_says_so(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.following.stop()
    with pytest.warns(RuntimeWarning, match=r"cannot be loaded by another.*follow\(accelerator"):
        loop.train(0, 2)
    loop.close()
    again = Loop(tmp_path)
    with pytest.raises(MismatchError, match=r"without sealing.*Call follow\("):
        again.accelerator.load_state()
    again.close()


def test_following_needs_our_optimizer_and_its_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(make_model().parameters())
    with pytest.raises(TypeError, match=r"got torch\.optim\.sgd\.SGD: pass the one"):
        follow(accelerator, accelerator.prepare(optimizer))
    alone = make_optimizer(make_model(), tmp_path)
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):  # the former is FSDP1
        with monkeypatch.context() as patched:
            patched.setattr(Accelerator, "num_processes", 1)
            patched.setattr(Accelerator, "distributed_type", kind)
            with pytest.raises(OffloadError, match=kind.value):
                follow(accelerator, alone)
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda _: 2))
    with pytest.raises(OffloadError, match=r"2 processes, and the optimizer in .* with 1: constr"):
        follow(accelerator, alone)
    alone.close()
