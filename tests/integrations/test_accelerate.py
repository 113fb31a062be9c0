"""accelerate's own `prepare`, `accumulate`, `clip_grad_norm_`, `save_state` and `load_state`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType

import offload
from gds import MemoryBackend
from offload.errors import OffloadError
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
