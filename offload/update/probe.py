"""Whether an update treats every element alike, to the bit, wherever it lies in a tensor.

A step runs on blocks that begin and end in the middle of parameters. Two things would give other
bits than torch's own step on whole parameters:

- an update that is not element-wise, such as one that divides by the norm of the tensor;
- a function of torch whose kernel computes the last elements of a tensor, after the last whole
  vector, in another way than the rest. `torch.pow` and `torch.sigmoid` do so on most processors:
  of a thousand results, 5 to 800 differ in the last bits.

So the same values are updated in one tensor and in many small pieces, in which no element is in a
whole vector. They are also updated in tensors of other strides, for which torch's kernels have code
of its own. The values are of wide magnitude, because a function gives other bits for some of them
only, and most parameters are zero, because the sum of a parameter and a small update hides the last
bits of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any, TypeAlias

import torch

NUM_STEPS = 3

_COLUMNS = 65  # odd, so that pieces cut rows at all places

Cut: TypeAlias = Callable[[torch.Tensor], list[torch.Tensor]]
"""Returns the values of a flat tensor in new tensors."""

Run: TypeAlias = Callable[
    [Sequence[list[torch.Tensor]], Sequence[list[torch.Tensor]]], list[dict[str, Any]]
]
"""Updates parameters in place, given those of each step and their gradients; returns the state that
each has in the end."""


class Probe:
    """The values, and the ways to lay them out.

    Args:
        num_rows: There are 65 values in each.
        pieces: Elements of each piece, again and again.
        strided: Ways to lay out parameters and gradients other than contiguously.
    """

    def __init__(
        self, num_rows: int, pieces: Sequence[int], strided: Sequence[tuple[Cut, Cut]]
    ) -> None:
        self._piece_sizes = pieces
        self._strided = strided
        self.shape = torch.Size((num_rows, _COLUMNS))
        """Of the whole tensor."""

    def whole(self, run: Run) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Update everything in one contiguous tensor.

        Returns:
            The parameters after each step, and the state in the end.
        """
        stepped, (state,) = self._run(run, _whole, _whole)
        return stepped, state

    def pieces(self, run: Run) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        """Do the same in pieces; returns the state of each."""
        return self._run(run, self._cut, self._cut)

    def strided(self, run: Run) -> list[tuple[list[torch.Tensor], dict[str, Any]]]:
        """Do the same in tensors that are not contiguous.

        A way that makes the step raise is left out: torch's own would raise as well.
        """
        results = []
        for parameters, gradients in self._strided:
            try:
                stepped, (state,) = self._run(run, parameters, gradients)
            except Exception:  # noqa: BLE001  (of a class that is the user's)
                continue
            results.append((stepped, state))
        return results

    def _run(
        self, run: Run, parameters: Cut, gradients: Cut
    ) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        # Made here rather than kept: whoever imports this module may be in any mode of torch.
        generator = torch.Generator("cpu").manual_seed(20260101)
        updated, given = [], []
        for _ in range(NUM_STEPS):
            values = torch.zeros(self.shape.numel(), dtype=torch.float32, device="cpu")
            values[::4] = self._wide(generator)[::4]
            updated.append(parameters(values))
            given.append(gradients(self._wide(generator)))
        states = run(updated, given)
        return [flat(tensors) for tensors in updated], states

    def _cut(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return views of one tensor, as blocks are: most begin where no vector does."""
        whole = values.clone()
        sizes, start, pieces = cycle(self._piece_sizes), 0, []
        while start < len(whole):
            stop = start + next(sizes)
            pieces.append(whole[start:stop])
            start = stop
        return pieces

    def _wide(self, generator: torch.Generator) -> torch.Tensor:
        out = torch.empty(2, self.shape.numel(), dtype=torch.float32, device="cpu")
        scale = out[0].uniform_(-16, 4, generator=generator).exp_()
        return out[1].normal_(generator=generator).mul_(scale)


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the values of tensors, one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def same_values(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Return whether FP32 tensors have the same bits, where any NaN is like any other.

    Which NaN an operation makes is open in IEEE 754, and may depend on the place of an element.
    """
    return all(
        bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())
        for a, b in zip(one, other, strict=True)
    )


def same_arrays(
    state: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], arrays: Sequence[str]
) -> bool:
    """Return whether the state of parts of a parameter is that of the whole one."""
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
"""Also finds a function of which one result in 500 depends on the place of an element.

The longest vectors are of 16 elements, and kernels take two at once where they can: none of the
pieces has room for that. It takes 20 to 30 ms.
"""

QUICK = Probe(2, (37, 1, 60), ())
"""Finds out whether a rule is element-wise, and which state it keeps, in 1 to 2 ms."""
