"""Direct or buffered for each request: what is chosen, and that both see each other's bytes."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gds import ALIGNMENT, HybridPolicy, PosixBackend, libc
from gds.backends.hybrid import Hybrid
from gds.probe import DirectIOUnavailable
from gds.testing._harness import contents, filled
from tests.contract.conftest import drop_cache, open_below

KIB, MIB = 1 << 10, 1 << 20
ROOMY = "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n"
SHORT = "MemTotal: 1000000 kB\nMemAvailable: 40000 kB\n"


def opened(meminfo: str = ROOMY, pressure: str = "", **policy: Any) -> PosixBackend:
    """Return a backend that finds so much memory, whatever this machine has."""
    texts = {"/proc/meminfo": meminfo, "/proc/pressure/memory": pressure}
    backend = PosixBackend(direct=True, hybrid=True)
    backend.hybrid = Hybrid(HybridPolicy(**policy), read_text=texts.__getitem__)
    return backend


@pytest.fixture
def backend(directory: str) -> Iterator[PosixBackend]:
    with opened() as backend:
        yield backend


def counts(backend: PosixBackend) -> dict[str, int]:
    assert backend.hybrid is not None
    return backend.hybrid.counts()


# The decision


def test_the_choice_is_what_the_kernel_is_asked(backend, directory, kernel, residency):
    file = backend.create(f"{directory}/file", 4 * MIB)
    memory = filled(backend, 4 * MIB, 1)
    kernel.start()

    def calls(move, nbytes, offset):
        del kernel.calls[:]
        move(memory.slice(offset % ALIGNMENT, nbytes), offset).result()
        assert sum(call[3] for call in kernel.calls) == nbytes
        return [is_direct for _, is_direct, _, _ in kernel.calls]

    assert calls(file.write, 4 * KIB, 0) == [False]
    assert calls(file.write, 128 * KIB - 4 * KIB, 0) == [False]
    assert calls(file.write, 128 * KIB, 0) == [True]
    assert calls(file.write, MIB, 100) == [False, True, False]
    drop_cache(file.path)
    assert calls(file.read, 4 * KIB, 3 * MIB) == [True]
    assert calls(file.read, 4 * KIB, 3 * MIB + 4 * KIB) == [False], "it goes on there"
    drop_cache(file.path)
    assert calls(file.read, 4 * KIB, 0) == [False]
    with open(file.path, "rb") as whole:
        ahead = libc.cached_bytes(whole.fileno(), 4 * MIB)
    assert 4 * KIB < ahead <= 512 * KIB, "some is read ahead, and not the whole file"
    assert calls(file.read, 100 * KIB, 100) == [False], "ends within blocks"
    assert calls(file.read, 256 * KIB, 2 * MIB + 100) == [False, True, False]
    drop_cache(file.path)
    assert calls(file.read, MIB, 0) == [True]
    Path(file.path).read_bytes()
    assert calls(file.read, MIB, 0) == [False], "it is in the page cache"
    assert calls(file.write, MIB, 0) == [True]
    drop_cache(file.path)
    assert calls(file.read, MIB, 0) == [True]
    file.close()


def test_a_small_file_has_one_descriptor_and_is_read_and_written_whole(
    backend, directory, kernel, memory_directory
):
    backend.create(f"{directory}/first", MIB).close()  # direct I/O works here
    file = backend.create(f"{directory}/small", 40_000)
    assert open_below(f"{directory}/small") == [f"{directory}/small"]
    assert file.direct
    memory = filled(backend, 40_000, 1)
    kernel.start()
    file.write(memory, 0).result()
    file.read(memory, 0).result()
    assert [call[1:] for call in kernel.calls] == [(False, 0, 40_000)] * 2
    assert contents(memory) == contents(filled(backend, 40_000, 1))
    assert counts(backend) == {"write buffered: small file": 1, "read buffered: small file": 1}
    file.close()
    with PosixBackend(hybrid=True) as elsewhere:
        with pytest.warns(DirectIOUnavailable):
            file = elsewhere.create(f"{memory_directory}/small", 4000)
        assert not file.direct


def test_what_is_read_again_is_brought_into_the_page_cache(backend, directory, residency):
    file = backend.create(f"{directory}/file", 2 * MIB)
    memory = filled(backend, 2 * MIB, 1)
    for name in ("first", "after a write"):
        file.write(memory, 0).result()
        before = counts(backend)
        for _ in range(3):
            file.read(memory.slice(0, MIB), MIB).result()
        after = counts(backend)
        new = {key: after[key] - before.get(key, 0) for key in after if key.startswith("read")}
        expected = ["read direct: large", "read buffered: read again", "read buffered: cached"]
        assert [new[key] for key in expected] == [1, 1, 1], name
        assert contents(memory)[:MIB] == contents(memory)[MIB:]
    file.close()


def test_what_is_kept_in_the_page_cache_is_bounded(directory, residency):
    # A machine with 1 GB, of which this may have 4 MB: two files of 2 MB, and not a third.
    with opened(reread_share=0.0041) as backend:
        memory = backend.allocate(2_000_000 // ALIGNMENT * ALIGNMENT)
        files = [backend.create(f"{directory}/{name}", memory.nbytes) for name in "abc"]
        for file in files:
            file.write(memory, 0).result()
            for _ in range(2):
                file.read(memory, 0).result()
        assert counts(backend)["read buffered: read again"] == 2
        files[0].close()
        files[2].read(memory, 0).result()
        assert counts(backend)["read buffered: read again"] == 3


@pytest.mark.parametrize(
    ("meminfo", "pressure", "expected"),
    [
        pytest.param(ROOMY, "some avg10=0.00 avg60=9.00 total=1\n", "small", id="enough"),
        pytest.param(ROOMY, "some avg10=10.5 avg60=0.00\n", "memory is short", id="stalls"),
        pytest.param(ROOMY, "full avg10=50.0 total=1\n", "small", id="another-line"),
        pytest.param(SHORT, "", "memory is short", id="little-available"),
        pytest.param("", "", "small", id="not-known"),
        pytest.param("MemTotal: many\n", "some avg10=much\n", "small", id="nonsense"),
    ],
)
def test_nothing_more_is_put_into_the_page_cache_if_memory_is_short(
    directory, residency, meminfo, pressure, expected
):
    with opened(meminfo, pressure) as backend:
        file = backend.create(f"{directory}/file", MIB)
        memory = backend.allocate(4 * KIB)
        file.write(memory, 0).result()
        drop_cache(file.path)
        file.read(memory, 0).result()
        mode = "direct" if expected == "memory is short" else "buffered"
        assert counts(backend) == {f"{way} {mode}: {expected}": 1 for way in ("write", "read")}
        Path(file.path).read_bytes()
        file.read(memory, 0).result()
        assert counts(backend)["read buffered: cached"] == 1, "what is there already is taken"


# Both modes on one file


def test_both_modes_at_once_beside_each_other_lose_nothing(directory, kernel):
    lock, active, num_calls = threading.Lock(), [0, 0], [0, 0]

    def answer(name, real, fd, view, offset):
        mode = kernel.is_direct(fd)
        with lock:
            active[mode] += 1
            num_calls[mode] += 1
            assert not (active[0] and active[1]), "a direct write beside a buffered one"
        moved: int = real(fd, [view], offset)
        with lock:
            active[mode] -= 1
        return moved

    kernel.start(answer)
    # Large folios of the page cache span the ranges of both: a read of all of it makes them.
    backend = PosixBackend(direct=True, hybrid=True, read_threads=2, write_threads=4)
    nbytes, num_rounds = 256 * KIB, 8
    file = backend.create(f"{directory}/file", 8 * nbytes)
    for number in range(num_rounds):
        Path(file.path).read_bytes()
        large, small = filled(backend, nbytes, number), filled(backend, 4 * KIB, -1 - number)
        writes = []
        for place in range(8):
            if place % 2:
                writes.append(file.write(large, place * nbytes))
            else:
                edge = (place + 1) * nbytes - 4 * KIB
                writes += [file.write(small, edge), file.write(small, place * nbytes)]
        for write in writes:
            write.result()
        file.sync()  # a page that could not be dropped would be an error here
        data = Path(file.path).read_bytes()
        for place in range(8):
            start = place * nbytes
            if place % 2:
                assert data[start : start + nbytes] == contents(large)
            else:
                for edge in (start, start + nbytes - 4 * KIB):
                    assert data[edge : edge + 4 * KIB] == contents(small)
    assert min(num_calls) >= num_rounds, "both modes were used"
    backend.close()


def test_a_write_that_fails_opens_the_gate(backend, directory, kernel):
    file = backend.create(f"{directory}/file", MIB)

    def fail(*_):
        raise OSError(5, "Input/output error")

    kernel.start(fail)
    for nbytes in (4 * KIB, MIB):
        with pytest.raises(OSError, match="Input/output"):
            file.write(backend.allocate(nbytes), 0).result()
    kernel.start()
    for nbytes in (4 * KIB, MIB, 4 * KIB):
        assert file.write(backend.allocate(nbytes), 0).result(60) == nbytes
    file.close()
