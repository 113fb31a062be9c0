"""Ctrl-C at each moment in which a file is opened or made: its descriptor is closed once."""

import os
import sys

import pytest

from gds import ALIGNMENT, PosixBackend
from tests.fuzz.interrupts import interrupted


def test_an_interrupt_while_a_file_is_opened_closes_no_descriptor_twice(tmp_path, monkeypatch):
    failed, closed_twice = [], []
    close = os.close

    def watched(fd):
        try:
            close(fd)
        except OSError:
            closed_twice.append(fd)
            raise

    monkeypatch.setattr(os, "close", watched)
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: failed.append(raised.exc_value))
    backend = PosixBackend()
    backend.create(f"{tmp_path}/there", ALIGNMENT).close()
    for action in (
        lambda at: backend.create(f"{tmp_path}/new-{at}", ALIGNMENT),
        lambda _: backend.open(f"{tmp_path}/there"),
    ):
        moments = 0
        for at in range(1, 1000):
            try:
                with interrupted(at) as fired:
                    action(at).close()
            except KeyboardInterrupt:
                moments += 1
            if not fired:
                break
        assert not fired, "the last call has ended without an interrupt"
        assert moments > 20
    backend.close()
    assert closed_twice == []
    assert all(isinstance(error, KeyboardInterrupt) for error in failed)


@pytest.mark.parametrize("times", [1, 2])
def test_a_descriptor_is_closed_once(times):
    from gds.backends.transfer import OpenDescriptor

    fd = os.open(os.devnull, os.O_RDONLY)
    descriptor = OpenDescriptor(fd)
    for _ in range(times):
        descriptor.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
