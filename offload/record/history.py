"""The history of a run: one JSON object a line, appended to ``history.jsonl`` in the store.

There are three kinds of lines. ``at`` is always the time in seconds since 1970, and ``step`` the
number of optimizer steps of the state.

- ``start``: a process has begun to train, at ``step``, or has gone back to it. Later steps above
  this line were lost, and are taken again below it.
- ``checkpoint``: a checkpoint was sealed, with ``bytes_written``, ``seal_s`` (seconds, behind
  training), ``stall_s`` (seconds that training waited for it) and ``metrics``. If its train state
  or metrics were replaced later, another line of the same step follows: numbers of such lines add
  up, and the metrics of the last one count.
- ``steps``: what happened in the last ``elapsed_s`` seconds: ``steps``, ``seconds`` by phase, named
  as in `Stats`, ``read_bytes`` and ``written_bytes``.

Further kinds and further keys may come; readers skip what they do not know.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from offload.format.names import HISTORY_NAME
from offload.format.strict_json import parse_json
from offload.record.files import append, read_regular, replace

MAX_BYTES: Final = 8 << 20
"""Size of a history in bytes from which on it is thinned by half."""

_MOST_READ_BYTES = 2 * MAX_BYTES
_MOST_LINE_BYTES = 64 << 10
_MOST_LINE_VALUES = 1000

Line = dict[str, Any]
"""One line of a history."""


def read_lines(directory: str) -> tuple[list[Line], int]:
    """Return the lines of a store's history, oldest first, and the number of unreadable ones.

    A torn last line, which a killed process has left, is neither. Every line that is returned has a
    ``kind`` that is text, a finite ``at``, and a ``step`` that is an int from 0; other keys are for
    the caller to check. No history is one without lines.

    Raises:
        StoreError: The history cannot be read, or no run has written it. The message says so in one
            line.
    """
    path = os.path.join(directory, HISTORY_NAME)
    return _parse(read_regular(path, _MOST_READ_BYTES)) if os.path.lexists(path) else ([], 0)


def add_lines(directory: str, lines: Sequence[Mapping[str, object]]) -> None:
    """Append lines to a store's history, without syncing them; thin it if it has become too large.

    Raises:
        OSError: The lines could not be written.
    """
    path = os.path.join(directory, HISTORY_NAME)
    if append(path, _encode(lines)) > MAX_BYTES:
        thin(path)


def thin(path: str) -> None:
    """Halve a history: sums of two lines about steps each, and every other checkpoint.

    The newest lines stay as they are. Raises `OSError` if the file cannot be read or replaced.
    """
    lines, _ = _parse(read_regular(path, _MOST_READ_BYTES))
    data = _encode(halved(lines))
    if len(data) > MAX_BYTES * 3 // 4:  # not lines that can be halved
        data = data[-MAX_BYTES // 2 :].partition(b"\n")[2]
    replace(path, data)


def halved(lines: Sequence[Line]) -> list[Line]:
    """Return about half as many lines, in which steps, seconds and bytes have the same sums."""
    kept: list[Line] = []
    held: Line | None = None  # a line about steps that waits for the next one
    num_checkpoints = sum(line["kind"] == "checkpoint" for line in lines)
    for line in lines:
        if line["kind"] == "steps":
            if held is None:
                held = line
            else:
                kept.append(_sum(held, line))
                held = None
        elif line["kind"] == "checkpoint":
            num_checkpoints -= 1
            if num_checkpoints % 2 == 0:  # the newest one among them
                kept.append(line)
        else:  # what follows is another process's
            kept += [line] if held is None else [held, line]
            held = None
    return kept if held is None else [*kept, held]


def _sum(first: Line, second: Line) -> Line:
    """Return one line for two that follow each other."""
    sums = _added(first, second)
    before, after = first.get("seconds"), second.get("seconds")
    if isinstance(before, dict) and isinstance(after, dict):
        sums["seconds"] = _added(before, after)
    return sums | {"at": second["at"], "step": second["step"]}


def _added(first: Line, second: Line) -> Line:
    both = {**first, **second}
    for name in first.keys() & second.keys():
        if _is_number(first[name]) and _is_number(second[name]):
            both[name] = first[name] + second[name]
    return both


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _encode(lines: Sequence[Mapping[str, object]]) -> bytes:
    return b"".join(
        json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n" for line in lines
    )


def _parse(data: bytes) -> tuple[list[Line], int]:
    found, num_unreadable = [], 0
    for text in io.BytesIO(data):
        try:
            if len(text) > _MOST_LINE_BYTES:
                raise ValueError("a line of this length is never written")
            line = parse_json(text, max_values=_MOST_LINE_VALUES)
            if not _is_line(line):
                raise ValueError("not what a run writes")
        except ValueError:
            num_unreadable += bool(text.strip()) and text.endswith(b"\n")
        else:
            found.append(line)
    return found, num_unreadable


def _is_line(line: object) -> bool:
    return (
        isinstance(line, dict)
        and isinstance(line.get("kind"), str)
        and _is_number(line.get("at"))
        and type(line.get("step")) is int
        and line["step"] >= 0
    )
