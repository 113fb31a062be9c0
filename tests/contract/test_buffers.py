"""Host memory: how it is aligned, backed, shared with torch, inherited and given back."""

import ctypes
import gc
import mmap
import os
import re
from pathlib import Path

import pytest
import torch

from gds.buffers.host import HUGE_PAGE_BYTES, HostBuffer
from gds.contract import ALIGNMENT

MIB = 1 << 20
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapping_of(address: int) -> dict[str, int] | None:
    """Return the sizes in bytes that the kernel reports for the mapping that holds `address`."""
    found: dict[str, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            if found is not None:
                return found
            if int(header[1], 16) <= address < int(header[2], 16):
                found = {}
        elif found is not None and (field := re.match(r"(\w+): +(\d+) kB", line)):
            found[field[1]] = int(field[2]) << 10
    return found


@pytest.mark.parametrize("nbytes", [HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 5 * MIB])
def test_large_buffers_are_aligned_to_a_huge_page(nbytes):
    assert [HostBuffer(nbytes).address % HUGE_PAGE_BYTES for _ in range(3)] == [0, 0, 0]


def test_large_buffers_are_on_huge_pages():
    if not THP.exists() or "[never]" in THP.read_text():
        pytest.skip("the kernel gives no transparent huge pages")
    buffer = HostBuffer(16 * MIB)
    buffer.memoryview()[::ALIGNMENT] = bytes(16 * MIB // ALIGNMENT)
    # Half, because a kernel short of contiguous memory gives fewer; without the advice it is 0.
    if huge_bytes(buffer.address) < 8 * MIB:
        advised = mmap.mmap(-1, 18 * MIB)
        advised.madvise(mmap.MADV_HUGEPAGE)
        advised[::ALIGNMENT] = bytes(18 * MIB // ALIGNMENT)
        given = huge_bytes(ctypes.addressof(ctypes.c_char.from_buffer(advised)))
        if given < 8 * MIB:
            pytest.skip(f"the kernel has no contiguous memory: {given} bytes for others, either")
        pytest.fail("the kernel gives others huge pages")


def huge_bytes(address: int) -> int:
    sizes = mapping_of(address)
    assert sizes is not None
    return sizes["AnonHugePages"]


def anonymous_bytes():
    """Return how much memory this process has that is no file's, in RAM or swapped out."""
    status = Path("/proc/self/status").read_text()
    return sum(int(kib) << 10 for kib in re.findall(r"(?:RssAnon|VmSwap):\s+(\d+) kB", status))


def test_memory_in_use_is_no_more_than_asked_for():
    # A huge page for the last, partial 2 MiB would exceed it, in those buffers where it fits.
    if THP.exists() and "[always]" in THP.read_text():
        pytest.skip("the system gives huge pages unasked")
    nbytes, num_buffers = HUGE_PAGE_BYTES + ALIGNMENT, 32
    gc.collect()  # or what earlier tests have left may go meanwhile
    before = anonymous_bytes()
    buffers = [HostBuffer(nbytes) for _ in range(num_buffers)]
    for buffer in buffers:
        buffer.memoryview()[:] = b"x" * nbytes
    grown = anonymous_bytes() - before
    asked = num_buffers * nbytes
    assert asked - 4 * MIB <= grown <= asked + 8 * MIB


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
    assert mapping_of(address) is not None
    assert tensor.sum().item() == 1.5 * ALIGNMENT / 4


@pytest.mark.parametrize("last", ["buffer", "slice", "view", "tensor"])
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
    sizes = mapping_of(address)
    assert sizes is not None
    assert sizes["Size"] >= nbytes
    refs.clear()
    gc.collect()
    sizes = mapping_of(address)
    assert sizes is None or sizes["Size"] < nbytes


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="-1"):
        HostBuffer(-1)


def test_more_than_the_address_space_is_a_memory_error():
    with pytest.raises(MemoryError, match="I/O buffer"):
        HostBuffer(1 << 60)


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
