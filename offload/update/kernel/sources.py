"""Digest of the C++ sources, by which a library of the update kernel is known to be of these.

The build hook loads this file by its path, while nothing is installed: it imports neither torch nor
anything of this package.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

_SUFFIXES: Final = (".cpp", ".h")
_DIGITS: Final = 16


def source_digest(folder: Path) -> str:
    """Return the digest of the C++ sources in a folder: ``SOURCE_DIGEST`` of a library."""
    files = sorted((path for path in folder.iterdir() if path.suffix in _SUFFIXES), key=_name)
    if not files:
        raise FileNotFoundError(f"{folder}: no C++ sources (*.cpp, *.h) are in this folder")
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:_DIGITS]


def _name(path: Path) -> str:
    return path.name
