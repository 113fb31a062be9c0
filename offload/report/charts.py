"""Charts as inline SVG. Colours are classes, so that a page can have light and dark ones.

Every chart has the same axis of steps. Values are finite floats; text may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 760, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 28, 12, 30
_FLOOR = _HEIGHT - _BOTTOM

_MAX_TITLES = 180
"""Largest number of places in a chart over which the pointer shows numbers."""

_MAX_POINTS = 1000

_TINY = 1e-290
"""Differences below this are none, so that no quotient is too large for a float."""


@dataclass(frozen=True, slots=True)
class Column:
    """Values that hold for a range of steps."""

    start: int
    step: int
    values: Sequence[float]
    title: str
    """Numbers that are shown if the pointer is over it."""


class Chart:
    """One chart, which is drawn piece by piece.

    Args:
        label: What the chart shows, for those who do not see it.
        steps: First and last step of the axis.
        values: Lowest and highest value.
        unit: Unit of the values, beside the axis.
        resumed_at: Steps at which a mark is drawn.
    """

    def __init__(
        self,
        label: str,
        steps: tuple[int, int],
        values: tuple[float, float],
        unit: str = "",
        resumed_at: Iterable[int] = (),
    ) -> None:
        self._label = label
        first, last = steps
        self._first, self._num_steps = first, max(last - first, 1)
        low, high = values
        if high - low < _TINY:
            room = abs(low) / 10 if abs(low) > _TINY else 1.0
            low, high = low - room, high + room
        self._marks = ticks(low, high)
        self._low, self._high = min(low, self._marks[0]), max(high, self._marks[-1])
        self._pieces: list[str] = []
        self._draw_axes(unit)
        for step in resumed_at:
            self._pieces.append(
                f'<path class="resumed" d="M{self._x(step):.1f} {_TOP}V{_FLOOR}">'
                f"<title>went on from step {step:,}</title></path>"
            )

    def stack(self, columns: Sequence[Column], classes: Sequence[str]) -> None:
        """Draw the values of each column on top of each other, the first at the bottom."""
        paths: list[list[str]] = [[] for _ in classes]
        for column in columns:
            left, right = self._x(column.start), self._x(column.step)
            below = 0.0
            for path, value in zip(paths, column.values, strict=True):
                if value > 0:
                    bottom, top = self._y(below), self._y(below + value)
                    path.append(f"M{left:.1f} {bottom:.1f}V{top:.1f}H{right:.1f}V{bottom:.1f}Z")
                below += value
        self._pieces += [
            f'<path class="area {name}" d="{"".join(path)}"/>'
            for name, path in zip(classes, paths, strict=True)
            if path
        ]
        self._show_titles(columns)

    def stairs(self, columns: Sequence[Column], classes: Sequence[str]) -> None:
        """Draw each value as a line that is level within a column."""
        for number, name in enumerate(classes):
            path, end = [], None
            for column in columns:
                y, move = self._y(column.values[number]), end != column.start
                path.append(f"M{self._x(column.start):.1f} {y:.1f}" if move else f"V{y:.1f}")
                path.append(f"H{self._x(column.step):.1f}")
                end = column.step
            self._pieces.append(f'<path class="line {name}" d="{"".join(path)}"/>')
        self._show_titles(columns)

    def curve(self, points: Sequence[tuple[int, float]], name: str) -> None:
        """Draw a line through points; of very many, the lowest and highest of neighbours."""
        points = extremes(points, _MAX_POINTS)
        places = [f"{self._x(step):.1f} {self._y(value):.1f}" for step, value in points]
        self._pieces.append(f'<path class="line {name}" d="M{"L".join(places)}"/>')
        if len(points) > _MAX_TITLES:
            return
        for (step, value), place in zip(points, places, strict=True):
            x, y = place.split()
            self._pieces.append(
                f'<circle class="{name}" cx="{x}" cy="{y}" r="3">'
                f"<title>step {step:,}: {value:g}</title></circle>"
            )

    def svg(self) -> str:
        """Return the chart as an element."""
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'aria-label="{escape(self._label)}">{"".join(self._pieces)}</svg>'
        )

    def _x(self, step: int) -> float:
        return _LEFT + (step - self._first) / self._num_steps * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        # Halves, because the difference of the largest floats is none.
        part = (value / 2 - self._low / 2) / (self._high / 2 - self._low / 2)
        return _FLOOR - part * (_FLOOR - _TOP)

    def _draw_axes(self, unit: str) -> None:
        texts = labels(self._marks)
        for value, text in zip(self._marks, texts, strict=True):
            y = self._y(value)
            self._pieces.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
            self._text(_LEFT - 6, y + 4, text, "end")
        steps = [v for v in ticks(self._first, self._first + self._num_steps, 6) if v == int(v)]
        for value in steps:
            if self._first <= value <= self._first + self._num_steps:
                self._text(self._x(int(value)), _FLOOR + 16, f"{value:,.0f}", "middle")
        self._text(_WIDTH - _RIGHT, _HEIGHT - 2, "step", "end")
        if unit:
            self._text(_LEFT + 4, _TOP + 2, unit, "start")

    def _text(self, x: float, y: float, text: str, anchor: str) -> None:
        self._pieces.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def _show_titles(self, columns: Sequence[Column]) -> None:
        """Let the pointer show the numbers of columns; of very many, of some."""
        every = -(-len(columns) // _MAX_TITLES) or 1
        for first in range(0, len(columns), every):
            group = columns[first : first + every]
            left, right = self._x(group[0].start), self._x(group[-1].step)
            self._pieces.append(
                f'<rect class="over" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" '
                f'height="{_FLOOR - _TOP}"><title>{escape(group[-1].title)}</title></rect>'
            )


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers between two values, some of them or at least two."""
    rough = (high / most - low / most) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / size), math.floor(high / size)
    found = [number * size for number in range(first, last + 1)]
    return found if len(found) > 1 else [low, high]


def labels(marks: Sequence[float]) -> list[str]:
    """Return numbers as text, with as many digits as tell neighbours apart."""
    largest, gap = max(map(abs, marks)), abs(marks[1] - marks[0])
    if not 1e-4 <= largest < 1e6:
        return [f"{mark:.3g}" for mark in marks]
    digits = min(max(0, -math.floor(math.log10(gap) + 1e-9)), 8) if gap else 0
    return [f"{mark:,.{digits}f}" for mark in marks]


def extremes(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Return at most so many points, among them the lowest and highest of every range."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // (most // 2))
    found = []
    for first in range(0, len(points), size):
        group = sorted(points[first : first + size], key=lambda point: point[1])
        found += sorted({group[0], group[-1]})
    return found
