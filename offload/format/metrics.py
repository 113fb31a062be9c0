"""Metrics of a checkpoint: a few finite numbers by name, kept in its manifest."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from offload.errors import MetricError

MAX_METRICS = 16
"""Largest number of metrics in one checkpoint. With names of `MAX_NAME_CHARACTERS` they fit the
space that a manifest reserves."""

MAX_NAME_CHARACTERS = 64
"""Length of the longest name of a metric, in characters."""

_OF_THE_RUN = ("epoch", "step", "global_step")
"""Names of counters that libraries put among their metrics."""

_TIMINGS = ("runtime", "per_second", "jit_compilation_time", "model_preparation_time")
"""Ends of the names of durations and rates that libraries put among their metrics."""


def describes_the_run(name: str) -> bool:
    """Return whether a metric of a library is a duration, a rate or a counter.

    Such a number says how fast an evaluation was, or when it was, and nothing about the model.
    """
    return name in _OF_THE_RUN or name.endswith(tuple(f"_{end}" for end in _TIMINGS))


def take_metrics(metrics: Any) -> dict[str, float]:
    """Return a user's metrics as a checkpoint stores them, without those that are not finite.

    A loss that is not a number shows that training has gone wrong, and then a checkpoint is needed
    most. So such a metric does not prevent the checkpoint. It is left out, with a `RuntimeWarning`
    that names the metric and points at the caller of the caller.

    Args:
        metrics: Numbers by name. They are Python numbers, or tensors and numpy values of one
            element.

    Raises:
        MetricError: There are too many metrics, a name is not a short string, or a value is not a
            number. The message says which.
    """
    numbers = _numbers(metrics)
    for name, number in numbers.items():
        if not math.isfinite(number):
            warnings.warn(
                f"metric {name!r} is {number}, which cannot be compared with other values: this "
                "checkpoint is made without it",
                RuntimeWarning,
                stacklevel=3,
            )
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def check_metrics(metrics: Any) -> dict[str, float]:
    """Return the metrics of a manifest, after checking them."""
    numbers = _numbers(metrics)
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise MetricError(f"metric {name!r} must be finite, got {number}")
    return numbers


def _numbers(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise MetricError(f'metrics must be a dict such as {{"loss": 1.2}}, got {metrics!r:.80}')
    if len(metrics) > MAX_METRICS:
        raise MetricError(
            f"{len(metrics)} metrics, but a checkpoint holds at most {MAX_METRICS}: keep the "
            "others in train_state"
        )
    return {_name(name): _value(name, value) for name, value in metrics.items()}


def usable_metrics(measured: Mapping[str, Any], first: Iterable[str] = ()) -> dict[str, float]:
    """Return the measurements of a library that a checkpoint can hold, without the others.

    Durations, rates and counters (``eval_runtime``, ``eval_samples_per_second``, ``epoch``) are
    left out, since they are not metrics of a checkpoint.

    Args:
        measured: Values by name: numbers, or tensors of one element.
        first: Names that take precedence over all others if there are too many. They are taken even
            if they are durations, rates or counters.
    """
    found = {}
    wanted = tuple(first)
    for name in dict.fromkeys((*wanted, *measured)):
        if name not in measured or (name not in wanted and describes_the_run(str(name))):
            continue
        with suppress(MetricError):  # text, or many elements
            number = _value(_name(name), measured[name])
            if math.isfinite(number):
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
    number = value
    if hasattr(value, "item"):  # a tensor or a numpy value
        with suppress(TypeError, ValueError, RuntimeError):  # several elements, or none
            number = value.item()
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise MetricError(
            f"metric {name!r} is a {type(value).__name__}, expected one number, got {value!r:.80}"
        )
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
