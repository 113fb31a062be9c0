"""The present status of a run: ``status.json`` in the store, replaced at most once a second.

The file is for people and for programs that watch a run; nothing else reads it. `docs/watching.md`
describes its keys.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from offload.errors import StoreError
from offload.format.names import STATUS_NAME
from offload.format.strict_json import parse_json
from offload.record.files import read_regular, replace, require_directory

VERSION: Final = 1

_MOST_BYTES = 256 << 10
_MOST_VALUES = 5000
_MOST_ITEMS = 200
_MOST_TEXT = 500
_LATEST = 1e11
"""Times from the year 5138 on are refused: no calendar of Python reaches far beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedCheckpoint:
    """A checkpoint that was sealed."""

    step: int
    at: float
    """Time in seconds since 1970."""

    bytes_written: int
    stall_s: float
    """Seconds that training waited for it."""

    seal_s: float
    """Seconds that the seal took, behind training."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """What one of several drives has done, and can do."""

    directory: str
    totals: Mapping[str, float]
    """Its bytes, seconds and measured rates, named as in `Stats`; rates only if known."""

    recent: Mapping[str, float]
    """By how much its bytes and seconds have grown, in the time that `Status.recent` covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a run was doing at one moment."""

    at: float
    """Time of writing, in seconds since 1970."""

    started: float
    """Time at which this process has opened the store, in seconds since 1970."""

    ended: bool
    """Whether the optimizer has been closed."""

    pid: int
    host: str
    ranks: int
    """Number of ranks that train together; all other numbers are those of the rank that writes the
    store."""

    step: int
    """Number of optimizer steps of the present state."""

    totals: Mapping[str, float]
    """All numbers of `Stats` by name, and `Stats.drive_writes`."""

    recent_s: float
    """Length in seconds of the time that `recent` covers."""

    recent: Mapping[str, float]
    """By how much `totals` have grown in the last `recent_s` seconds: at least 10 seconds and two
    steps, if the process has run for so long, and at most some minutes."""

    drives: tuple[Drive, ...]
    """The drives, if there are several."""

    checkpoints: tuple[SealedCheckpoint, ...]
    """The newest checkpoints that this process has sealed, the newest last."""

    update_code: str
    """Code that updates the state; see `Stats.update_code`."""

    tier: Mapping[str, Any]
    """Uploads, as in `TierStats` but with the last event only; empty without a tier."""

    warnings: tuple[str, ...]


def write_status(directory: str, status: Status) -> None:
    """Replace the status of a store, without syncing it.

    Raises:
        OSError: The file could not be written.
        ValueError: A number is not finite.
    """
    body = _fields_of(status)
    for name in ("drives", "checkpoints"):
        body[name] = [_fields_of(one) for one in body[name]]
    text = json.dumps({"version": VERSION, **body}, allow_nan=False, separators=(",", ":"))
    replace(os.path.join(directory, STATUS_NAME), f"{text}\n".encode())


def _fields_of(record: Status | Drive | SealedCheckpoint) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def read_status(directory: str) -> Status:
    """Return the status that a run has left in a store, whoever wrote it and whenever that was.

    Raises:
        StoreError: There is none, or it is torn, of another version, or not what a run writes. The
            message says which, in one line.
    """
    require_directory(directory)
    path = os.path.join(directory, STATUS_NAME)
    data = read_regular(path, _MOST_BYTES)
    try:
        return _status(parse_json(data, max_values=_MOST_VALUES))
    except (KeyError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise StoreError(
            errno.EINVAL,
            f"this is not the status of a run ({what}): if one is going on, it is replaced within "
            "seconds; else remove it",
            path,
        ) from None


def _status(body: object) -> Status:
    """Return the status in a JSON value; raise KeyError or ValueError if it is none."""
    if not isinstance(body, dict):
        raise ValueError("not an object")
    if body["version"] != VERSION:
        raise ValueError(f"version {_text(str(body['version']), 'version')}, expected {VERSION}")
    return Status(
        at=_time(body["at"], "at"),
        started=_time(body["started"], "started"),
        ended=_boolean(body["ended"], "ended"),
        pid=_integer(body["pid"], "pid"),
        host=_text(body["host"], "host"),
        ranks=_integer(body["ranks"], "ranks"),
        step=_integer(body["step"], "step"),
        totals=_numbers(body["totals"], "totals"),
        recent_s=_number(body["recent_s"], "recent_s"),
        recent=_numbers(body["recent"], "recent"),
        drives=tuple(map(_drive, _list(body["drives"], "drives"))),
        checkpoints=tuple(map(_checkpoint, _list(body["checkpoints"], "checkpoints"))),
        update_code=_text(body["update_code"], "update_code"),
        tier=_tier(body["tier"]),
        warnings=tuple(_text(one, "warnings") for one in _list(body["warnings"], "warnings")),
    )


def _drive(body: object) -> Drive:
    if not isinstance(body, dict):
        raise ValueError("a drive is not an object")
    return Drive(
        directory=_text(body["directory"], "directory"),
        totals=_numbers(body["totals"], "totals"),
        recent=_numbers(body["recent"], "recent"),
    )


def _checkpoint(body: object) -> SealedCheckpoint:
    if not isinstance(body, dict):
        raise ValueError("a checkpoint is not an object")
    return SealedCheckpoint(
        step=_integer(body["step"], "step"),
        at=_time(body["at"], "at"),
        bytes_written=_integer(body["bytes_written"], "bytes_written"),
        stall_s=_number(body["stall_s"], "stall_s"),
        seal_s=_number(body["seal_s"], "seal_s"),
        metrics=_numbers(body["metrics"], "metrics"),
    )


_OF_TIER = {
    "url": str,
    "bytes_sent": int,
    "num_complete": int,
    "newest_step": int,
    "bytes_per_s": float,
    "slowdown": float,
    "last_step": int,
    "choice": str,
    "reason": str,
    "outcome": str,
}


def _tier(body: object) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ValueError("tier is not an object")
    checks = {str: _text, int: _integer, float: _number}
    return {
        name: checks[_OF_TIER[name]](value, name)
        for name, value in body.items()
        if name in _OF_TIER and value is not None
    }


def _numbers(body: object, name: str) -> dict[str, float]:
    if not isinstance(body, dict) or len(body) > _MOST_ITEMS:
        raise ValueError(f"{name} is not an object of at most {_MOST_ITEMS} numbers")
    return {_text(key, name): _number(value, name) for key, value in body.items()}


def _list(value: object, name: str) -> list[object]:
    if not isinstance(value, list) or len(value) > _MOST_ITEMS:
        raise ValueError(f"{name} is not a list of at most {_MOST_ITEMS} items")
    return value


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is not a number")
    return float(value)


def _time(value: object, name: str) -> float:
    if not 0 <= (time := _number(value, name)) < _LATEST:
        raise ValueError(f"{name} is no time since 1970")
    return time


def _integer(value: object, name: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is not a whole number from 0")
    return value


def _boolean(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is not true or false")
    return value


def _text(value: object, name: str) -> str:
    """Return text without characters that control a terminal, and of bounded length."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is not text")
    return "".join(c if c.isprintable() else "?" for c in value[:_MOST_TEXT])
