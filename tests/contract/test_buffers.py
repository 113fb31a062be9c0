"""Host memory: how it is aligned, backed, shared with torch, inherited, lent and given back."""

import gc
import os
import re
from pathlib import Path

import pytest
import torch

from gds import ALIGNMENT
from gds.buffers import BufferPool, HostBuffer
from gds.buffers.host import HUGE_PAGE_BYTES

MIB = 1 << 20
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapping_of(address: int) -> dict[str, str]:
    """Return what the kernel says of the mapping that holds `address`; empty if there is none."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(header[1], 16) <= address < int(header[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            found[name] = value
    return found


def mapped_bytes(address: int) -> int:
    """Return the size of the mapping that holds `address`, and 0 if there is none."""
    return int(mapping_of(address).get("Size", "0 kB").split()[0]) << 10


def test_large_buffers_are_aligned_to_huge_pages_and_advised_to_be_on_them():
    for nbytes in (HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 5 * MIB):
        assert HostBuffer(nbytes).address % HUGE_PAGE_BYTES == 0
    if not THP.exists() or "[never]" in THP.read_text():
        pytest.skip("the kernel gives no transparent huge pages")
    buffer = HostBuffer(16 * MIB)
    assert "hg" in mapping_of(buffer.address)["VmFlags"].split(), "huge pages were not asked for"


def test_a_torch_tensor_over_the_memory_is_writable_and_keeps_it_alive():
    buffer = HostBuffer(4 * ALIGNMENT)
    part = buffer.slice(ALIGNMENT, ALIGNMENT)
    tensor = torch.frombuffer(part.memoryview(), dtype=torch.uint8).view(torch.float32)
    assert tensor.data_ptr() == part.address
    tensor.fill_(1.5)
    assert bytes(part.memoryview()[:4]) == b"\x00\x00\xc0\x3f"
    address = buffer.address
    del buffer, part
    gc.collect()
    assert mapped_bytes(address)
    assert tensor.sum().item() == 1.5 * ALIGNMENT / 4


@pytest.mark.parametrize("last", ["slice", "tensor"])
def test_memory_is_given_back_with_the_last_reference(last):
    # Far larger than anything else, so that no other mapping takes its address meanwhile.
    nbytes = 512 * MIB
    buffer = HostBuffer(nbytes)
    refs: dict[str, object] = {
        "buffer": buffer,
        "slice": buffer.slice(10, 10),
        "view": buffer.memoryview(),
        "tensor": torch.frombuffer(buffer.memoryview(), dtype=torch.uint8),
    }
    address = buffer.address
    del buffer
    for name in [name for name in refs if name != last]:
        del refs[name]
    assert mapped_bytes(address) >= nbytes
    refs.clear()
    gc.collect()
    assert mapped_bytes(address) < nbytes


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="-1"):
        HostBuffer(-1)
    with pytest.raises(MemoryError, match="I/O buffer"):
        HostBuffer(1 << 60)
    for nbytes, num_buffers in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ValueError, match="at least one buffer"):
            BufferPool(HostBuffer, nbytes, num_buffers)


def test_a_forked_child_sees_zeros_and_its_parent_keeps_the_contents():
    buffer = HostBuffer(ALIGNMENT)
    view = buffer.memoryview()
    view[:3] = b"abc"
    child = os.fork()
    if child == 0:
        os._exit(0 if bytes(view) == bytes(ALIGNMENT) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert bytes(view[:3]) == b"abc"


# Pools


def test_buffers_of_a_pool_are_made_when_needed_and_used_again():
    made: list[int] = []
    pool = BufferPool(lambda nbytes: made.append(nbytes) or HostBuffer(nbytes), 100, 2)
    assert made == []
    with pool.borrowed() as first:
        assert first.nbytes == 100
    with pool.borrowed() as second, pool.borrowed() as third:
        assert second is first
        assert third is not first
    assert made == [100, 100]
    pool.resize(1)
    pool.clear()
    with pool.borrowed() as fourth:
        assert fourth not in (first, third)


def test_a_larger_pool_lets_waiters_in_and_a_smaller_one_drops_what_comes_back():
    pool = BufferPool(HostBuffer, 100, 1)
    with pool.borrowed() as first:
        pool.resize(2)
        with pool.borrowed() as second:
            pool.resize(1)
    with pool.borrowed() as third:
        assert third is first
        assert third is not second


def test_memory_that_could_not_be_had_is_asked_for_again_by_the_next_borrower():
    """Or it would count as lent for ever, and everybody would wait for it."""
    answers = [MemoryError("none is left"), HostBuffer(100)]

    def allocate(_: int) -> HostBuffer:
        answer = answers.pop(0)
        if isinstance(answer, MemoryError):
            raise answer
        return answer

    pool = BufferPool(allocate, 100, 1)
    with pytest.raises(MemoryError, match="none is left"), pool.borrowed():
        pass
    with pool.borrowed() as second:
        assert second.nbytes == 100
