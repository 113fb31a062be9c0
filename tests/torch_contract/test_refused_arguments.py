"""Arguments, settings, parameters and values that are refused, and what the message says to do."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offload
from gds import MemoryBackend, StorageError
from offload import (
    AdamW,
    OffloadedOptimizer,
    OffloadError,
    TrainStateTooLargeError,
    TrainStateTypeError,
)
from offload.errors import (
    CheckpointNotFoundError,
    MismatchError,
    SlotFullError,
    UnsupportedOptimizerError,
    UnsupportedParameterError,
)
from tests.stores.small import STORE, make_model, make_optimizer, memory_store, options, step
from tests.threads import one_thread
from tests.torch_contract.refusing import nothing_changes

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow

ROOT = Path(__file__).parents[2]
CLASSES = {"AdamW": offload.AdamW, "Adam": offload.Adam, "SGD": offload.SGD}


def signature(function: Any) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters.values()
    return {p.name: p.replace(annotation=inspect.Parameter.empty) for p in found}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("AdamW", (0.5, (0.8, 0.9), 1e-6, 0.25, True)),
        ("Adam", (0.5, (0.8, 0.9), 1e-6, 0.25, True)),
        ("SGD", (0.5, 0.9, 0.0, 0.25, True)),
    ],
)
def test_hyper_parameters_are_torchs_in_its_order_and_with_its_defaults(
    name: str, given: tuple[Any, ...]
) -> None:
    torchs, ours = getattr(torch.optim, name), CLASSES[name]
    expected, found = signature(torchs.__init__), signature(ours.__init__)
    assert list(found)[: len(expected)] == list(expected)
    assert {n: found[n] for n in expected} == expected
    of_the_store = signature(OffloadedOptimizer.__init__)
    assert {n: p for n, p in found.items() if n not in expected} == {
        n: p for n, p in of_the_store.items() if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    parameter = torch.nn.Parameter(torch.ones(3))
    plain = torchs([parameter], *given)
    settings = options(MemoryBackend())
    with ours([parameter], *given, directory=STORE, options=settings) as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.defaults == plain.defaults
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        assert groups == [{k: v for k, v in g.items() if k != "params"} for g in plain.param_groups]


def test_the_type_checker_is_given_calls_that_it_must_refuse() -> None:
    """It says where an ignored error is none: so each of them is looked for with every check."""
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert checked["strict"]
    assert "tests/typed_arguments.py" in checked["files"]
    assert (ROOT / "tests/typed_arguments.py").read_text().count("# type: ignore[") >= 8


class Tuned(torch.optim.LBFGS):
    pass


def with_flag(model: torch.nn.Module) -> Any:
    first, *others = model.parameters()
    return [{"params": [first]}, {"params": others, "capturable": True}]


def twice(names: str, model: torch.nn.Module) -> Any:
    return [{"params": [(name, p)]} for name, p in zip(names, model.parameters(), strict=False)]


def parameters(model: torch.nn.Module) -> Any:
    return model.parameters()


@pytest.mark.parametrize(
    ("cls", "given", "arguments", "error", "says"),
    [
        (partial(OffloadedOptimizer, Tuned), parameters, {}, TypeError, "Tuned cannot be offload"),
        (AdamW, with_flag, {}, UnsupportedOptimizerError, "Leave capturable unset"),
        (AdamW, parameters, {"keep": 0}, ValueError, "keep must be at least 1, got 0"),
        (AdamW, parameters, {"keep": None}, TypeError, "got None: leave it out to keep the new"),
        (AdamW, parameters, {"options": {}}, TypeError, "got dict: leave it out for the defaults"),
        (AdamW, parameters, {"options": None}, TypeError, "got NoneType: leave it out for the"),
        (AdamW, lambda m: m, {}, TypeError, r"a module \(Seq.* pass model\.parameters\(\)"),
        (AdamW, lambda m: m.parameters, {}, TypeError, "is parameters itself, .* call it"),
        (AdamW, partial(twice, "ww"), {}, MismatchError, "two parameters are called 'w'.*differ"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_constructor_takes(
    cls: Any, given: Any, arguments: Any, error: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        cls(given(make_model()), directory=tmp_path / "run", **arguments)
    assert {p.name for p in tmp_path.rglob("*")} <= {"run", "LOCK"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: offload.DriveTuning(threads=0), "threads must be at least 1, got 0"),
        (lambda: offload.DriveTuning(request_bytes=1000), "a multiple of 4096, got 1000"),
        (lambda: offload.DriveTuning(shares=(1, 0)), r"shares must be whole .* got \(1, 0\)"),
        (lambda: offload.Options(ring_chunks=1), "ring_chunks must be at least 2"),
        (
            lambda: options(MemoryBackend(), drives=offload.DriveTuning(threads=2)),
            "no effect on a backend that is passed in",
        ),
        (lambda: options(drives={"threads": 2}), r"got dict: write Options\(drives=offload\.Dri"),
        (lambda: offload.Options(master="half"), "master must be one of float32, split, got 'ha"),
        (lambda: offload.Options(state_dtype="fp8"), "one of float32, bfloat16, int8"),
        (lambda: offload.Options(host_memory="8 parsecs"), "must be a number of bytes.*'8 parse"),
        (lambda: options(parameters="tape"), "parameters must be one of None, host, drive, got 't"),
        (
            lambda: options(parameters="drive", placement="device"),
            'drive" needs steps on the CPU so',
        ),
        (lambda: options(parameters="drive", device_memory=9), "leave out placement=.* and dev"),
        (lambda: options(overlap="both"), "overlap must be one of None, forward, backward, got"),
    ],
)
def test_settings_that_cannot_work(make: Callable[[], object], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        make()


def test_state_that_is_looked_for_in_memory() -> None:
    model = make_model()
    with make_optimizer(model, MemoryBackend()) as optimizer:
        step(optimizer)
        weight = model[0].weight
        with pytest.raises(KeyError, match=r"exp_avg: .* is on storage.*materialized\(\)"):
            optimizer.state[weight]["exp_avg"]
        assert optimizer.state[weight] == {}
        assert "exp_avg" not in optimizer.state[weight]
        with optimizer.materialized():
            assert optimizer.state[weight]["exp_avg"].shape == weight.shape
            assert type(optimizer.state[weight]) is dict
        step(optimizer)


def test_copies() -> None:
    with make_optimizer(make_model(), MemoryBackend()) as optimizer:
        assert repr(optimizer).startswith(f"AdamW in {STORE}: step 0, no state yet\n")
        for copied in (pickle.dumps, copy.deepcopy, copy.copy):
            with pytest.raises(TypeError, match=r"be copied or pickled.*call checkpoint\(\)"):
                copied(optimizer)
    optimizer.close()
    assert ", closed\n" in repr(optimizer)
    for call in (optimizer.step, optimizer.checkpoint, optimizer.restore, optimizer.pins):
        with pytest.raises(OffloadError, match="is closed; construct it again"):
            call()


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [(torch.complex64, "view_as_real"), (torch.float8_e4m3fn, "Convert it, or give it to")],
    ids=str,
)
def test_dtypes(dtype: torch.dtype, advice: str, tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(3, 3).to(dtype))
    with pytest.raises(UnsupportedParameterError, match=rf"'weight'.*{dtype}.*{advice}"):
        AdamW(model.parameters(), directory=tmp_path / "run", model=model)
    assert [*tmp_path.iterdir()] == []
    model.weight.requires_grad_(False)  # frozen ones are stored, not stepped
    model.other = torch.nn.Parameter(torch.zeros(3))
    AdamW(model.parameters(), directory=tmp_path / "run", model=model).close()


def test_sparse_gradients() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(50, 30, sparse=True), make_model())
    backend = MemoryBackend()
    with make_optimizer(model, backend) as optimizer:
        model[0](torch.tensor([3, 4])).sum().backward()
        says = r"gradient of '0\.weight'.*pass sparse=False"
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(UnsupportedParameterError, match=says),
        ):
            optimizer.step()
        assert optimizer.num_steps == 0
        step(optimizer)  # dense ones are fine


@pytest.mark.parametrize(("with_model", "name"), [(True, r"0\.weight"), (False, r"group0\.param2")])
def test_a_parameter_that_is_given_twice(with_model: bool, name: str) -> None:
    """torch warns within a group, and refuses it in two."""
    model, backend = make_model(), MemoryBackend()
    (weight, bias), named = model[0].parameters(), {} if with_model else {"model": None}
    says = rf"'{name}' is given twice, at position 0 of .* position 2 of.*give it once"
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(MismatchError, match=says):
        make_optimizer(model, backend, params=[weight, bias, weight], **named)
    with pytest.raises(ValueError, match="in more than one parameter group"):
        make_optimizer(model, backend, params=[{"params": [weight]}] * 2, **named)


@pytest.mark.parametrize("stepped", [True, False])
def test_a_parameter_that_is_given_twice_later(stepped: bool) -> None:
    model, backend = make_model(), MemoryBackend()
    optimizer = make_optimizer(model, backend, params=model[0].parameters())
    if stepped:
        step(optimizer)
    weight, bias = model[1].parameters()
    with (
        nothing_changes(backend, model, optimizer),
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(MismatchError, match="is given twice, at position 0 of parameter grou"),
    ):
        optimizer.add_param_group({"params": [weight, weight]})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["params"] += [weight, bias, bias]  # as libraries do
    with pytest.raises(MismatchError, match=r"'1\.bias' is given twice, at position 3 of"):
        step(optimizer)
    optimizer.param_groups[0]["params"].pop()
    step(optimizer)
    optimizer.close()


MEANT = r'such as \{"epoch": 3\}, got %s %s\. The step number and the name .* need not be given'


def test_train_state_that_would_not_come_back_the_same() -> None:
    model, backend = make_model(), MemoryBackend()
    named: list[Any] = ["ckpt.pt", b"state", Path("out/ckpt.pt"), 1, 0.5, True]
    refused = {
        r"\['sampler'\]": {"epoch": 1, "sampler": object()},
        r"\['functions'\]\[1\]": {"functions": [1, len]},
        **{MEANT % (type(s).__name__, re.escape(repr(s))): s for s in named},
    }
    with make_optimizer(model, backend) as optimizer:
        step(optimizer)
        for says, state in refused.items():
            with (
                nothing_changes(backend, model, optimizer),
                pytest.raises(TrainStateTypeError, match=says),
            ):
                optimizer.checkpoint(state)
        for state in ({}, [1, 2], ("epoch", 1), {"name"}, np.float32(2), torch.tensor(1), None):
            assert optimizer.checkpoint(state).result().train_state == state
        optimizer.param_groups[0]["note"] = object()
        with pytest.raises(TypeError, match=r"param_groups\[0\]\['note'\] is a object"):
            optimizer.checkpoint()
        del optimizer.param_groups[0]["note"]
        assert optimizer.checkpoint().result().verify().ok


def test_train_state_that_is_larger_than_what_is_reserved() -> None:
    backend, model, large = memory_store(2), make_model(), {"seen": torch.arange(5000)}
    with make_optimizer(model, backend) as optimizer:
        optimizer.restore()
        step(optimizer)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(TrainStateTooLargeError, match="the checkpoints reserve 8192") as error,
        ):
            optimizer.checkpoint(large)
        optimizer.checkpoint({"seen": None}).result()
    # What the message says helps, and in every slot, also in those that were made before.
    needed = int(str(error.value).rpartition("train_state_bytes=")[2].rstrip(")"))
    settings = {"train_state_bytes": needed}
    with make_optimizer(make_model(), backend.reopened(), settings=settings) as optimizer:
        optimizer.restore()
        for _ in range(4):
            step(optimizer)
            found = optimizer.checkpoint(large).result()
            assert torch.equal(found.train_state["seen"], large["seen"])


@pytest.mark.parametrize(
    "error",
    [
        SlotFullError(28, "No space left on device: the slot needs 3 bytes", STORE),
        CheckpointNotFoundError(2, "there is none", STORE),
        StorageError(5, "write 4096 bytes", STORE, offset=8192),
    ],
    ids=repr,
)
def test_an_error_leads_with_its_path_and_can_be_pickled(error: OSError) -> None:
    assert str(error) == f"{STORE}: {error.strerror}"
    assert error.errno
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.errno) == (type(error), str(error), error.errno)
