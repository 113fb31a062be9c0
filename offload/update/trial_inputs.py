"""What the trial of a class gives it: parameters, gradients, and wrong answers to questions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

NUM_STEPS: Final = 64

Odd: TypeAlias = Literal["missing", "infinite"]
"""Gradients that some classes cannot take: None, and such with a value that is not finite."""

_SHAPES: Final = (((160, 65), (7,), ()), ((40, 9), (1,), (4, 3, 3, 3), (2, 3, 5)))
"""Shapes of the parameters of each group. One has more than 10,000 elements, as some rules ask."""

_SCALES: Final = (1.0, 0.01, 3.0, 100.0, 0.0, 0.1, 0.5)
"""Size of the values that each parameter begins with."""

_MISSING: Final = {
    20: {(0, 1)},
    21: {(1, 0), (1, 1), (1, 2), (1, 3)},
    22: {(group, position) for group in range(2) for position in range(4)},
}
"""Group and position of the parameters that have no gradient, by the number of the step."""

_SPIKE: Final = 40
_HALF_ZERO: Final = 41
"""Numbers of the steps in which one element of a gradient is large, and half of them are zero."""

_OTHER_NUMBER: Final = 1_000_003


class AskedParameter(torch.nn.Parameter):
    """A parameter that records which attributes it was asked for and does not have."""

    asked: Final[set[str]] = set()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            AskedParameter.asked.add(name)
        raise AttributeError(f"'Parameter' object has no attribute {name!r}")


class OtherNumbers(TorchFunctionMode):
    """Every tensor says that it has many more elements than it has."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * _OTHER_NUMBER if func in _NUMBERS else result


_NUMBERS: Final = (
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.numel,
    torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]
)
"""Functions that tell the number of elements."""


def first_parameters() -> list[list[torch.Tensor]]:
    """Return the parameters of each group as they are before the first step."""
    generator = torch.Generator("cpu").manual_seed(20260103)
    scales = iter(_SCALES)
    return [
        [
            torch.empty(shape, dtype=torch.float32, device="cpu").normal_(generator=generator)
            * next(scales)
            for shape in group
        ]
        for group in _SHAPES
    ]


def gradients_of(
    number: int,
    parameters: Sequence[Sequence[torch.Tensor]],
    generator: torch.Generator,
    left_out: Set[Odd],
) -> list[list[torch.Tensor | None]]:
    """Return gradients for a step: mostly of a loss that falls, and at times extreme ones."""
    scale, pull = 1.0, 1.0
    if number % 16 in (10, 11):
        scale, pull = 1e-12, 0.0
    elif number % 16 == 12:
        scale, pull = 0.0, 0.0
    elif number % 16 == 5:
        scale, pull = 1e3, 1.0
    elif number >= NUM_STEPS - 4:
        scale, pull = 1e9, 0.0
    elif number < NUM_STEPS // 2:
        scale = 0.01  # the same direction for many steps, as rules for estimating distances need
    missing = () if "missing" in left_out else _MISSING.get(number, ())
    given: list[list[torch.Tensor | None]] = []
    for index, group in enumerate(parameters):
        given.append([])
        for position, parameter in enumerate(group):
            noise = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            noise.normal_(generator=generator).mul_(scale)
            gradient = noise.add_(parameter.detach() - 0.5, alpha=pull)
            if not (number == NUM_STEPS - 1 and "infinite" in left_out):
                _spoil(gradient.view(-1), number)
            given[-1].append(None if (index, position) in missing else gradient)
    return given


def _spoil(gradient: torch.Tensor, number: int) -> None:
    """Change some values of a gradient, as a rule that looks at a whole gradient would notice."""
    if number == _SPIKE:
        gradient[0] = 1e8
    elif number == _HALF_ZERO:
        gradient[: len(gradient) // 2] = 0
    elif number == NUM_STEPS - 1:
        gradient[0] = torch.inf


def random_states() -> tuple[Any, ...]:
    """Return the states of the program's random generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()


@contextmanager
def randomness_kept() -> Iterator[None]:
    """Give the program's random generators back as they were at the begin of the block."""
    own, numpys, _ = random_states()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(own)
            np.random.set_state(numpys)
