"""Bars of seconds beside each other, as an SVG that needs no library and follows a dark page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

_WIDTH, _ROW, _TOP, _LABELS, _VALUES = 760, 30, 40, 300, 90
_STYLE = """\
text { font: 14px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; }
.other { fill: #8c959f; }
.own { fill: #1f7a4d; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .other { fill: #6e7681; }
  .own { fill: #3fb27f; }
}"""


def draw_bars(title: str, rows: Sequence[tuple[str, float, bool]], path: Path) -> None:
    """Draw one bar for each row. The same rows give the same file.

    Args:
        title: Title above the bars.
        rows: For each bar its label, its value in seconds, and whether it is of this project.
        path: Path of the SVG to write.
    """
    longest = max(value for _, value, _ in rows)
    height = _TOP + _ROW * len(rows) + 8
    told = "; ".join(f"{label}: {seconds(value)}" for label, value, _ in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(f'{title}. {told}')}</title>",
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="0" y="20">{escape(title)}</text>',
    ]
    for number, (label, value, is_own) in enumerate(rows):
        y = _TOP + _ROW * number
        length = max((_WIDTH - _LABELS - _VALUES) * value / longest, 1)
        kind = "own" if is_own else "other"
        lines += [
            f'<text x="{_LABELS - 12}" y="{y + 15}" text-anchor="end">{escape(label)}</text>',
            f'<rect class="{kind}" x="{_LABELS}" y="{y}" width="{length:.1f}" height="20" rx="2"/>',
            f'<text x="{_LABELS + length + 8:.1f}" y="{y + 15}">{seconds(value)}</text>',
        ]
    path.write_text("\n".join([*lines, "</svg>"]) + "\n")


def seconds(value: float) -> str:
    """Return a number of seconds in words, with two or three digits."""
    if value < 1:
        return f"{value * 1000:.2g} ms" if value < 0.1 else f"{value * 1000:.0f} ms"
    return f"{value:.3g} s"
