"""What type checkers, editors and people see of the optimizer classes."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.integrations.transformers import OffloadCallback, create_optimizer
from offload.optimizer import OffloadedOptimizer

ROOT = Path(__file__).parent.parent.parent
CLASSES = {"AdamW": offload.AdamW, "Adam": offload.Adam, "SGD": offload.SGD}


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters.values()
    return {p.name: p.replace(annotation=inspect.Parameter.empty) for p in found}


@pytest.mark.parametrize("name", CLASSES)
def test_hyper_parameters_are_torchs_in_its_order_and_with_its_defaults(name: str) -> None:
    ours = parameters(CLASSES[name].__init__)
    torchs = parameters(getattr(torch.optim, name).__init__)
    assert list(ours)[: len(torchs)] == list(torchs)
    assert {n: ours[n] for n in torchs} == torchs
    of_the_store = {
        n: p
        for n, p in parameters(OffloadedOptimizer.__init__).items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert {n: p for n, p in ours.items() if n not in torchs} == of_the_store


@pytest.mark.parametrize("name", CLASSES)
def test_each_argument_is_described(name: str) -> None:
    text = (inspect.getdoc(CLASSES[name]) or "").partition("Raises:")[0]
    described = re.findall(r"^    (\w+): ", text, re.MULTILINE)
    assert described == [n for n in parameters(CLASSES[name].__init__) if n != "self"]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("AdamW", (0.5, (0.8, 0.9), 1e-6, 0.25, True)),
        ("Adam", (0.5, (0.8, 0.9), 1e-6, 0.25, True)),
        ("SGD", (0.5, 0.9, 0.0, 0.25, True)),
    ],
)
def test_arguments_that_torch_takes_by_position(name: str, given: tuple[Any, ...]) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    torchs = getattr(torch.optim, name)([parameter], *given)
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True)
    with CLASSES[name]([parameter], *given, directory="/run", options=options) as optimizer:
        assert optimizer.defaults == torchs.defaults
        groups = ([{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
                  for o in (optimizer, torchs))  # fmt: skip
        assert next(groups) == next(groups)


def test_a_trainers_factory_takes_what_makes_an_optimizer() -> None:
    made = parameters(create_optimizer)
    factory = parameters(OffloadCallback.optimizer_cls_and_kwargs)
    assert {n: p for n, p in factory.items() if n != "self"} == {
        n: p for n, p in made.items() if n not in ("model", "args")
    }


def test_the_type_checker_is_given_calls_that_it_must_refuse() -> None:
    """It says where an ignored error is none: so each of them is looked for with every check."""
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert checked["strict"]
    assert "tests/typed_arguments.py" in checked["files"]
    source = (ROOT / "tests/typed_arguments.py").read_text()
    assert source.count("# type: ignore[") >= 8


@pytest.mark.parametrize("cls", [offload.AdamW, offload.SGD])
def test_a_module_in_place_of_its_parameters_is_refused_with_the_remedy(cls: Any) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"is a module \(Linear\).* pass model\.parameters\(\)"):
        cls(model, directory="/nowhere")
    with pytest.raises(TypeError, match=r"is parameters itself, .* call it"):
        cls(model.parameters, directory="/nowhere")
