"""Where the kernel cannot be used, torch's code is, one line says so, and `stats()` says why."""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.update import kernel_check
from offload.update.kernel import loading
from tests.update_kernel.steps import kernel_for


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "offload")


@pytest.fixture
def asked_again() -> Iterator[None]:
    """Let the test, and the tests after it, look for the library and check it anew."""

    def forget() -> None:
        for cached in (
            loading.find_library,
            loading.torchs_root,
            kernel_check._trusted,
            kernel_check._say_once,
        ):
            cached.cache_clear()

    forget()
    yield
    forget()


def optimizer_of(
    parameter: torch.nn.Parameter, optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> offload.OffloadedOptimizer:
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True)
    return offload.OffloadedOptimizer(
        optimizer_class, [parameter], lr=0.1, directory="/s", options=options
    )


def steps_as_torch_in_memory(num: int = 3) -> str:
    """Take steps, compare them with torch's, and return `Stats.update_code`."""
    values = torch.linspace(-3, 3, 1600)
    live, expected = torch.nn.Parameter(values.clone()), torch.nn.Parameter(values.clone())
    reference = torch.optim.AdamW([expected], lr=0.1)
    with optimizer_of(live) as optimizer:
        for step in range(num):
            generator = torch.Generator().manual_seed(step)
            live.grad = torch.randn(1600, generator=generator)
            expected.grad = live.grad.clone()
            optimizer.step()
            reference.step()
        code = optimizer.stats().update_code
        optimizer.checkpoint().result()
    assert torch.equal(live.detach(), expected.detach())
    return code


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "torch's code" in record.message]


LIBRARIES = ("update_avx2.so", "update_avx512.so")


def missing(folder: Path) -> None:
    """Leave the folder without libraries."""


def truncated(folder: Path) -> None:
    """Leave half of each library; the loader alone would end the process with a bus error."""
    for path in (Path(loading.__file__).parent / "lib").glob("*.so"):
        whole = path.read_bytes()
        (folder / path.name).write_bytes(whole[: len(whole) // 2])


def of_other_sources(folder: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    (folder / "other.cpp").write_text(
        'extern "C" int offload_kernel_update(void *) { return 0; }\n'
        'extern "C" int offload_kernel_roots(unsigned, void *, void *, long) { return 0; }\n'
        'extern "C" const char *offload_kernel_source() { return "0123456789abcdef"; }\n'
    )
    for path in LIBRARIES:
        command = ["c++", "-shared", "-fPIC", "-o", path, "other.cpp"]
        subprocess.run(command, cwd=folder, check=True)


SPOILT = {
    missing: "the kernel was not built when this package was installed",
    truncated: "bytes: install the package again",
    of_other_sources: "was built from other sources: install the package again",
}


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_library_that_cannot_be_used(
    spoil: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked_again: None,
) -> None:
    kernel_for(torch.optim.AdamW, "float32")
    asked_anew = loading.find_library.cache_clear, kernel_check._trusted.cache_clear
    (tmp_path / "lib").mkdir()
    spoil(tmp_path / "lib")
    monkeypatch.setattr(loading, "_FOLDER", tmp_path)
    for forget in asked_anew:
        forget()
    (code,) = {steps_as_torch_in_memory() for _ in range(2)}
    assert code.startswith("torch (")
    assert SPOILT[spoil] in " ".join(code.split())
    (line,) = lines_of(caplog)
    assert SPOILT[spoil] in line


def test_the_environment_turns_the_kernel_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked_again: None
) -> None:
    """Nobody needs to be told what they have asked for."""
    monkeypatch.setenv("OFFLOAD_UPDATE", "torch")
    assert steps_as_torch_in_memory() == "torch (OFFLOAD_UPDATE=torch)"
    assert lines_of(caplog) == []


def test_another_kind_of_processor_runs_torchs_code(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked_again: None,
) -> None:
    """Even where the libraries are, and whatever torch says of its instructions."""
    machine = "aarch64"
    monkeypatch.setattr(platform, "machine", lambda: machine)
    code = steps_as_torch_in_memory()
    assert code == f"torch (the kernel is written for x86_64, and this processor is {machine})"
    (line,) = lines_of(caplog)
    assert f"this processor is {machine}" in line


def changed_step(
    optimizer_class: type[torch.optim.Optimizer], change: Callable[[torch.Tensor], Any]
) -> Callable[..., Any]:
    """Return the step of a class, followed by a change of each parameter."""
    step: Any = optimizer_class.step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step

    def changed(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        result = step(self, closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    change(parameter)
        return result

    return changed


def one_unit_more_for_few(values: torch.Tensor) -> None:
    """Change one value in a thousand, or so, by a unit in the last place."""
    bits = values.view(torch.int32)
    bits += (bits & 0x3FF) == 5


def test_a_step_that_a_program_has_replaced_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the kernel has been used before, and again when the step is torch's once more."""
    kernel_for(torch.optim.AdamW, "float32")
    assert steps_as_torch_in_memory().startswith("kernel")
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.optim.AdamW, "step", changed_step(torch.optim.AdamW, lambda p: p.clamp_(-1, 1))
        )
        code = steps_as_torch_in_memory()
        assert code == "torch (the kernel does not give the bits of this torch on this processor)"
    assert steps_as_torch_in_memory().startswith("kernel")


@pytest.mark.parametrize(
    ("optimizer_class", "state_dtype"),
    [(torch.optim.AdamW, "float32"), (torch.optim.Adam, "bfloat16"), (torch.optim.SGD, "int8")],
)
def test_the_check_notices_another_arithmetic(
    optimizer_class: type[torch.optim.Optimizer],
    state_dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    asked_again: None,
) -> None:
    kernel_for(optimizer_class, state_dtype)
    changed = changed_step(optimizer_class, one_unit_more_for_few)
    monkeypatch.setattr(optimizer_class, "step", changed)
    chosen = kernel_check.choose_kernel(optimizer_class, state_dtype)
    assert chosen.kernel is None
    assert "does not give the bits" in chosen.code


def test_an_unknown_square_root_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked_again: None
) -> None:
    kernel_for(torch.optim.AdamW, "float32")
    kernel_check._trusted.cache_clear()
    loading.torchs_root.cache_clear()
    root = torch.Tensor.sqrt

    def other(values: torch.Tensor) -> torch.Tensor:
        found = root(values).clone()
        found.view(torch.int32)[7] += 1
        return found

    monkeypatch.setattr(torch.Tensor, "sqrt", other)
    code = kernel_check.choose_kernel(torch.optim.AdamW, "float32").code
    assert code == (
        "torch (the kernel does not have the square root of this torch on this processor)"
    )
    assert kernel_check.choose_kernel(torch.optim.SGD, "float32").code.startswith("kernel")
