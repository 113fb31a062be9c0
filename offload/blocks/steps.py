"""Strategy of steps that update the homes of streamed parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from gds.errors import DeviceMemoryError
from offload.blocks.hooks import put_hooks
from offload.blocks.streaming import StreamedBlocks
from offload.blocks.units import find_units
from offload.engine.stepping import StepStrategy
from offload.engine.training_state import Groups, TrainingState
from offload.model.parameters import is_stepped


class StreamedSteps(StepStrategy):
    """The strategy of steps of a model whose blocks are streamed.

    Whatever the engine does with the state, it finds the values of all parameters in their homes.

    Args:
        state: State that is trained.
        model: Model with the blocks.
        patterns: Names of the blocks; see `find_units`.
    """

    def __init__(
        self, state: TrainingState, model: torch.nn.Module, patterns: Sequence[str]
    ) -> None:
        super().__init__(state)
        self._blocks = StreamedBlocks(find_units(model, patterns), state.meter)
        self._handles: list[RemovableHandle] = []

    def attach(self, groups: Callable[[], Groups | None]) -> None:  # noqa: ARG002
        """Move the parameters of the blocks to their homes, and put hooks on the blocks."""
        try:
            self._blocks.begin()
            self._handles = put_hooks(self._blocks)
        except BaseException:
            self._blocks.end()
            raise

    def step(self, groups: Groups) -> None:
        """Update the homes of all parameters that have a gradient, and drop all blocks."""
        self._blocks.settle()
        try:
            super().step(groups)
        finally:
            self._blocks.refresh(is_stepped)

    def settle(self, call: str) -> None:  # noqa: ARG002
        """Bring the program's edits home."""
        self._blocks.settle()

    def give_up(self) -> None:
        """Drop all blocks, because a restore replaces their values."""
        self._blocks.drop_all()

    def restored(self) -> None:
        """Let blocks be loaded again."""
        self._blocks.refresh()

    def end(self) -> None:
        """Give the model its parameters back, whole."""
        try:
            self._blocks.end()
        except DeviceMemoryError as error:
            warnings.warn(
                f"the parameters of blocks stay in host memory, and are streamed still: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
