"""What people see of an object in a shell or a notebook: names that complete, and a small table."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Mapping


def names_to_offer(names: Iterable[str], hidden: Collection[str] = ()) -> list[str]:
    """Return the names that completion should offer: all but private and `hidden` ones.

    Names that Python itself looks for, such as ``__enter__``, stay, because ``dir()`` also tells
    programs what an object can do. Shells show them only to those who type underscores.

    Args:
        names: All names of the object.
        hidden: Public names that only other modules and libraries need.
    """
    shown = (name for name in names if name not in hidden)
    return sorted(
        name
        for name in shown
        if not name.startswith("_") or (name.startswith("__") and name.endswith("__"))
    )


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Return a table of two columns for notebooks; nothing in it is taken for markup.

    Args:
        title: Line above the table.
        rows: Value of each row, by the text in front of it. Empty text leaves the row out.
    """
    cells = "".join(
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(text)}</td></tr>'
        for name, value in rows.items()
        if (text := str(value))
    )
    caption = f'<caption style="text-align:left">{html.escape(title)}</caption>'
    return f"<table>{caption}{cells}</table>"
