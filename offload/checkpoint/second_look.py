"""A second read before a verdict: what was read and is wrong may only have been read wrong.

A cable, the memory of the host or a drive can change a bit on the way, while what is stored is
whole. So nothing is called damaged after one read. The range is read once more, from the device,
by the way that the first read did not take, and into other memory. If that is right, work goes on
with it, and the log says which read was wrong. Only if both are wrong the content is damaged.

Does not import torch.
"""

from __future__ import annotations

import errno
import hashlib
import logging
from collections.abc import Callable
from typing import TypeVar

from gds import File
from gds.buffers.host import HostBuffer
from offload.errors import DamagedError, UnreliableReadError

_log = logging.getLogger("offload")

_T = TypeVar("_T")

_ADVICE = (
    "the drive holds what was written; look at the memory, the cables and the drive of this machine"
)


def look_again(
    file: File,
    offset: int,
    nbytes: int,
    digest: Callable[[memoryview], str],
    *,
    found: str,
    expected: str,
    direct: bool | None = None,
) -> HostBuffer:
    """Read a range once more whose digest is not what it should be.

    Args:
        file: Which was read.
        offset: Of the range, in bytes.
        nbytes: Its length.
        digest: Returns the digest of its bytes.
        found: What the digest of the first read is.
        expected: What the digest should be.
        direct: Whether the second read is to bypass the page cache; None for what `File.read` did
            not do.

    Returns:
        Memory with the right bytes. What read them wrong has been logged.

    Raises:
        DamagedError: They are wrong again.
        gds.StorageError: They cannot be read again.
    """
    again = _read_again(file, offset, nbytes, direct=not file.direct if direct is None else direct)
    second = digest(again.memoryview())
    if second != expected:
        raise DamagedError(
            f"{file.path}: bytes {offset} to {offset + nbytes} are damaged: their digest is "
            f"{found}, expected {expected}"
            f"{'' if second == found else f'; of a second read it is {second}'}"
        )
    _log.warning(
        "%s: bytes %d to %d: one read returned something else (digest %s) than a second one "
        "(digest %s, as expected): %s",
        file.path,
        offset,
        offset + nbytes,
        found,
        expected,
        _ADVICE,
    )
    return again


def read_document(
    file: File, nbytes: int, parse: Callable[[bytes], _T], refused: type[Exception]
) -> _T:
    """Read the start of a file and parse it; what is refused is read and parsed once more.

    Args:
        file: Read through the page cache.
        nbytes: How much of it.
        parse: Called with the bytes; what it returns is returned.
        refused: What `parse` raises where the bytes are not what was written.

    Raises:
        gds.StorageError: The file cannot be read.
        Exception: `refused`: both reads are wrong; and what else `parse` raises.
    """
    data = file.read_bytes(0, nbytes)
    try:
        return parse(data)
    except refused as error:
        first = error
    again = bytes(_read_again(file, 0, nbytes, direct=True).memoryview())
    if again == data:
        raise first
    try:
        parsed = parse(again)
    except refused:
        raise first from None
    _log.warning(
        "%s: one read returned something else (BLAKE2b %s) than a second one (%s), which is valid: "
        "%s",
        file.path,
        _digest(data),
        _digest(again),
        _ADVICE,
    )
    return parsed


def unreliable(file: File, offset: int, nbytes: int) -> UnreliableReadError:
    """Return the error for a range that is right on the drive and does not arrive in memory."""
    return UnreliableReadError(
        errno.EIO,
        f"bytes {offset} to {offset + nbytes} were read three times, and only one read was right: "
        f"{_ADVICE}",
        file.path,
    )


def _read_again(file: File, offset: int, nbytes: int, *, direct: bool) -> HostBuffer:
    # As aligned in memory as in the file: its whole blocks can bypass the page cache.
    before = offset % file.alignment
    buffer = HostBuffer(before + nbytes).slice(before, nbytes)
    file.read_again(buffer, offset, direct=direct).result()
    return buffer


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
