"""Hooks and closures run in the user's modes, readers and exchange do the same in any of them."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.errors import UnsupportedParameterError
from tests.numerics.conftest import one_thread
from tests.numerics.reference import StoredState, assert_same_bits, read_state
from tests.stores.small import make_optimizer, step
from tests.torch_contract.modes import MODES, Mode, Watching

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


def modes_now() -> dict[str, Any]:
    """Return everything that a mode here changes."""
    made = torch.empty(1)
    return {
        "inference": torch.is_inference_mode_enabled(),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "made": (made.device.type, made.dtype, made.is_inference()),
        "functions": torch._C._is_torch_function_enabled(),
        "flushes": 2.0**-1074 * 1.0 == 0.0,
        "function modes": torch.overrides._len_torch_function_stack(),
    }


def make(
    model: torch.nn.Module, backend: MemoryBackend | None = None, overlap: Any = None
) -> offload.OffloadedOptimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    settings = {"overlap": overlap}
    return make_optimizer(
        model, backend or MemoryBackend(), params=params, lr=0.01, settings=settings
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

    def with_an_error(self) -> float:
        self.by("closure")()
        raise ZeroDivisionError


OF_CALLERS: dict[str, Mode] = {
    **MODES,
    "functions off": torch._C.DisableTorchFunction,
    "functions of subclasses off": torch._C.DisableTorchFunctionSubclass,
}


@pytest.mark.parametrize("mode", OF_CALLERS)
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
    with OF_CALLERS[mode]():
        expected = modes_now()
        with suppress(ZeroDivisionError):
            optimizer.step(noted.with_an_error)
        assert modes_now() == expected
        optimizer.step(noted.with_loss)
        optimizer.checkpoint().result()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(optimizer.full_state_dict())
        optimizer.checkpoint()
        assert modes_now() == expected
    optimizer.close()
    closures = noted.found.pop("closure")
    assert closures == [expected | {"grad": True}] * 2  # as in torch
    assert len(noted.found) == 8
    different = {
        name: [each for each in found if each != expected] for name, found in noted.found.items()
    }
    assert different == {name: [] for name in noted.found}


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
        late = torch.nn.Parameter(torch.ones(3))
    for within in (torch.no_grad, torch.inference_mode):
        with within(), pytest.raises(UnsupportedParameterError, match="'weight' was made in infer"):
            make(model)
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
    with make(model, backend, overlap) as optimizer:
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
    model = net()
    with make(model, backend, overlap) as optimizer:
        optimizer.restore()
        for name, tensor in model.state_dict().items():
            assert_same_bits(tensor, expected[name], name)
        give(model)
        optimizer.step()
        optimizer.checkpoint().result()


@cache
def scaled(mode: str, where: str) -> tuple[list[torch.Tensor], float]:
    """Train with a scaler, some methods of which are called in a mode; return what came of it."""

    def within(method: str) -> Any:
        return MODES[mode]() if where in ("all", method) else torch.enable_grad()

    torch.manual_seed(0)
    model = torch.nn.Linear(30, 4).half()
    optimizer = make(model)
    scaler = offload.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for number in range(4):
        out = model(torch.ones(2, 30, dtype=torch.float16, device="cpu"))
        with within("scale"):
            factor = scaler.scale(torch.ones((), dtype=torch.float32, device="cpu")).item()
        (out.float().square().mean() * factor).backward()
        with within("step"):
            if number % 2:
                scaler.clip_grad_norm_(optimizer, 0.01)
            scaler.step(optimizer)
        with within("update"):
            scaler.update()
        optimizer.zero_grad()
    optimizer.close()
    return list(model.parameters()), scaler.get_scale()


@pytest.mark.parametrize("mode", ["inference_mode", "default_device", "float64", "autocast"])
def test_a_scaler_in_a_mode_does_what_it_does_outside(mode: str) -> None:
    expected, scale = scaled("no_grad", "none")
    for where in ("step", "all"):
        found, found_scale = scaled(mode, where)
        assert found_scale == scale == 1024.0
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other, where)


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def stored_model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(50, 30).bfloat16(), torch.nn.BatchNorm1d(30))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one checkpoint, of which everything is stored in fewer bits."""
    path = tmp_path_factory.mktemp("ambient") / "run"
    settings = {"state_dtype": "int8"}
    with make_optimizer(
        stored_model(), directory=path, lr=torch.tensor(0.01), settings=settings
    ) as optimizer:
        step(optimizer)
        optimizer.checkpoint({"state": torch.arange(7), "empty": torch.empty(0, 3)}).result()
    return path


def assert_ordinary(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    what = (found.device.type, found.is_inference(), found.requires_grad)
    assert what == ("cpu", False, False), name
    assert_same_bits(found, expected, name)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_read_is_the_same_and_can_be_changed_later(store: Path, mode: str) -> None:
    with offload.open_checkpoint(store) as opened:
        expected = {name: offload.read_state(opened, name) for name in NAMES}
    with MODES[mode](), offload.open_checkpoint(store) as opened:
        found = {name: offload.read_state(opened, name) for name in NAMES}
        train_state = opened.train_state
        (group,) = opened.hyperparameters
        assert opened.verify().ok
        assert [info.step for info in offload.list_checkpoints(store)] == [1]
    for name, arrays in found.items():
        assert arrays.keys() == expected[name].keys()
        for array, values in arrays.items():
            assert_ordinary(values, expected[name][array], f"{array} of {name}")
            values.zero_()
    assert_ordinary(group["lr"], torch.tensor(0.01), "lr")
    for name, wanted in {"state": torch.arange(7), "empty": torch.empty(0, 3)}.items():
        assert_ordinary(train_state[name], wanted, name)
        train_state[name].add_(1)


@pytest.mark.parametrize(
    ("mode", "made_in"),
    [
        *((mode, None) for mode in [*MODES][::2]),
        *((mode, torch.inference_mode) for mode in [*MODES][:2]),
    ],
)
def test_parameters_are_loaded_in_any_mode(store: Path, mode: str, made_in: Mode | None) -> None:
    expected = read_state(str(store / "step-00000001")).model
    with made_in() if made_in else nullcontext(), torch.no_grad():
        model = stored_model()
        for tensor in model.state_dict().values():
            tensor.zero_()
        if made_in:
            model[0].weight.data = torch.zeros(50, 30).bfloat16().t()  # copied through other memory
    with MODES[mode]():
        assert offload.load_parameters(model, store) == 1
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, expected[name], name)
    if not made_in:
        model(torch.ones(2, 50).bfloat16()).float().sum().backward()


@pytest.mark.parametrize("mode", ["inference_mode", "default_device"])
def test_what_is_exported_and_imported_is_the_same(store: Path, tmp_path: Path, mode: str) -> None:
    called = set()

    def progress(*_: int) -> None:
        called.add((torch.is_inference_mode_enabled(), torch.empty(1).device.type))

    settings = offload.Options(chunk_bytes=4096, allow_volatile=True)

    def exchanged(to: str, place: Path, **callback: Any) -> StoredState:
        place.mkdir(exist_ok=True)
        with offload.open_checkpoint(store) as opened:
            offload.export_checkpoint(opened, place / to, to, **callback)
        imported = place / f"store of {to}"
        offload.import_checkpoint(place / to, imported, options=settings, **callback).close()
        return read_state(str(imported / "step-00000001"))

    for to in ("pt", "hf", "dcp"):
        expected = exchanged(to, tmp_path / "outside")
        with MODES[mode]():
            found = exchanged(to, tmp_path / "inside", progress=progress)
        assert found.scalars == expected.scalars
        for array, tensors in {**expected.arrays, "model": expected.model}.items():
            other = found.model if array == "model" else found.arrays[array]
            for name, tensor in tensors.items():
                assert_same_bits(other[name], tensor, f"{array} of {name}")
    with MODES[mode]():  # a callback is the user's, and so are the modes that it runs in
        assert called == {(torch.is_inference_mode_enabled(), torch.empty(1).device.type)}
