"""One rank of a training: an engine that is told which part of each tensor it steps.

These tests are of the engine and its table alone, without other ranks: a rank has a directory of
its own here. `tests/ranks_training` has ranks that train together.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch

from offload import DriveTuning, Options
from offload.ambient import neutral
from offload.checkpoint.checkpoint import Checkpoint
from offload.engine.engine import Engine
from offload.engine.seal import SealHandle
from offload.engine.strategy import InsideStep
from offload.engine.training_state import TrainingState
from offload.format._layout_fields import decode_layout
from offload.format.layout import Layout
from offload.model.shards import Shards
from offload.overlap.forward import BesideForward
from offload.retention.policy import as_retention
from offload.update.rules import UpdateRule


def manifests_may_have_boxes(patch: pytest.MonkeyPatch) -> None:
    """Let a manifest of one owner describe boxes of parameters."""

    def with_boxes(*arguments: Any, has_boxes: bool) -> Layout:
        del has_boxes
        return decode_layout(*arguments, has_boxes=True)

    patch.setattr("offload.format.manifest.decode_layout", with_boxes)


def settings(**changes: Any) -> Options:
    """Return options with small chunks, so that boxes are cut into several."""
    given = {"chunk_bytes": 4096, "allow_volatile": True, "drives": DriveTuning(calibrate=False)}
    return Options(**{**given, **changes})


class Rank(torch.optim.Optimizer):
    """An optimizer that steps the shards of one rank."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any],
        directory: Path,
        shards: Shards | None,
        *,
        model: torch.nn.Module | None = None,
        options: Options | None = None,
        forward: bool = False,
        **hyper: Any,
    ) -> None:
        rule = UpdateRule(optimizer_class, hyper, allow_fused=False)
        super().__init__(params, dict(rule.defaults))
        state = TrainingState(
            rule,
            [str(directory)],
            model=model,
            keep=as_retention(2),
            fresh=False,
            options=options or settings(),
            shards=shards,
        )
        strategy = partial(BesideForward, model=model) if forward and model else InsideStep
        self.training = state
        self.engine = Engine(state, strategy(state))
        with neutral():
            self.engine.require_space(self.param_groups)
            self.engine.strategy.attach(lambda: self.param_groups)

    def step(self) -> None:  # type: ignore[override]
        with neutral():
            self.engine.step(self.param_groups)

    def checkpoint(self, train_state: object = None) -> SealHandle:
        with neutral():
            return self.engine.checkpoint(self.param_groups, train_state)

    def restore(self) -> Checkpoint | None:
        with neutral():
            return self.engine.restore(
                self.param_groups, None, discard_newer=False, require=lambda: None
            )

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
