"""Probe: whether an update gives every element the same bits, wherever it lies in a tensor.

It finds updates that are not element-wise, and torch functions whose kernels compute the elements
after the last whole vector differently (`torch.pow`, `torch.sigmoid`). The same values are updated
in one tensor, in pieces in which no element is part of a whole vector, and in tensors with other
strides. They vary widely in magnitude, and most parameters are zero, because the sum of a parameter
and a small update hides the last bits of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any, TypeAlias

import torch

NUM_STEPS = 3

_COLUMNS = 65  # odd, so that pieces cut rows at every position

Cut: TypeAlias = Callable[[torch.Tensor], list[torch.Tensor]]
"""Function that returns the values of a flat tensor in new tensors."""

Run: TypeAlias = Callable[
    [Sequence[list[torch.Tensor]], Sequence[list[torch.Tensor]]], list[dict[str, Any]]
]
"""Function that updates parameters in place, given the parameters and the gradients of each step.
It returns the final state of each parameter."""


class Probe:
    """Values of a probe, and ways to lay them out."""

    def __init__(
        self, num_rows: int, pieces: Sequence[int], strided: Sequence[tuple[Cut, Cut]]
    ) -> None:
        self._piece_sizes = pieces
        self._strided = strided
        self.shape = torch.Size((num_rows, _COLUMNS))
        """Shape of the whole tensor."""

    def whole(self, run: Run) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Update all values in one contiguous tensor."""
        stepped, (state,) = self._run(run, _whole, _whole)
        return stepped, state

    def pieces(self, run: Run) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        """Update all values in pieces."""
        return self._run(run, self._cut, self._cut)

    def strided(self, run: Run) -> list[tuple[list[torch.Tensor], dict[str, Any]]]:
        """Update all values in tensors that are not contiguous, once for each layout.

        A layout for which the step raises an error is left out: torch's own step would fail, too.
        """
        results = []
        for parameters, gradients in self._strided:
            try:
                stepped, (state,) = self._run(run, parameters, gradients)
            except Exception:  # noqa: BLE001  (the class may be the user's)
                continue
            results.append((stepped, state))
        return results

    def _run(
        self, run: Run, parameters: Cut, gradients: Cut
    ) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        # Not made at import, because torch may be in any mode while this module is imported.
        generator = torch.Generator("cpu").manual_seed(20260101)
        updated, given = [], []
        for _ in range(NUM_STEPS):
            values = torch.zeros(self.shape.numel(), dtype=torch.float32, device="cpu")
            values[::4] = wide_values(len(values), generator)[::4]
            updated.append(parameters(values))
            given.append(gradients(wide_values(len(values), generator)))
        states = run(updated, given)
        return [flat(tensors) for tensors in updated], states

    def _cut(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return views of one tensor, like blocks. Most of them begin inside a vector."""
        whole = values.clone()
        sizes, start, pieces = cycle(self._piece_sizes), 0, []
        while start < len(whole):
            stop = start + next(sizes)
            pieces.append(whole[start:stop])
            start = stop
        return pieces


def wide_values(
    num: int, generator: torch.Generator, least: float = -16, most: float = 4
) -> torch.Tensor:
    """Return FP32 values of both signs, of magnitudes around e**`least` to e**`most`."""
    out = torch.empty(2, num, dtype=torch.float32, device="cpu")
    scale = out[0].uniform_(least, most, generator=generator).exp_()
    return out[1].normal_(generator=generator).mul_(scale)


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the values of tensors, end to end."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def same_values(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Return whether FP32 tensors have the same bits. All NaNs count as equal.

    IEEE 754 leaves open which NaN an operation returns, and it may depend on an element's place.
    """
    return all(
        bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())
        for a, b in zip(one, other, strict=True)
    )


def same_arrays(
    state: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], arrays: Sequence[str]
) -> bool:
    """Return whether the state of a parameter's parts equals that of the whole parameter."""
    return all(part.keys() == state.keys() for part in parts) and all(
        same_values([flat([state[name]])], [flat([part[name] for part in parts])])
        for name in arrays
    )


def _whole(values: torch.Tensor) -> list[torch.Tensor]:
    return [values.clone().view(-1, _COLUMNS)]


def _transposed(values: torch.Tensor) -> list[torch.Tensor]:
    return [values.view(-1, _COLUMNS).t().contiguous().t()]


def _every_second(values: torch.Tensor) -> list[torch.Tensor]:
    return [values.view(-1, _COLUMNS, 1).repeat(1, 1, 2)[..., 0]]


def _some_columns(values: torch.Tensor) -> list[torch.Tensor]:
    return [torch.nn.functional.pad(values.view(-1, _COLUMNS), (0, 3))[:, :_COLUMNS]]


THOROUGH = Probe(
    32,
    (15, 7, 1, 15, 13, 15, 11),
    (
        (_transposed, _whole),
        (_every_second, _every_second),
        (_whole, _every_second),
        (_some_columns, _some_columns),
    ),
)
"""Long probe, of 20 to 30 ms. It also finds a function if only one result in 500 depends on an
element's place.

The longest vectors have 16 elements, and kernels take two vectors at once if they can. No piece is
long enough for a vector of 16.
"""

QUICK = Probe(2, (37, 1, 60), ())
"""Short probe, of 1 to 2 ms. It finds whether a rule is element-wise, and which state it keeps."""
