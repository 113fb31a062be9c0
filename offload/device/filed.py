"""Parameters whose values are in the model file of the present slot, and nowhere in memory.

A step finds the values of a chunk in the frame that the chunk passes through; a seal finds them in
the file. Everything else that asks for a value is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from gds import File
from offload.device.staging import StagedTensors, Traffic
from offload.format.chunk_plan import Piece

_aten: Any = torch.ops.aten


class FiledTensor(torch.Tensor):
    """A tensor without memory that has the shape and dtype of a parameter in the model file.

    Args:
        name: Name of the parameter, for messages.
        shape: Shape of the parameter.
        dtype: Its dtype.
        place: Function that returns the file that has the values while the parameter is frozen, and
            the position of their first byte.
    """

    parameter_name: str
    place: Callable[[], tuple[File, int]]

    @staticmethod
    def __new__(
        cls: type[FiledTensor],
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        place: Callable[[], tuple[File, int]],
    ) -> FiledTensor:
        """Make a tensor without memory."""
        make: Any = torch.Tensor._make_wrapper_subclass
        made: FiledTensor = make(cls, tuple(shape), dtype=dtype, device="cpu")
        made.parameter_name, made.place = name, place
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{self.parameter_name!r}, in the model file>"

    def data_ptr(self) -> int:
        """Return 0: there is no memory."""
        return 0

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse whatever needs values."""
        if func in (_aten.detach.default, _aten.alias.default):
            return args[0]
        found = next((value for value in args if isinstance(value, cls)), None)
        name = "a parameter" if found is None else repr(found.parameter_name)
        raise NotImplementedError(
            f'{name} is on the drive only (parameters="drive"), which {func} cannot read: use '
            "offload export, or restore() with another setting"
        )


NewValues: TypeAlias = Sequence[tuple[Sequence[Piece], torch.Tensor]]
"""Flat memory for the values of live parameters, each with the pieces that it is for, in order."""


class FiledTensors(StagedTensors):
    """Flat views of parameters, of which some are in the frame that a chunk passes through."""

    def __init__(
        self, tensors: Sequence[torch.Tensor | None], *, writable: bool, traffic: Traffic
    ) -> None:
        super().__init__(tensors, writable=writable, traffic=traffic)
        self._placed: dict[int, tuple[int, torch.Tensor]] = {}

    def place(self, model: NewValues) -> None:
        """Take the memory in which the values of the next chunk are, as they were read."""
        self._placed = {}
        for pieces, memory in model:
            at = 0
            for piece in pieces:
                if isinstance(self._tensors[piece.parameter], FiledTensor):
                    part = memory[at : at + piece.stop - piece.start]
                    self._placed[piece.parameter] = piece.start, part
                at += piece.stop - piece.start

    def is_staged(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's values come to host memory chunk by chunk."""
        return isinstance(tensor, FiledTensor) or super().is_staged(tensor)

    def _staged(self, piece: Piece) -> torch.Tensor | None:
        found = self._placed.get(piece.parameter)
        if found is None:
            return super()._staged(piece)
        first, values = found
        return values[piece.start - first : piece.stop - first]

    def finish(self, pieces: Sequence[Piece]) -> None:
        """Report that elements of pieces, which have been viewed, are not used any more."""
        super().finish([piece for piece in pieces if piece.parameter not in self._placed])
