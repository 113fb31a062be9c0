"""Compiled kernels that are kept between processes, in the user's cache directory.

An entry is named after the digest of everything that its content depends on. It is written to
another name and then renamed, so that processes may use the directory at the same time. It begins
with the digest of its content, so that a damaged entry is not used. The directory is not used at
all if another user could write to it: a kernel runs with this user's rights.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

_MAGIC = b"ssd-offload kernel 1\n"
_MAX_BYTES = 64 << 20


def directory() -> Path:
    """Return where compiled kernels are kept; it need not exist.

    The path is not absolute if this user has no home directory, and nothing is kept then.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))
    return root / "ssd-offload" / "kernels"


class BinaryCache:
    """Compiled kernels in a directory. Whatever is wrong with it, it only finds and keeps nothing.

    Args:
        path: The directory, which is made when something is kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, parts: Sequence[str]) -> bytes | None:
        """Return a compiled kernel; None if there is none that can be trusted.

        Args:
            parts: Everything that it depends on: source, options, architecture and versions.
        """
        try:
            if not _is_private(self._path):
                return None
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(self._path / _name(parts), flags), "rb") as file:
                found = os.fstat(file.fileno())
                if not (stat.S_ISREG(found.st_mode) and _is_only_ours(found)):
                    return None
                content = file.read(_MAX_BYTES)
        except OSError:
            return None
        start = len(_MAGIC) + hashlib.sha256().digest_size
        digest, binary = content[len(_MAGIC) : start], content[start:]
        if content.startswith(_MAGIC) and hashlib.sha256(binary).digest() == digest:
            return binary
        return None

    def keep(self, parts: Sequence[str], binary: bytes) -> None:
        """Keep a compiled kernel, in place of an entry that was damaged.

        Args:
            parts: As for `find`.
            binary: The compiled kernel.
        """
        if not self._path.is_absolute():
            return
        try:
            missing = [p for p in (self._path, *self._path.parents) if not p.exists()]
            for path in reversed(missing):  # whatever the umask lets others do
                path.mkdir(mode=0o700, exist_ok=True)
            if not _is_private(self._path):
                return
            handle, unfinished = tempfile.mkstemp(dir=self._path, prefix=".new-")
            try:
                with open(handle, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(binary).digest() + binary)
                os.replace(unfinished, self._path / _name(parts))
            except BaseException:
                os.unlink(unfinished)
                raise
        except OSError:
            return


def _name(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        text = part.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def _is_private(path: Path) -> bool:
    """Return whether only this user or root can change a directory, or put another in its place."""
    path = path.resolve(strict=True)
    if not _is_only_ours(path.stat()):
        return False
    for parent in path.parents:
        found = parent.stat()
        is_shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        # In a directory with the sticky bit, such as /tmp, nobody can rename what is not theirs.
        if is_shared and not found.st_mode & stat.S_ISVTX:
            return False
        if found.st_uid not in (0, os.geteuid()):
            return False
    return True


def _is_only_ours(found: os.stat_result) -> bool:
    is_shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.geteuid() and not is_shared
