"""Layers that are frozen and set free: in a run, between runs, and with gradients all the same.

The oracle is torch's own optimizer on the same FP32 model, which steps whatever has a gradient, and
whose state dict keeps the state of what is frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.errors import MismatchError
from tests.numerics.pairs import CASES, CUTS, Pair, memory_pair
from tests.numerics.reference import assert_same_bits, assert_same_parameters

OVERLAPS = pytest.mark.parametrize("overlap", [None, "forward", "backward"])
HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(30, 70), torch.nn.Tanh(), torch.nn.Linear(70, 50), torch.nn.Linear(50, 3)
    )


def given(step: int, parameter: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(parameter.shape, generator=generator)


def backward(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    model(torch.randn(5, 30, generator=generator)).square().mean().backward()


class Twins:
    """The same model twice: with its state in a store, and with torch's own optimizer.

    Args:
        overlap: As in `Options`.
        prepare: Called with each model before its optimizer is made, now and after each resume.
        give: Returns what an optimizer is given of a model.
    """

    def __init__(
        self,
        overlap: str | None = None,
        prepare: Callable[[torch.nn.Sequential], object] = lambda _: None,
        give: Callable[[torch.nn.Sequential], Any] = lambda model: list(model.parameters()),
    ) -> None:
        self.backend = MemoryBackend()
        self.overlap, self.give = overlap, give
        self.live, self.expected = make_model(), make_model()
        for model in self.both():
            prepare(model)
        self.optimizer = self._offloaded()
        self.reference = torch.optim.AdamW(give(self.expected), **HYPER)

    def both(self) -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
        return self.live, self.expected

    def step(
        self,
        number: int,
        before: Callable[[torch.nn.Sequential, int], object] = lambda *_: None,
        after: Callable[[torch.nn.Sequential, int], object] = lambda *_: None,
    ) -> None:
        """Take a step on both; `before` and `after` are called around the backward."""
        for model, optimizer in ((self.live, self.optimizer), (self.expected, self.reference)):
            before(model, number)
            backward(model, number)
            after(model, number)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.optimizer.synchronize()
        assert_same_parameters(self.live.named_parameters(), self.expected.named_parameters())

    def resume(self, prepare: Callable[[torch.nn.Sequential], object]) -> None:
        """Go on in a new process: each with a new model, prepared anew, from what was saved."""
        self.optimizer.checkpoint().result()
        self.optimizer.close()
        self.backend = self.backend.reopened()
        state, parameters = self.reference.state_dict(), self.expected.state_dict()
        state = copy.deepcopy(state)
        self.live, self.expected = make_model(), make_model()
        for model in self.both():
            prepare(model)
        self.optimizer = self._offloaded()
        restored = self.optimizer.restore()
        assert restored is not None
        self.expected.load_state_dict(parameters)
        self.reference = torch.optim.AdamW(self.give(self.expected), **HYPER)
        if sum(map(len, (g["params"] for g in state["param_groups"]))) == len(
            self.reference.param_groups[0]["params"]
        ):
            self.reference.load_state_dict(state)
        assert_same_parameters(self.live.named_parameters(), self.expected.named_parameters())

    def assert_same_state(self) -> None:
        checkpoint = self.optimizer.checkpoint({"compared": True}).result()
        assert checkpoint.verify().ok
        for name, parameter in self.expected.named_parameters():
            state = self.reference.state.get(parameter)
            if not state:
                continue
            found = offload.read_state(checkpoint, name)
            for array in ("exp_avg", "exp_avg_sq"):
                assert_same_bits(found[array], state[array], f"{array} of {name}")
            layout = checkpoint.manifest.layout
            index = [p.name for p in layout.parameters].index(name)
            assert checkpoint.manifest.scalars[index] == (("step", "f32", state["step"].item()),)

    def _offloaded(self) -> offload.AdamW:
        options = offload.Options(
            backend=self.backend, allow_volatile=True, chunk_bytes=4096, overlap=self.overlap
        )
        return offload.AdamW(
            self.give(self.live), directory="/run", model=self.live, options=options, **HYPER
        )


def freeze(number: int, *, frozen: bool = True) -> Callable[[torch.nn.Sequential], object]:
    return lambda model: model[number].requires_grad_(not frozen)


def give_gradients(model: torch.nn.Sequential, step: int) -> None:
    for parameter in model[2].parameters():
        parameter.grad = given(step, parameter)


class TestWithGradients:
    @pytest.mark.parametrize("when", ["before-backward", "after-backward"])
    @OVERLAPS
    def test_what_was_frozen_before_the_first_step_is_stepped(self, overlap, when):
        twins = Twins(overlap, freeze(2))
        hook = {when.split("-")[0]: give_gradients}
        for step in range(6):
            twins.step(step, **hook if step not in (2, 3) else {})
        twins.assert_same_state()

    @pytest.mark.parametrize("when", ["before-backward", "after-backward"])
    @OVERLAPS
    def test_what_was_frozen_later_is_stepped(self, overlap, when):
        twins = Twins(overlap)
        hook = {when.split("-")[0]: give_gradients}
        for step in range(7):
            if step == 2:
                for model in twins.both():
                    model[2].requires_grad_(False)
            twins.step(step, **hook if step in (4, 6) else {})
        twins.assert_same_state()

    @OVERLAPS
    def test_the_first_gradient_comes_in_the_middle_of_a_run(self, overlap):
        twins = Twins(overlap, freeze(2))
        for step in range(8):
            twins.step(step, after=give_gradients if step >= 4 else lambda *_: None)
            if step in (3, 5):
                twins.optimizer.checkpoint().result()
        twins.assert_same_state()
        assert twins.optimizer.checkpoint({"last": 1}).result().step == 8

    @OVERLAPS
    def test_nothing_but_what_is_frozen_has_a_gradient(self, overlap):
        twins = Twins(overlap, freeze(2))
        twins.step(0)
        for model, optimizer in (
            (twins.live, twins.optimizer),
            (twins.expected, twins.reference),
        ):
            give_gradients(model, 1)
            optimizer.step()
            optimizer.zero_grad()
        twins.optimizer.synchronize()
        assert_same_parameters(twins.live.named_parameters(), twins.expected.named_parameters())
        twins.step(2)
        twins.assert_same_state()

    def test_a_gradient_that_nobody_clears_counts_in_every_step(self):
        twins = Twins(None, freeze(2))
        for step in range(3):
            for model, optimizer in (
                (twins.live, twins.optimizer),
                (twins.expected, twins.reference),
            ):
                backward(model, step)
                if step == 0:
                    give_gradients(model, step)
                optimizer.step()
                for parameter in (*model[0].parameters(), *model[3].parameters()):
                    parameter.grad = None
            assert_same_parameters(twins.live.named_parameters(), twins.expected.named_parameters())
        twins.assert_same_state()

    def test_it_is_resumed(self):
        twins = Twins(None, freeze(2))
        for step in range(4):
            twins.step(step, after=give_gradients)
        twins.resume(freeze(2))
        for step in range(4, 8):
            twins.step(step, after=give_gradients if step > 5 else lambda *_: None)
        twins.assert_same_state()


class TestBetweenRuns:
    @OVERLAPS
    def test_a_layer_frozen_in_the_middle_of_a_run_stays_frozen(self, overlap):
        twins = Twins(overlap)
        for step in range(4):
            if step == 2:
                for model in twins.both():
                    model[0].requires_grad_(False)
            twins.step(step)
        twins.resume(freeze(0))
        for step in range(4, 7):
            twins.step(step)
        twins.assert_same_state()

    @OVERLAPS
    def test_a_layer_is_frozen_between_runs_and_set_free_later(self, overlap):
        twins = Twins(overlap)
        for step in range(3):
            twins.step(step)
        twins.resume(freeze(2))
        for step in range(3, 5):
            twins.step(step)
        for model in twins.both():
            model[2].requires_grad_(True)
        for step in range(5, 8):
            twins.step(step)
        twins.assert_same_state()

    @OVERLAPS
    def test_a_layer_is_set_free_between_runs(self, overlap):
        twins = Twins(overlap, freeze(2))
        for step in range(3):
            twins.step(step)
        twins.resume(freeze(2, frozen=False))
        for step in range(3, 6):
            twins.step(step)
        twins.assert_same_state()
        twins.resume(freeze(2, frozen=False))  # now that it has state
        for step in range(6, 8):
            twins.step(step)
        twins.assert_same_state()

    def test_layers_take_turns(self):
        """As in progressive freezing and unfreezing, with a resume at each change."""
        twins = Twins(None, freeze(0))
        for phase, frozen in enumerate([(0,), (2,), (0, 2), (), (3, 0)]):

            def prepare(model, frozen=frozen):
                for number in (0, 2, 3):
                    model[number].requires_grad_(number not in frozen)

            if phase:
                twins.resume(prepare)
            for step in range(3 * phase, 3 * phase + 3):
                twins.step(step)
        twins.assert_same_state()

    def test_a_checkpoint_before_the_next_step_keeps_the_state_of_what_is_frozen(self):
        twins = Twins()
        for step in range(3):
            twins.step(step)
        for _ in range(3):
            twins.resume(freeze(0))
        twins.assert_same_state()
        twins.resume(freeze(0, frozen=False))
        twins.step(3)
        twins.assert_same_state()

    def test_a_checkpoint_before_the_next_step_has_what_is_set_free(self):
        twins = Twins(None, freeze(0))
        for step in range(3):
            twins.step(step)
        for _ in range(3):
            twins.resume(freeze(0, frozen=False))
        twins.step(3)
        twins.assert_same_state()

    def test_what_is_frozen_is_not_given_any_more(self):
        """The common ``AdamW(p for p in model.parameters() if p.requires_grad)``."""
        given_to: Callable[[torch.nn.Sequential], Any] = lambda model: [  # noqa: E731
            p for p in model.parameters() if p.requires_grad
        ]
        twins = Twins(None, give=given_to)
        for step in range(3):
            twins.step(step)
        kept = {
            name: offload.read_state(twins.optimizer.checkpoint().result(), name)["exp_avg"]
            for name in ("0.weight", "0.bias")
        }
        # torch's state dict cannot be loaded into another number of parameters: take it over.
        state = {name: twins.reference.state[p] for name, p in twins.expected.named_parameters()}
        twins.resume(freeze(0))
        for name, parameter in twins.expected.named_parameters():
            if parameter.requires_grad:
                twins.reference.state[parameter] = state[name]
        for step in range(3, 6):
            twins.step(step)
        twins.assert_same_state()
        last = twins.optimizer.checkpoint({"last": True}).result()
        for name, values in kept.items():
            assert_same_bits(offload.read_state(last, name)["exp_avg"], values, name)
        assert_same_bits(
            offload.read_state(last, "0.bias")["master"], twins.live[0].bias.detach(), "bias"
        )

    def test_in_the_same_process(self):
        twins = Twins()
        for step in range(3):
            twins.step(step)
        twins.optimizer.checkpoint().result()
        state, parameters = (
            copy.deepcopy(s.state_dict()) for s in (twins.reference, twins.expected)
        )
        for step in range(3, 5):
            twins.step(step)
        for model in twins.both():
            model[0].requires_grad_(False)
        restored = twins.optimizer.restore()
        assert restored is not None
        assert restored.step == 3
        twins.reference.load_state_dict(state)
        twins.expected.load_state_dict(parameters)
        for step in range(3, 6):
            twins.step(step)
        for model in twins.both():
            model[0].requires_grad_(True)
        twins.step(6)
        twins.assert_same_state()

    def test_going_back_to_before_a_layer_was_set_free_in_the_same_process(self):
        twins = Twins(None, freeze(0))
        twins.step(0)
        twins.optimizer.checkpoint().result()
        state, parameters = (
            copy.deepcopy(s.state_dict()) for s in (twins.reference, twins.expected)
        )
        for model in twins.both():
            model[0].requires_grad_(True)
        twins.step(1)
        twins.optimizer.checkpoint().result()
        twins.optimizer.restore(1, discard_newer=True)
        twins.reference.load_state_dict(state)
        twins.expected.load_state_dict(parameters)
        twins.step(1)
        twins.step(2)
        twins.assert_same_state()

    @pytest.mark.parametrize("name", ["adamw", "sgd-momentum-in-some-groups", "adagrad"])
    def test_16_bit_parameters_and_other_classes(self, name):
        pair: Pair = memory_pair(CASES[name], CUTS[0])
        for step in range(12):
            if step in (3, 8):
                for model in pair.both():
                    model.matrix.requires_grad_(step == 8)
                    model.strided_full.requires_grad_(step == 8)
                    model.sometimes.requires_grad_(step == 3)
            if step in (5, 9):
                pair.optimizer.checkpoint().result()
                frozen = [n for n, p in pair.expected.named_parameters() if not p.requires_grad]
                live = type(pair.expected)(seed=99)
                for n, p in live.named_parameters():
                    p.requires_grad_(n not in frozen)
                pair.reopen(live)
                pair.optimizer.restore()
            pair.step(step)
            pair.assert_same_parameters()
        checkpoint = pair.optimizer.checkpoint().result()
        for parameter in ("matrix", "strided_full", "sometimes"):
            live = dict(pair.expected.named_parameters())[parameter]
            found = offload.read_state(checkpoint, parameter)
            for array, values in pair.reference.state(live).items():
                if array in found:
                    assert_same_bits(found[array], values, f"{array} of {parameter}")


class TestContradictions:
    def resumed(self, make: Callable[[], tuple[torch.nn.Module, Any]], model: Any) -> str:
        backend = MemoryBackend()
        options = offload.Options(backend=backend, allow_volatile=True)
        with offload.AdamW(
            model.parameters(), directory="/run", model=model, options=options
        ) as optimizer:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.checkpoint().result()
        other, params = make()
        options = offload.Options(backend=backend.reopened(), allow_volatile=True)
        before = {name: p.detach().clone() for name, p in other.named_parameters()}
        with (
            offload.AdamW(params, directory="/run", model=other, options=options) as optimizer,
            pytest.raises(MismatchError) as caught,
        ):
            optimizer.restore()
        assert_same_parameters(other.named_parameters(), before.items())
        return str(caught.value)

    def test_a_parameter_that_requires_gradients_was_not_given(self):
        def make():
            model = make_model()
            return model, [p for n, p in model.named_parameters() if n != "2.weight"]

        message = self.resumed(make, make_model())
        assert (
            "'2.weight' has optimizer state in the checkpoint and requires gradients now" in message
        )
        assert "was not given" in message
        assert "requires_grad_(False)" in message

    def test_a_frozen_parameter_of_another_shape(self):
        def make():
            model = make_model()
            model[0] = torch.nn.Linear(30, 70, bias=False)
            model[2] = torch.nn.Linear(70, 49)
            model[2].requires_grad_(False)
            return model, list(model.parameters())

        message = self.resumed(make, make_model())
        assert (
            "'2.weight' is F32 [50, 70] in the checkpoint and F32 [49, 70] in the model" in message
        )
        assert "'0.bias' is only in the checkpoint" in message

    def test_a_frozen_parameter_in_another_group(self):
        def make():
            model = make_model()
            model[2].requires_grad_(False)
            return model, [
                {"params": [*model[0].parameters(), *model[3].parameters()]},
            ]

        # not in a group any more is fine; in another group it is not
        backend = MemoryBackend()
        model = make_model()
        options = offload.Options(backend=backend, allow_volatile=True)
        groups = [{"params": model[0].parameters()}, {"params": [*model[2].parameters()]}]
        with offload.AdamW(groups, directory="/run", model=model, options=options) as optimizer:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.checkpoint().result()
        model = make_model()
        model[2].requires_grad_(False)
        options = offload.Options(backend=backend.reopened(), allow_volatile=True)
        groups = [{"params": [*model[0].parameters(), *model[2].parameters()]}, {"params": []}]
        with (
            offload.AdamW(groups, directory="/run", model=model, options=options) as optimizer,
            pytest.raises(MismatchError, match=r"'2\.weight' was in group 1"),
        ):
            optimizer.restore()
        assert make() is not None
