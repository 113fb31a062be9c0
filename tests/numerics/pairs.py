"""A model trained with its state on storage, beside the same one with its state in memory.

A test chooses the optimizer class, groups, cuts and edits; `tests.stores` has no such choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import offload
from gds import Backend, MemoryBackend
from tests.numerics.models import Mixed, clip, give_gradients, split_groups, trainable
from tests.numerics.reference import (
    Reference,
    StoredState,
    assert_same_bits,
    assert_same_parameters,
    assert_same_state,
    read_state,
)


@dataclass(frozen=True)
class Case:
    """An optimizer class with its flags, and what its parameter groups override."""

    optimizer: type[torch.optim.Optimizer]
    hyper: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ({}, {"weight_decay": 0.0, "lr": 3e-3}, {"lr": 1e-4})


O = torch.optim  # noqa: E741
MOMENTUM = (
    {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 0.0, "lr": 3e-3},
    {"momentum": 0.8, "dampening": 0.1},
)
CASES = {
    "adamw": Case(O.AdamW, {"weight_decay": 0.1}),
    "adamw-amsgrad": Case(O.AdamW, {"amsgrad": True, "betas": (0.8, 0.95)}),
    "adamw-amsgrad-in-one-group": Case(O.AdamW, {}, ({"amsgrad": True}, {"eps": 1e-6})),
    "adamw-maximize": Case(O.AdamW, {"maximize": True}),
    "adam-coupled-decay": Case(O.Adam, {"weight_decay": 0.05}),
    "sgd": Case(O.SGD, {"lr": 1e-2, "weight_decay": 0.01}),
    "sgd-momentum-in-some-groups": Case(O.SGD, {"lr": 1e-2, "weight_decay": 0.01}, MOMENTUM),
    "sgd-dampening-maximize": Case(O.SGD, {"momentum": 0.7, "dampening": 0.3, "maximize": True}),
    "sgd-nesterov": Case(O.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "nadam": Case(O.NAdam, {"weight_decay": 0.02}),
    "nadam-decoupled": Case(O.NAdam, {"weight_decay": 0.02, "decoupled_weight_decay": True}),
    "radam": Case(O.RAdam, {"weight_decay": 0.02}),
    "adamax": Case(O.Adamax, {"weight_decay": 0.02}),
    "rmsprop": Case(O.RMSprop, {"lr": 1e-3}),
    "rmsprop-centered-momentum": Case(
        O.RMSprop, {"centered": True, "momentum": 0.9}, ({}, {"momentum": 0.0}, {"centered": False})
    ),
    "adagrad": Case(O.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    "adadelta": Case(O.Adadelta, {"weight_decay": 0.01}),
    "rprop": Case(O.Rprop, {"lr": 1e-2}, ({}, {"lr": 3e-3}, {"etas": (0.4, 1.3)})),
    "asgd": Case(O.ASGD, {"t0": 4.0, "weight_decay": 0.01}),
}
FOREACH = {
    f"{name}-foreach": Case(case.optimizer, {**case.hyper, "foreach": True}, case.groups)
    for name, case in CASES.items()
}


@dataclass(frozen=True)
class Cut:
    """How element space is cut: into chunks, frames and blocks."""

    chunk_bytes: int
    ring_chunks: int
    block_elements: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """More of `Options`."""

    def options(self, backend: Backend | None) -> offload.Options:
        return offload.Options(
            chunk_bytes=self.chunk_bytes,
            ring_chunks=self.ring_chunks,
            backend=backend,
            allow_volatile=True,
            **self.settings,
        )

    def __str__(self) -> str:
        block = "" if self.block_elements is None else f"-blocks-of-{self.block_elements}"
        more = "".join(f"-{name}-{value}" for name, value in self.settings.items())
        return f"chunk-{self.chunk_bytes}-ring-{self.ring_chunks}{block}{more}"


CUTS = [
    Cut(4096, 2, 777),
    Cut(3 * 4096, 3),
    Cut(20480, 2),
    Cut(1 << 20, 2, 1291),  # one chunk holds everything
]

ON_DRIVE = Cut(3 * 4096, 3, settings={"parameters": "drive"})
"""Steps write parameters as well."""

MAX_NORM = 20.0


class Pair:
    """Both models get the same gradients; everything that differs afterwards is a bug.

    Args:
        case: The optimizer and its groups.
        cut: How element space is cut.
        backend: Where the state is; None for the local file system.
        directory: The store.
        live: The model whose state is on storage.
        expected: The same model again.
        reference: The oracle.
        settings: Passed to the offloaded optimizer.
    """

    def __init__(
        self,
        case: Case,
        cut: Cut,
        backend: Backend | None = None,
        directory: str | Sequence[str] = "/store",
        live: torch.nn.Module | None = None,
        expected: torch.nn.Module | None = None,
        reference: type[Reference] = Reference,
        **settings: Any,
    ) -> None:
        self.case, self.cut = case, cut
        self.backend, self.directory = backend, directory
        self.live, self.expected = live or Mixed(), expected or Mixed()
        self.reference = reference(
            case.optimizer, split_groups(self.expected, case.groups), **case.hyper
        )
        self.optimizer = self._offloaded(settings)

    def step(self, step: int) -> None:
        """Take a step on both sides, with clipped gradients."""
        norms = [self.step_live(step), self.step_expected(step)]
        assert_same_bits(norms[0], norms[1], "gradient norm")

    def steps(self, *of_range: int) -> None:
        """Take the steps of a range, and compare parameters after each."""
        for step in range(*of_range):
            self.step(step)
            self.assert_same_parameters()

    def step_live(self, step: int) -> torch.Tensor:
        give_gradients(step, self.live)
        norm = clip(self.live, MAX_NORM)
        self.optimizer.step()
        return norm

    def step_expected(self, step: int) -> torch.Tensor:
        give_gradients(step, self.expected)
        norm = clip(self.expected, MAX_NORM)
        self.reference.step()
        return norm

    def edit(self, change: Callable[[torch.nn.Module], object]) -> None:
        """Change both models, without gradients."""
        with torch.no_grad():
            for model in self.both():
                change(model)

    def both(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        """Return both models, for doing the same to each."""
        return self.live, self.expected

    def assert_same_parameters(self) -> None:
        assert_same_parameters(self.live.named_parameters(), self.expected.named_parameters())

    def assert_same_state(self) -> StoredState:
        """Seal a checkpoint and compare it with the oracle."""
        stored = read_state(self.optimizer.checkpoint().result().path, self.backend)
        assert_same_state(stored, self.reference, trainable(self.expected))
        return stored

    def reopen(
        self, live: torch.nn.Module | None = None, cut: Cut | None = None, **settings: Any
    ) -> None:
        """Close the optimizer, and make it and its model anew, as another process would.

        The new model has other values, so that what is not restored shows. Nothing is restored.
        """
        self.optimizer.close()
        if isinstance(self.backend, MemoryBackend):
            self.backend = self.backend.reopened()
        self.cut = cut or self.cut
        self.live = live or Mixed(seed=99)
        self.optimizer = self._offloaded(settings)

    def _offloaded(self, settings: Mapping[str, Any]) -> offload.OffloadedOptimizer:
        return offload.OffloadedOptimizer(
            self.case.optimizer,
            split_groups(self.live, self.case.groups),
            model=self.live,
            directory=self.directory,
            options=self.cut.options(self.backend),
            **settings,
            **self.case.hyper,
        )


def memory_pair(case: Case, cut: Cut, **settings: Any) -> Pair:
    return Pair(case, cut, MemoryBackend(), **settings)


def changing_rate(step: int) -> float:
    """Warm up from zero, as libraries do, then decay."""
    return min(step / 4, 1.0) * 0.93**step
