"""Answers of a tier that come when the download that asked for them has failed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gds import MemoryBackend
from offload.errors import TierError
from offload.format.digests import DigestContext
from offload.tiers.contents import Chunk
from offload.tiers.model_objects import ModelRun
from offload.tiers.range_filling import Range, RangeFilling
from tests.eventually import eventually
from tests.limits import HANG_S
from tests.threads import since

CONTEXT = DigestContext("0" * 32, 7)
DATA = b"late" * 1024


class _Objects:
    """A tier that fails for the first object, and answers late for the second."""

    url = "file:///tier"

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def get_range(self, name: str, start: int, nbytes: int, into: Any = None) -> bytes:
        del start
        if name.endswith("fails"):
            assert self.asked.wait(HANG_S)
            raise TierError(5, "broken", name)
        self.asked.set()
        assert self.answers.wait(HANG_S)
        into.memoryview()[:nbytes] = DATA
        return DATA


def test_a_late_answer_is_not_written_to_what_was_released() -> None:
    backend, objects = MemoryBackend(), _Objects()
    backend.make_dir("/a")
    file = backend.create("/a/state", 2 * len(DATA))
    chunks = [Chunk("x", i, len(DATA), CONTEXT.digest("x", i, memoryview(DATA))) for i in (0, 1)]
    ranges = [
        Range(file, i * len(DATA), name, ModelRun(0, (chunks[i],)), may_be_there=False)
        for i, name in enumerate(["fails", "late"])
    ]
    sealed = SimpleNamespace(store_id=CONTEXT.store_id, generation=CONTEXT.generation)
    copy = SimpleNamespace(folder="copy", url="file:///tier/copy")
    untyped: Any = RangeFilling
    filling: RangeFilling = untyped(objects, copy, sealed, backend, 2)
    others = threading.enumerate()
    with pytest.raises(TierError, match="broken"):
        filling.fill(ranges)
    assert len(since(others)) == 1, "a thread is left behind"
    filling.end()
    objects.answers.set()
    assert eventually(lambda: not since(others))
    assert file.read_bytes(0, 2 * len(DATA)) == bytes(2 * len(DATA))
