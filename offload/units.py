"""Text for messages: numbers with fitting units, and other pieces of sentences."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence

_SIZES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_COUNTS = (("B", 10**9), ("M", 10**6), ("k", 10**3))
_RATES = (("GB/s", 10**9), ("MB/s", 10**6), ("kB/s", 10**3))


def size(num_bytes: float) -> str:
    """Return a size in bytes as text: ``1.50 GiB``, ``53.7 MiB``, ``512 bytes``."""
    for unit, factor in _SIZES:
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.{2 if factor >= 1 << 30 else 1}f} {unit}"
    return many(round(num_bytes), "byte")


def count(number: float) -> str:
    """Return a large number as text: ``9.0 M``, ``1.2 B``, ``850``."""
    for unit, factor in _COUNTS:
        if number >= factor:
            return f"{number / factor:,.1f} {unit}"
    return f"{number:.0f}"


def many(number: int, what: str) -> str:
    """Return a number with a noun: ``1 step``, ``5 steps``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def rate(bytes_per_s: float) -> str:
    """Return a rate of transfers as text: ``2.51 GB/s``, ``12.30 MB/s``."""
    for unit, factor in _RATES:
        if bytes_per_s >= factor:
            return f"{bytes_per_s / factor:.2f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def duration(seconds: float) -> str:
    """Return a time as text: ``1.250 s``, ``12.3 ms``, ``45 us``."""
    if not seconds:
        return "0 s"
    if seconds >= 1:
        return f"{seconds:,.3f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def seen_from(directory: str, text: str) -> str:
    """Return a message about files in a directory without the directory's path.

    Use this if the path precedes the message already.
    """
    return text.removeprefix(f"{directory}: ").replace(f"{directory}/", "")


def grouped(reasons: Sequence[tuple[str, str]]) -> list[str]:
    """Return one text for each reason, which names all paths that it holds for.

    Args:
        reasons: Path and reason, which may begin with the path.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for path, reason in reasons:
        groups.setdefault(seen_from(path, reason), []).append((path, reason))
    texts = []
    for short, ((path, reason), *others) in groups.items():
        if others or not reason.startswith(path):
            reason = f"{listed([path, *(other for other, _ in others)])}: {short}"
        texts.append(reason)
    return said_once(texts)


def listed(paths: Sequence[str]) -> str:
    """Return some paths in one directory as a list for a message; of many, the first ones."""
    first, *others = paths
    shown = ", ".join([first, *(path.rpartition("/")[2] for path in others[:2])])
    return f"{shown} and {len(others) - 2} more" if len(others) > 2 else shown


def said_once(texts: Sequence[str]) -> list[str]:
    """Return the texts with each repeated sentence only in the last text that contains it.

    The first sentence of a text always stays.
    """
    left = Counter(sentence for text in texts for sentence in text.split(". ")[1:])
    out = []
    for text in texts:
        first, *others = text.split(". ")
        kept = []
        for sentence in others:
            left[sentence] -= 1
            if not left[sentence]:
                kept.append(sentence)
        out.append(". ".join([first, *kept]))
    return out


def part_options(directories: Sequence[str]) -> str:
    """Return the command-line options that name a store's further directories to ``offload``."""
    return " ".join(f"--part {shlex.quote(directory)}" for directory in directories)
