"""Plans by the names of their settings, and tables of the figures that they should have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from decimal import Decimal
from typing import Any

import pytest

from offload.sizing import Cluster, Machine, Plan, Precision, Run, size

_GIVEN = {"machine": Machine, "cluster": Cluster, "run": Run, "precision": Precision}
Row = tuple[dict[str, Any], dict[str, Any]]
"""Settings, and the figure at each path. A text is a figure that was rounded to its digits."""


def plan_of(model: Any, each: float | None = None, **settings: Any) -> Plan:
    """Return the plan of a model.

    Args:
        model: What `size` takes.
        each: Bytes of a checkpoint for each parameter.
        settings: Fields of the cluster, the machine, the run and the precision.
    """
    given: dict[str, Any] = {}
    for name, kind in _GIVEN.items():
        own = {field.name for field in fields(kind)} & settings.keys()
        given[name] = kind(**{field: settings.pop(field) for field in own})
    assert not settings
    return size(model, checkpoint_bytes_per_parameter=each, **given)


def check(row: Row) -> None:
    """Compare all figures of a row."""
    settings, expected = row
    plan = plan_of(**settings)
    for path, value in expected.items():
        if isinstance(value, str) and value[0].isdigit():
            exponent = Decimal(value).as_tuple().exponent
            value = pytest.approx(float(value), abs=0.5 * 10.0**exponent)
        elif not isinstance(value, str | None):
            value = pytest.approx(value)
        assert _at(plan, path) == value, path


def _at(found: Any, path: str) -> Any:
    for part in path.split("/"):
        if isinstance(found, Mapping):
            found = found[part]
        else:
            is_index = part.lstrip("-").isdigit()
            found = found[int(part)] if is_index else getattr(found, part)
    return found
