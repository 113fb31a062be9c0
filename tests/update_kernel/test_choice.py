"""The kernel is used wherever it was built, and torch's code where it cannot be."""

from __future__ import annotations

import json

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.cli import main
from offload.update.kernel import find_library, torchs_root
from offload.update.kernel_check import choose_kernel
from tests.command_line import runner


class Derived(torch.optim.AdamW):
    """A class of the user's, which may compute anything."""


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_the_kernel_is_chosen_wherever_it_was_built(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    library = find_library()
    if isinstance(library, str):
        pytest.skip(library)
    if torchs_root(library) is None and optimizer is not torch.optim.SGD:
        pytest.skip("this library does not have the square root of this torch")
    for state_dtype in ("float32", "bfloat16", "int8"):
        assert choose_kernel(optimizer, state_dtype).code == f"kernel ({library.instructions})"


@pytest.mark.parametrize("optimizer", [Derived, torch.optim.NAdam])
def test_other_classes_run_torchs_code_with_the_same_bits(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    found = []
    for optimizer_class in (optimizer, torch.optim.AdamW) if optimizer is Derived else (optimizer,):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 3000))
        options = offload.Options(backend=MemoryBackend(), allow_volatile=True)
        with offload.OffloadedOptimizer(
            optimizer_class, [parameter], lr=0.1, directory="/s", options=options
        ) as offloaded:
            if optimizer_class is optimizer:
                code = f"torch ({optimizer.__name__} has no kernel)"
                assert offloaded.stats().update_code == code
            for step in range(3):
                parameter.grad = torch.linspace(-step, 2, 3000)
                offloaded.step()
        found.append(parameter.detach())
    assert torch.equal(found[0], found[-1])


def test_stats_and_checkpoints_say_which_code_it_was(tmp_path) -> None:
    parameter = torch.nn.Parameter(torch.ones(100))
    with offload.AdamW([parameter], directory=str(tmp_path / "run")) as optimizer:
        code = choose_kernel(torch.optim.AdamW, "float32").code
        assert optimizer.stats().update_code == code
        assert f"updated by: {code}" in optimizer.stats().summary()
        parameter.grad = torch.ones(100)
        optimizer.step()
        sealed = optimizer.checkpoint().result()
        assert sealed.update_code == code


def test_groups_that_run_torchs_code_are_named_with_the_reason(
    tmp_path, monkeypatch, capsys
) -> None:
    first, second = (torch.nn.Parameter(torch.ones(100)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second], "foreach": True}]
    code = choose_kernel(torch.optim.AdamW, "float32").code
    with offload.AdamW(groups, directory=str(tmp_path / "run")) as optimizer:
        for _ in range(2):
            first.grad = second.grad = torch.ones(100)
            optimizer.step()
        found = optimizer.stats().update_code
        optimizer.checkpoint().result()
    torchs = "torch (foreach=True asks for another step of torch)"
    assert found == (f"{code}, {torchs}" if code.startswith("kernel") else code)
    code, told, _ = runner("offload", main, monkeypatch, capsys)("show", tmp_path / "run", "--json")
    assert code == 0
    assert json.loads(told)["update_code"] == found
