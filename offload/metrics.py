"""What was measured at a checkpoint: a few finite numbers by name, kept in its manifest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from offload.errors import MetricError

MAX_METRICS = 16
"""In one checkpoint. With names of `MAX_NAME_CHARACTERS` they fit what a manifest reserves."""

MAX_NAME_CHARACTERS = 64


def check_metrics(metrics: Any) -> dict[str, float]:
    """Return metrics as a checkpoint holds them.

    Raises:
        MetricError: Too many, a name that is not a short string, or a value that is not a finite
            number; says which.
    """
    if not isinstance(metrics, Mapping):
        raise MetricError(f'metrics must be a dict such as {{"loss": 1.2}}, got {metrics!r:.80}')
    if len(metrics) > MAX_METRICS:
        raise MetricError(
            f"{len(metrics)} metrics, at most {MAX_METRICS} have room in a checkpoint: keep the "
            "others in train_state"
        )
    return {_name(name): _value(name, value) for name, value in metrics.items()}


def usable_metrics(measured: Mapping[str, Any], first: Iterable[str] = ()) -> dict[str, float]:
    """Return what of a library's measurements a checkpoint can hold; the rest is left out.

    Args:
        measured: Values by name: numbers, or tensors of one element.
        first: Names that go before all others if there are too many.
    """
    found = {}
    for name in dict.fromkeys((*first, *measured)):
        with suppress(TypeError, ValueError, OverflowError):  # absent, text, or many elements
            number = float(measured[name]) if name in measured else math.nan
            if math.isfinite(number) and 0 < len(name) <= MAX_NAME_CHARACTERS:
                found[name] = number
    return dict(list(found.items())[:MAX_METRICS])


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_CHARACTERS:
        raise MetricError(
            f"the name of a metric must be a string of 1 to {MAX_NAME_CHARACTERS} characters, got "
            f"{name!r:.80}"
        )
    return name


def _value(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MetricError(
            f"metric {name!r} is a {type(value).__name__}, expected a Python number: pass "
            f"float(...) of it, got {value!r:.80}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise MetricError(
            f"metric {name!r} must be finite, got {number}: leave it out, so that this checkpoint "
            "is not ranked by it"
        )
    return number
