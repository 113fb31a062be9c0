"""Second reads before a verdict of damage, because the first read may have gone wrong.

A cable, the memory of the host or a drive can change a bit during a read, while the stored data is
intact. So no data is called damaged after one read. The range is read once more from the device,
into other memory. The second read bypasses the page cache if the first one used it, and uses it
otherwise. If the second read is right, its data is used, and the log reports the wrong read. The
content is damaged only if both reads are wrong.

This module does not import torch.
"""

from __future__ import annotations

import errno
import hashlib
import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from gds import File
from gds.buffers.host import HostBuffer
from offload.checkpoint.sealed_slot import SealedRange
from offload.errors import DamagedError, UnreliableReadError
from offload.format.digests import DigestContext, leaf_digests

_log = logging.getLogger("offload")

_T = TypeVar("_T")

_ADVICE = (
    "the data on the drive is correct; check the memory, the cables and the drive of this machine"
)


def reread_and_check(
    file: File,
    offset: int,
    nbytes: int,
    digest: Callable[[memoryview], str],
    *,
    found: str,
    expected: str,
    direct: bool | None = None,
) -> HostBuffer:
    """Read a range once more because its digest is wrong.

    Args:
        file: File that was read.
        offset: Start of the range, in bytes.
        nbytes: Length of the range, in bytes.
        digest: Function that returns the digest of the range's bytes.
        found: Digest of the bytes of the first read.
        expected: Digest that the bytes should have.
        direct: Whether the second read bypasses the page cache; None for the opposite of what
            `File.read` did.

    Returns:
        Memory with the right bytes. The log has an entry about the wrong read.

    Raises:
        DamagedError: The bytes are wrong again.
        gds.StorageError: The bytes cannot be read again.
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
        "%s: bytes %d to %d: one read returned other data (digest %s) than a second one (digest "
        "%s, as expected): %s",
        file.path,
        offset,
        offset + nbytes,
        found,
        expected,
        _ADVICE,
    )
    return again


def checked(
    file: File,
    sealed: SealedRange,
    data: memoryview,
    context: DigestContext,
    *,
    direct: bool | None = None,
) -> tuple[memoryview, bytes]:
    """Compare a range that was read with its digest; read it once more if it differs.

    Args:
        file: File that was read.
        sealed: The range.
        data: Bytes of the first read.
        context: Store and generation that the digest is bound to.
        direct: As for `reread_and_check`.

    Returns:
        The right bytes, which are `data` or those of the second read, and the digests of their
        leaves.

    Raises:
        DamagedError: The bytes of both reads are wrong.
        gds.StorageError: The bytes cannot be read again.
    """
    leaves = leaf_digests(data)
    found = context.digest_leaves(sealed.array, sealed.index, leaves)
    if found != sealed.digest:
        digest = partial(context.digest, sealed.array, sealed.index)
        data = reread_and_check(
            file,
            sealed.offset,
            sealed.nbytes,
            digest,
            found=found,
            expected=sealed.digest,
            direct=direct,
        ).memoryview()
        leaves = leaf_digests(data)
    return data, leaves


def read_document(
    file: File, nbytes: int, parse: Callable[[bytes], _T], refused: type[Exception]
) -> _T:
    """Read the start of a file and parse it. If the parser refuses it, read and parse it once more.

    Args:
        file: File to read, through the page cache.
        nbytes: Number of bytes to read.
        parse: Function that is called with the bytes; its result is returned.
        refused: Type of the error that `parse` raises if the bytes are not what was written.

    Raises:
        gds.StorageError: The file cannot be read.
        Exception: An error of type `refused` if both reads are wrong, or another error of `parse`.
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
        "%s: one read returned other data (BLAKE2b %s) than a second one (%s), which is valid: %s",
        file.path,
        _digest(data),
        _digest(again),
        _ADVICE,
    )
    return parsed


def unreliable(file: File, offset: int, nbytes: int) -> UnreliableReadError:
    """Return the error for a range that is right on the drive but often wrong in memory."""
    return UnreliableReadError(
        errno.EIO,
        f"bytes {offset} to {offset + nbytes} were read three times, and only one read was right: "
        f"{_ADVICE}",
        file.path,
    )


def _read_again(file: File, offset: int, nbytes: int, *, direct: bool) -> HostBuffer:
    # The memory is aligned like the range in the file, so that whole blocks can bypass the page
    # cache.
    before = offset % file.alignment
    buffer = HostBuffer(before + nbytes).slice(before, nbytes)
    file.read_again(buffer, offset, direct=direct).result()
    return buffer


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
