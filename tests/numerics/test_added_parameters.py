"""Parameters that join in the middle of training start there, and disturb no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.errors import MismatchError
from tests.numerics.models import Mixed, clip, give_gradients, trainable
from tests.numerics.pairs import CUTS, MAX_NORM
from tests.numerics.reference import (
    Reference,
    assert_same_parameters,
    assert_same_state,
    read_state,
)

JOIN = 6
"""The step before which a group joins."""

HYPER: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], list[dict[str, Any]]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}, [{}, {"lr": 0.01}, {"weight_decay": 0.0}]),
    # the groups that join bring a state array with them, and one has none
    "sgd": (torch.optim.SGD, {"lr": 1e-2}, [{}, {"momentum": 0.9}, {"lr": 0.1}]),
    "rmsprop": (torch.optim.RMSprop, {}, [{}, {"momentum": 0.9}, {"centered": True}]),
}


class Growing:
    """A pair of runs whose parameter groups are added one by one."""

    def __init__(self, name: str, cut: int = 0, directory: str | Sequence[str] = "/store") -> None:
        self.directory = directory
        self.optimizer_class, self.hyper, self.options = HYPER[name]
        self.cut = CUTS[cut]
        self.backend = MemoryBackend()
        self.live, self.expected = Mixed(), Mixed()
        self.num_groups = 1
        self.optimizer = self._offloaded()
        self.reference = Reference(
            self.optimizer_class, [self.group(self.expected, 0)], **self.hyper
        )

    def group(self, model: Mixed, index: int) -> dict[str, Any]:
        """Every third parameter, frozen ones included."""
        return {"params": list(model.parameters())[index::3], **self.options[index]}

    def join(self, *, reference: bool = True) -> None:
        """Add a group on both sides."""
        self.optimizer.add_param_group(self.group(self.live, self.num_groups))
        if reference:
            self.reference.add_param_group(self.group(self.expected, self.num_groups))
            self.num_groups += 1

    def train(self, *steps: int) -> None:
        for step in steps:
            for model in (self.live, self.expected):
                give_gradients(step, model)
                clip(model, MAX_NORM)
            self.optimizer.step()
            self.reference.step()
            assert_same_parameters(self.live.named_parameters(), self.expected.named_parameters())

    def reopen(self, num_groups: int | None = None) -> None:
        self.optimizer.close()
        self.backend = self.backend.reopened()
        self.live = Mixed(seed=99)
        self.optimizer = self._offloaded(num_groups)

    def assert_same_state(self) -> None:
        stored = read_state(self.optimizer.checkpoint().result().path, self.backend)
        joined = {p for group in self.optimizer.param_groups for p in group["params"]}
        names = {n for n, p in self.live.named_parameters() if p in joined and p.requires_grad}
        assert_same_state(
            stored,
            self.reference,
            {n: p for n, p in trainable(self.expected).items() if n in names},
        )

    def _offloaded(self, num_groups: int | None = None) -> offload.OffloadedOptimizer:
        return offload.OffloadedOptimizer(
            self.optimizer_class,
            [self.group(self.live, i) for i in range(num_groups or self.num_groups)],
            model=self.live,
            directory=self.directory,
            options=self.cut.options(self.backend),
            **self.hyper,
        )


@pytest.mark.parametrize(
    ("name", "cut", "story"),
    [
        ("adamw", 0, "6 + 2 + 8"),
        ("sgd", 1, "6 + 2 + 8"),
        ("rmsprop", 3, "6 + 2 + 8"),
        ("adamw", 0, "s + s r 8"),
        ("sgd", 0, "1 s + s r 8"),
        ("sgd", 0, "6 + + s r 6"),
        ("sgd", 0, "6 s r + 2 s r + 6"),
    ],
)
def test_groups_that_join_between_steps(name, cut, story):
    """Numbers are steps; ``+`` adds a group, ``s`` seals, ``r`` resumes in another process."""
    run, step = Growing(name, cut), 0
    for event in story.split():
        if event == "+":
            run.join()
        elif event == "s":
            run.optimizer.checkpoint()
        elif event == "r":
            run.reopen()
            assert run.optimizer.restore().step == step
        else:
            run.train(*range(step, step + int(event)))
            step += int(event)
    run.assert_same_state()


def test_groups_that_joined_are_added_again_before_restore():
    run = Growing("sgd")
    run.train(*range(JOIN))
    run.join()
    run.train(JOIN)
    run.optimizer.checkpoint()
    run.reopen(num_groups=1)
    with pytest.raises(MismatchError, match="has 2 parameter groups, this optimizer has 1"):
        run.optimizer.restore()
    run.optimizer.add_param_group(run.group(run.live, 1))
    assert run.optimizer.restore().step == JOIN + 1
    run.train(*range(JOIN + 1, 12))
    run.assert_same_state()


@pytest.mark.parametrize("name", ["sgd", "rmsprop"])
def test_going_back_to_before_a_group_joined_forgets_its_state(name):
    run = Growing(name)
    run.train(*range(JOIN))
    run.optimizer.checkpoint().result()
    run.join(reference=False)
    for step in (100, 101):
        give_gradients(step, run.live)
        run.optimizer.step()
    run.optimizer.param_groups.pop()
    run.optimizer.restore()
    run.train(*range(JOIN, 12))
    run.assert_same_state()
