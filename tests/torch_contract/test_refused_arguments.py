"""Optimizers, settings and parameters that are refused, and what the message says to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gds import MemoryBackend
from offload import AdamW, OffloadedOptimizer, OffloadError
from offload.errors import MismatchError, UnsupportedOptimizerError, UnsupportedParameterError
from tests.stores.small import make_model, make_optimizer, step
from tests.threads import one_thread
from tests.torch_contract.refusing import nothing_changes

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


class TestOptimizers:
    @pytest.mark.parametrize(
        ("optimizer_class", "hyper", "why"),
        [
            (torch.optim.Adafactor, {}, "factored over rows and columns"),
            (torch.optim.Muon, {}, "orthogonalises whole matrices"),
            (torch.optim.LBFGS, {}, "inner products over all parameters"),
            (torch.optim.SparseAdam, {}, "sparse gradient"),
        ],
        ids=lambda value: getattr(value, "__name__", None),
    )
    def test_that_need_more_than_one_element(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        hyper: dict[str, Any],
        why: str,
        tmp_path: Path,
    ) -> None:
        model = make_model(dtype=torch.float32)
        weights = [p for p in model.parameters() if p.ndim == 2]
        with pytest.raises(UnsupportedOptimizerError, match=why) as error:
            OffloadedOptimizer(
                optimizer_class, weights, directory=tmp_path / "run", model=model, **hyper
            )
        assert optimizer_class.__name__ in str(error.value)
        assert "Use an element-wise optimizer (AdamW, Adam, SGD" in str(error.value)
        assert "keep this one in memory" in str(error.value)
        assert isinstance(error.value, TypeError)
        assert not (tmp_path / "run").exists()

    def test_a_subclass_is_refused_like_its_base(self, tmp_path: Path) -> None:
        class Tuned(torch.optim.LBFGS):
            pass

        with pytest.raises(UnsupportedOptimizerError, match="Tuned cannot be offloaded"):
            OffloadedOptimizer(Tuned, make_model().parameters(), directory=tmp_path / "run")

    @pytest.mark.parametrize(
        ("flag", "why"),
        [
            ("capturable", "captured in a CUDA graph"),
            ("differentiable", "autograd cannot follow"),
            ("fused", "round differently depending on where a tensor is cut"),
        ],
    )
    @pytest.mark.parametrize("where", ["constructor", "group"])
    def test_flags_that_cannot_be_honoured(
        self, flag: str, why: str, where: str, tmp_path: Path
    ) -> None:
        model = make_model()
        params = list(model.parameters())
        if where == "constructor":
            arguments: dict[str, Any] = {"params": params, flag: True}
        else:
            arguments = {"params": [{"params": params[:2]}, {"params": params[2:], flag: True}]}
        with pytest.raises(UnsupportedOptimizerError, match=why) as error:
            AdamW(arguments.pop("params"), directory=tmp_path / "run", model=model, **arguments)
        assert f"{flag}=True is not supported" in str(error.value)
        assert f"Leave {flag} unset" in str(error.value)
        assert {p.name for p in tmp_path.glob("run/*")} <= {"LOCK"}
        AdamW(model.parameters(), directory=tmp_path / "run", model=model).close()

    @pytest.mark.parametrize("keep", [0, -1])
    def test_keeping_no_checkpoint(self, keep: int, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=f"keep must be at least 1, got {keep}"):
            AdamW(make_model().parameters(), directory=tmp_path / "run", keep=keep)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("argument", "says"),
        [
            ({"options": None}, "got NoneType: leave it out for the defaults, or write options="),
            ({"options": {}}, "got dict: leave it out for the defaults, or write options="),
            ({"keep": None}, "got None: leave it out to keep the newest 2"),
        ],
        ids=repr,
    )
    def test_what_may_be_left_out(
        self, argument: dict[str, Any], says: str, tmp_path: Path
    ) -> None:
        with pytest.raises(TypeError, match=says):
            AdamW(make_model().parameters(), directory=tmp_path / "run", **argument)
        assert not (tmp_path / "run").exists()

    def test_state_that_is_looked_for_in_memory(self) -> None:
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

    @pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy, copy.copy])
    def test_copies(self, copied: Callable[[object], object]) -> None:
        optimizer = make_optimizer(make_model(), MemoryBackend())
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*call checkpoint\(\)"):
            copied(optimizer)
        optimizer.close()

    def test_use_after_close(self) -> None:
        model = make_model()
        optimizer = make_optimizer(model, MemoryBackend())
        optimizer.close()
        optimizer.close()
        for call in (optimizer.step, optimizer.checkpoint, optimizer.restore):
            with pytest.raises(OffloadError, match="is closed; construct it again"):
                call()


def test_options_that_are_a_dict(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(8))
    with pytest.raises(
        TypeError, match=r"offload\.Options, got dict: leave it out for the defaults, or write "
    ):
        AdamW([weight], directory=tmp_path / "run", options={"overlap": "forward"})
    assert not (tmp_path / "run").exists()


class TestParameters:
    @pytest.mark.parametrize(
        ("dtype", "advice"),
        [
            (torch.complex64, "view_as_real"),
            (torch.float64, "Convert it, or give it to another optimizer"),
            (torch.float8_e4m3fn, "Convert it, or give it to another optimizer"),
        ],
        ids=str,
    )
    def test_dtypes(self, dtype: torch.dtype, advice: str, tmp_path: Path) -> None:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(3, 3).to(dtype))
        with pytest.raises(UnsupportedParameterError, match="parameter 'weight'") as error:
            AdamW(model.parameters(), directory=tmp_path / "run", model=model)
        assert str(dtype) in str(error.value)
        assert advice in str(error.value)
        assert {p.name for p in tmp_path.glob("run/*")} <= {"LOCK"}
        # Frozen ones are stored, not stepped.
        model.weight.requires_grad_(False)
        model.other = torch.nn.Parameter(torch.zeros(3))
        AdamW(model.parameters(), directory=tmp_path / "run", model=model).close()

    def test_sparse_gradients(self) -> None:
        model = torch.nn.Sequential(torch.nn.Embedding(50, 30, sparse=True), make_model())
        backend = MemoryBackend()
        optimizer = make_optimizer(model, backend)
        model[0](torch.tensor([3, 4])).sum().backward()
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(UnsupportedParameterError, match=r"gradient of '0\.weight'") as error,
        ):
            optimizer.step()
        assert "pass sparse=False" in str(error.value)
        assert optimizer.num_steps == 0
        step(optimizer)  # dense ones are fine
        optimizer.close()

    def test_two_of_the_same_name(self, tmp_path: Path) -> None:
        a, b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        with pytest.raises(MismatchError, match=r"two parameters are called 'w'.*different names"):
            AdamW([{"params": [("w", a)]}, {"params": [("w", b)]}], directory=tmp_path / "run")

    @pytest.mark.parametrize("named", [True, False], ids=["model", "no-model"])
    def test_one_that_is_given_twice(self, tmp_path: Path, named: bool) -> None:
        """torch warns within a group, and refuses it in two."""
        model = make_model()
        weight = model[0].weight
        arguments = {"directory": tmp_path / "run", "model": model if named else None}
        name = r"0\.weight" if named else r"group0\.param2"
        with (
            pytest.warns(UserWarning, match="duplicate parameters"),
            pytest.raises(
                MismatchError, match=rf"'{name}' is given twice, at position 0 of .* position 2 of"
            ) as error,
        ):
            AdamW([weight, model[0].bias, weight], **arguments)
        assert "give it once" in str(error.value)
        assert {p.name for p in tmp_path.glob("run/*")} <= {"LOCK"}
        with pytest.raises(ValueError, match="in more than one parameter group"):
            AdamW([{"params": [weight]}, {"params": [weight]}], **arguments)

    @pytest.mark.parametrize("stepped", [True, False])
    def test_one_that_is_given_twice_later(self, stepped: bool) -> None:
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
