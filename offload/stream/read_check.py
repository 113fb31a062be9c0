"""Comparison of a chunk that was read with its digests."""

from __future__ import annotations

from functools import partial

from offload.checkpoint.sealed_slot import SlotFiles
from offload.checkpoint.second_read import reread_and_check, unreliable
from offload.format.digests import one_by_one
from offload.stream.frame import Frame


def check_read(frame: Frame, source: SlotFiles) -> None:
    """Compare a chunk that was read with its digests.

    If an array differs, it is read a second time, into other host memory, to find out whether the
    drive has the right bytes. If it does, the frame is filled again, and the caller goes on.
    """
    if not frame.futures:
        return  # nothing was read: the chunk has never been written
    for name in source.layout.array_names:
        expected = source.digests[name][frame.chunk]
        if expected is None:
            continue
        found = _digest_of(frame, source, name)
        if found != expected:
            _look_again(frame, source, name, found, expected)


def _look_again(frame: Frame, source: SlotFiles, name: str, found: str, expected: str) -> None:
    """Read a chunk of an array again; if the drive has it intact, fill the frame again."""
    chunk, file = frame.chunk, source.array(name, frame.chunk)
    buffer, offset = frame.buffer(source.layout.plans[chunk], name)
    digest = partial(source.context.digest, name, chunk)
    reread_and_check(file, offset, buffer.nbytes, digest, found=found, expected=expected)
    file.read_again(buffer, offset, direct=not file.direct).result()
    if _digest_of(frame, source, name) != expected:
        raise unreliable(file, offset, buffer.nbytes)


def _digest_of(frame: Frame, source: SlotFiles, name: str) -> str:
    """Return the digest of a frame's content of one state array, computed on the frame's device."""
    plan = source.layout.plans[frame.chunk]
    digests = frame.digests_of({name: frame.bytes_of(plan, name)})
    return digests.finish(source.context, frame.chunk, one_by_one)[name]
