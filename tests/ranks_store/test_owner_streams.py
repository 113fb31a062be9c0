"""The streamer writes and reads an owner's part as it does a slot."""

from __future__ import annotations

import pytest
import torch

from gds import MemoryBackend
from offload.checkpoint.owner_parts import read_table
from offload.errors import DamagedError
from offload.format.layout import array_file_name
from offload.store.owners.claims import NamedParts
from offload.store.owners.slot import OwnerSlot
from offload.stream.meter import Meter
from offload.stream.passes import RingPass, ring_for_one_pass
from offload.stream.state_check import check_state
from tests.ranks_store.job import LAYOUTS, SCALARS, TWO, Job, values, wrong_chunks
from tests.stores.files import overwrite, read

LAYOUT = LAYOUTS[1]
CHUNKS = range(LAYOUT.num_chunks)


def stream(backend: MemoryBackend, part: OwnerSlot, step: int) -> None:
    """Write all chunks through the ring, as a pass does."""
    with ring_for_one_pass(backend, LAYOUT) as ring:
        writing = RingPass(ring, source=None, target=part)
        writing.announce(CHUNKS)
        for chunk in CHUNKS:
            with writing.taken(chunk) as frame:
                for name in LAYOUT.array_names:
                    into = frame.bytes_of(LAYOUT.plans[chunk], name)
                    data = values(step, 1, name, chunk, len(into))
                    into.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        ring.flush().start(part)


def check(backend: MemoryBackend, part: OwnerSlot) -> int:
    """Read all chunks through the ring, and compare them with their digests."""
    with ring_for_one_pass(backend, LAYOUT) as ring:
        return check_state(ring, part, CHUNKS, Meter())


def test_what_is_streamed_is_sealed_found_and_checked() -> None:
    one, two = MemoryBackend(), MemoryBackend()
    with Job([one, two]) as job:
        slots = job.grant()
        job.write(slots, 1)
        stream(two, slots[1], 1)
        job.publish(job.prepare(slots, 1))
        assert wrong_chunks(slots[1], 1, 1) == []
    with Job([one.reopened(), two_again := two.reopened()]) as job:
        assert job.wrong() == []
        newest = job.store.newest
        assert newest is not None
        part = job.owner.open(newest.manifest.owners[0], newest.manifest)
        assert part.unchecked
        assert check(two_again, part) == LAYOUT.state_bytes
        assert not part.unchecked


def test_a_damaged_chunk_is_found_by_the_stream_and_marked() -> None:
    one, two = MemoryBackend(), MemoryBackend()
    with Job([one, two], keep=2) as job:
        job.seal(1)
        job.seal(2)
        assert job.source is not None
        path = f"{job.source.path}/{array_file_name('exp_avg')}"
    data = bytearray(read(two, path))
    data[-9] ^= 4
    two = two.reopened()
    overwrite(two, path, bytes(data))
    one = one.reopened()
    with Job([one, two], keep=2) as job:
        newest = job.store.newest
        assert newest is not None
        part = job.owner.open(newest.manifest.owners[0], newest.manifest)
        with pytest.raises(DamagedError, match="exp_avg") as found:
            check(two, part)
        job.owner.quarantine(part, str(found.value))
    with Job([one.reopened(), two.reopened()], keep=2) as job:
        assert job.newest == 1
        assert job.wrong() == []
        assert job.seal(3).manifest.step == 3


def test_scalars_and_boxes_come_back() -> None:
    two = MemoryBackend()
    with Job([MemoryBackend(), two]) as job:
        job.seal(1)
        newest = job.store.newest
        assert newest is not None
        assert job.store.named_parts() == NamedParts({1: frozenset({"part-1"})})
        part = job.owner.open(newest.manifest.owners[0], newest.manifest)
        assert part.layout == LAYOUT
        assert [p.cut for p in part.layout.parameters] == [p.cut for p in LAYOUT.parameters]
        assert part.path.startswith(f"{TWO}/owner-1/")
        assert read_table(two, part.path, newest.manifest).scalars == SCALARS[1]
