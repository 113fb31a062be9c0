"""What belongs to the user runs in the user's modes; what belongs to the library does not."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload import ambient
from offload.errors import UnsupportedParameterError
from tests.numerics.conftest import one_thread
from tests.numerics.reference import assert_same_bits
from tests.torch_contract.modes import MODES, Watching, flush_denormal

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow

ROOT = Path(__file__).parent.parent.parent


def modes_now() -> dict[str, Any]:
    """Return everything that a mode here changes."""
    made = torch.empty(1)
    return {
        "inference": torch.is_inference_mode_enabled(),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "made": (made.device.type, made.dtype, made.is_inference()),
        "functions": torch._C._is_torch_function_enabled(),
        "flushes": ambient.flushes_denormals(),
        "function modes": torch.overrides._len_torch_function_stack(),
    }


def make(
    model: torch.nn.Module, backend: MemoryBackend | None = None, **settings: Any
) -> offload.OffloadedOptimizer:
    return offload.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=0.01,
        directory="/store",
        model=model,
        options=offload.Options(
            chunk_bytes=4096,
            backend=backend or MemoryBackend(),
            allow_volatile=True,
            train_state_bytes=8192,
            **settings,
        ),
    )


def give(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.25)


class Noted:
    """Notes the modes that it is called in."""

    def __init__(self) -> None:
        self.found: dict[str, list[dict[str, Any]]] = {}

    def by(self, name: str) -> Any:
        return lambda *_args, **_kwargs: self.found.setdefault(name, []).append(modes_now())

    def with_loss(self) -> float:
        self.by("closure")()
        return 1.0


@pytest.mark.parametrize("mode", MODES)
def test_hooks_and_closures_run_in_the_modes_of_the_caller(mode: str) -> None:
    model = torch.nn.Linear(5, 3)
    noted = Noted()
    model._register_state_dict_hook(noted.by("the model's state_dict"))
    model.register_state_dict_pre_hook(noted.by("the model's state_dict, before"))
    optimizer = make(model)
    optimizer.register_step_pre_hook(noted.by("step, before"))
    optimizer.register_step_post_hook(noted.by("step"))
    optimizer.register_state_dict_pre_hook(noted.by("state_dict, before"))
    optimizer.register_state_dict_post_hook(noted.by("state_dict"))
    optimizer.register_load_state_dict_pre_hook(noted.by("load_state_dict, before"))
    optimizer.register_load_state_dict_post_hook(noted.by("load_state_dict"))
    give(model)
    noted.found.clear()
    with MODES[mode]():
        expected = modes_now()
        optimizer.step(noted.with_loss)
        optimizer.checkpoint().result()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(optimizer.full_state_dict())
        optimizer.checkpoint()
        assert modes_now() == expected
    optimizer.close()
    closures = noted.found.pop("closure")
    assert closures == [expected | {"grad": True}]  # as in torch
    assert len(noted.found) == 8
    different = {
        name: [each for each in found if each != expected] for name, found in noted.found.items()
    }
    assert different == {name: [] for name in noted.found}


def test_modes_that_are_nested_and_left_by_an_error_are_what_they_were() -> None:
    plain = modes_now()
    assert len(MODES) > 10
    for outer, inner in itertools.product(MODES, MODES):
        with MODES[outer](), MODES[inner]():
            expected = modes_now()
            with suppress(ZeroDivisionError), ambient.neutral():
                neutral = modes_now()
                with ambient.neutral():
                    assert modes_now() == neutral
                    with suppress(KeyError), ambient.as_user():
                        assert modes_now() == expected
                        with ambient.neutral():
                            assert modes_now() == neutral
                        raise KeyError
                assert modes_now() == neutral
                raise ZeroDivisionError
            assert modes_now() == expected
            with ambient.as_user():  # which is nothing here
                assert modes_now() == expected
        assert modes_now() == plain
        assert neutral.pop("function modes") == expected["function modes"]  # though none is asked
        made = ("cpu", neutral["made"][1], False)  # a default dtype is the process's
        assert plain | neutral == plain | {"grad": False, "functions": False, "made": made}


@pytest.mark.parametrize("disabled", ["DisableTorchFunction", "DisableTorchFunctionSubclass"])
def test_a_user_who_has_turned_functions_off_finds_them_off(disabled: str) -> None:
    with torch.device("meta"), getattr(torch._C, disabled)():
        expected = modes_now()
        with ambient.neutral(), ambient.as_user():
            assert modes_now() == expected


@pytest.mark.filterwarnings("ignore:the reference that state_dict")
def test_a_mode_of_the_user_sees_what_it_sees_of_torchs_own_optimizer() -> None:
    def program(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        optimizer.step()

    model, expected = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    give(model)
    give(expected)
    with Watching() as mine:
        optimizer = make(model)
        program(optimizer)
        optimizer.checkpoint().result()
        optimizer.full_state_dict()
        optimizer.restore()
        optimizer.close()
    with Watching() as torchs:
        program(torch.optim.AdamW(expected.parameters()))
    of_state_dict = {"torch.Tensor.detach", "torch.Tensor.requires_grad.__get__"}
    assert mine.seen - torchs.seen - of_state_dict == set()


def test_a_parameter_that_was_made_in_inference_mode_is_refused_by_name() -> None:
    with torch.inference_mode():
        model = torch.nn.Linear(5, 3)
    for within in (torch.no_grad, torch.inference_mode):
        with within(), pytest.raises(UnsupportedParameterError, match="'weight' was made in infer"):
            make(model)
    with torch.inference_mode():
        late = torch.nn.Parameter(torch.ones(3))
    model = torch.nn.Linear(5, 3)
    optimizer = make(model)
    for _ in range(2):  # before the first step, and after it
        with pytest.raises(UnsupportedParameterError, match=r"group1\.param0.* was made in infer"):
            optimizer.add_param_group({"params": [late]})
        assert len(optimizer.param_groups) == 1
        give(model)
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("overlap", [None, "forward"])
def test_frozen_parameters_and_buffers_that_were_made_in_inference_mode(overlap: Any) -> None:
    backend = MemoryBackend()

    def net() -> torch.nn.Module:
        with torch.inference_mode():
            base = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
            base.requires_grad_(False)
        return torch.nn.Sequential(base, torch.nn.Linear(4, 3))

    model = net()
    optimizer = make(model, backend, overlap=overlap)
    give(model)
    optimizer.step()
    optimizer.checkpoint().result()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.inference_mode():
        for tensor in model.state_dict().values():
            tensor.zero_()
    optimizer.restore()
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, expected[name], name)
    optimizer.close()
    model = net()
    optimizer = make(model, backend, overlap=overlap)
    optimizer.restore()
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, expected[name], name)
    give(model)
    optimizer.step()
    optimizer.checkpoint().result()
    optimizer.close()


def test_a_parameter_whose_gradient_was_made_in_inference_mode_is_stepped() -> None:
    models = [torch.nn.Linear(5, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizer = make(models[0])
    reference = torch.optim.AdamW(models[1].parameters(), lr=0.01)
    for step in (optimizer.step, reference.step):
        with torch.inference_mode():
            for model in models:
                give(model)
        step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_same_bits(one, other, "a parameter")
    optimizer.close()


SCALER_MODES = [mode for mode in MODES if mode != "function_mode"]
"""Not the one that spoils torch's own scaler."""


@pytest.mark.parametrize("mode", SCALER_MODES)
def test_a_scaler_in_a_mode_does_what_it_does_outside(mode: str) -> None:
    def program(where: str) -> tuple[list[torch.Tensor], float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(30, 4).half()
        optimizer = make(model)
        scaler = offload.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        for number in range(4):
            out = model(torch.ones(2, 30, dtype=torch.float16, device="cpu"))
            loss = out.float().square().mean()
            with MODES[mode]() if where in ("all", "scale") else torch.enable_grad():
                factor = scaler.scale(torch.ones((), dtype=torch.float32, device="cpu")).item()
            (loss * factor).backward()
            with MODES[mode]() if where in ("all", "step") else torch.enable_grad():
                if number % 2:
                    scaler.clip_grad_norm_(optimizer, 0.01)
                scaler.step(optimizer)
                if where == "all":
                    scaler.update()
            if where != "all":
                scaler.update()
            optimizer.zero_grad()
        optimizer.close()
        return list(model.parameters()), scaler.get_scale()

    expected, scale = program("none")
    for where in ("scale", "step", "all"):
        found, found_scale = program(where)
        assert found_scale == scale == 1024.0
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other, where)


def test_threads_that_have_flushed_denormals_do_not_keep_doing_so() -> None:
    with flush_denormal():
        told = ambient.for_thread(ambient.flushes_denormals)
        assert told()
    assert ambient.flushes_denormals() is False
    untold = ambient.for_thread(ambient.flushes_denormals)
    with flush_denormal():
        assert untold() is False  # and leaves it so: it is for threads of the library's own
        assert not ambient.flushes_denormals()


MAKERS = {
    *("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "linspace"),
    *("eye", "as_tensor", "scalar_tensor", "empty_strided", "normal", "randperm", "logspace"),
}
"""Functions of torch whose result is on the default device, or of the default dtype."""

OF_MEMORY = {"frombuffer"}
"""Those that need to be told a dtype only: their result is where the memory is."""


def makers_in(source: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each call of such a function, with the keywords that it is given."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in MAKERS | OF_MEMORY
        ):
            yield node.func.attr, {k.arg or "" for k in node.keywords}


def test_library_code_says_of_what_dtype_and_where_its_tensors_are() -> None:
    found = {}
    paths = [p for package in ("offload", "gds") for p in (ROOT / package).rglob("*.py")]
    num_calls = 0
    for path in paths:
        if "demo" in path.parts:
            continue  # a training program
        for name, keywords in makers_in(path.read_text()):
            num_calls += 1
            # What a library of a device has allocated says its own dtype.
            needed = {"device"} if name == "as_tensor" else {"dtype", "device"}
            missing = (needed if name in MAKERS else {"dtype"}) - keywords
            if missing:
                found[f"{path.relative_to(ROOT)}: torch.{name}"] = missing
    assert num_calls > 30
    assert found == {}
