"""Direct or buffered for each request: what is chosen, and that both see each other's bytes."""

import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gds import ALIGNMENT, Backend, PosixBackend, libc
from gds.backends.hybrid import Choice, Hybrid, HybridPolicy, WriteGate, choose
from gds.probe import DirectIOUnavailable, direct_io
from gds.testing import BackendContract
from gds.testing._harness import contents, filled
from tests.contract.conftest import Kernel, open_below

KIB, MIB = 1 << 10, 1 << 20
POLICY = HybridPolicy()
ROOMY = "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n"


@pytest.fixture
def backend(directory: str) -> Iterator[PosixBackend]:
    """One that finds memory enough, however short this machine is of it."""
    backend = PosixBackend(direct=True, hybrid=True)
    backend.hybrid = Hybrid(POLICY, read_text=lambda _: ROOMY)
    yield backend
    backend.close()


def counts(backend: PosixBackend) -> dict[str, int]:
    assert backend.hybrid is not None
    return backend.hybrid.counts()


@pytest.fixture
def residency(directory: str) -> None:
    path = Path(directory, "known")
    path.write_bytes(bytes(ALIGNMENT))
    fd = os.open(path, os.O_RDONLY)
    known = libc.cached_bytes(fd, ALIGNMENT)
    os.close(fd)
    path.unlink()
    if known is None:
        pytest.skip("this kernel does not say what its page cache holds")


def drop_cache(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    # A page that the kernel is looking at just then, or is still reading ahead, is not dropped.
    deadline = time.monotonic() + 60
    while True:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if not libc.cached_bytes(fd, os.fstat(fd).st_size) or time.monotonic() > deadline:
            break
        time.sleep(0.001)
    os.close(fd)


class TestHybrid(BackendContract):
    policy = HybridPolicy()
    request_bytes: int | None = None

    @pytest.fixture
    def directory(self, tmp_path: Path) -> str:
        return str(tmp_path)

    @pytest.fixture
    def backend(self, directory: str) -> Iterator[Backend]:
        if not (found := direct_io(directory)).supported:
            pytest.skip(f"no direct I/O in {directory}: {found.reason}")
        backend = PosixBackend(direct=True, hybrid=self.policy, request_bytes=self.request_bytes)
        yield backend
        backend.close()

    def reopened(self, backend: Backend) -> Backend:
        return PosixBackend(direct=True, hybrid=self.policy, request_bytes=self.request_bytes)

    def raw(self, backend: Backend, path: str) -> bytes:
        return Path(path).read_bytes()

    def make_symlink(self, target: str, path: str) -> None:
        Path(path).symlink_to(target)

    def make_hard_link(self, backend: Backend, target: str, path: str) -> None:
        Path(path).hardlink_to(target)


class TestHybridOfBothModes(TestHybrid):
    """Limits within the sizes of the contract's requests, so that they mix on every file."""

    policy = HybridPolicy(
        write_bytes=3 * ALIGNMENT, read_bytes=2 * ALIGNMENT, unaligned_bytes=4 * ALIGNMENT
    )
    request_bytes = 4 * ALIGNMENT


# The decision.

CASES: dict[str, tuple[str, int, dict[str, Any], Choice]] = {
    "large-write": ("write", 128 * KIB, {}, Choice("direct", "large")),
    "small-write": ("write", 128 * KIB - 1, {}, Choice("buffered", "small")),
    "small-write-no-memory": (
        "write",
        4 * KIB,
        {"pressed": True},
        Choice("direct", "memory is short"),
    ),
    "large-read": ("read", MIB, {}, Choice("direct", "large")),
    "cached-read": ("read", MIB, {"cached": True}, Choice("buffered", "cached")),
    "cached-read-no-memory": (
        "read",
        MIB,
        {"cached": True, "pressed": True},
        Choice("buffered", "cached"),
    ),
    "small-read-in-order": ("read", 4 * KIB, {"continues": True}, Choice("buffered", "small")),
    "small-read-anywhere": ("read", 4 * KIB, {}, Choice("direct", "random")),
    "small-read-no-memory": (
        "read",
        4 * KIB,
        {"continues": True, "pressed": True},
        Choice("direct", "memory is short"),
    ),
    "unaligned-read": ("read", 128 * KIB - 1, {"partial": True}, Choice("buffered", "unaligned")),
    "large-unaligned-read": ("read", 128 * KIB + 1, {"partial": True}, Choice("direct", "large")),
    "read-again": ("read", MIB, {"is_reread": True}, Choice("buffered", "read again")),
    "read-again-no-memory": (
        "read",
        MIB,
        {"is_reread": True, "pressed": True},
        Choice("direct", "memory is short"),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_choice(case: tuple[Any, int, dict[str, Any], Choice]) -> None:
    direction, nbytes, given, expected = case
    facts: dict[str, Any] = {
        "partial": False,
        "continues": False,
        "is_reread": False,
        "cached": False,
        "pressed": False,
    }
    assert choose(POLICY, direction, nbytes, **(facts | given)) == expected


def test_the_choice_is_what_the_kernel_is_asked(
    backend: PosixBackend, directory: str, kernel: Kernel, residency: None
) -> None:
    file = backend.create(f"{directory}/file", 4 * MIB)
    memory = filled(backend, 4 * MIB, 1)
    kernel.start()

    def calls(move: Callable[..., Any], nbytes: int, offset: int) -> list[bool]:
        del kernel.calls[:]
        move(memory.slice(offset % ALIGNMENT, nbytes), offset).result()
        assert sum(call[3] for call in kernel.calls) == nbytes
        return [is_direct for _, is_direct, _, _ in kernel.calls]

    assert calls(file.write, 4 * KIB, 0) == [False]
    assert calls(file.write, MIB, 0) == [True]
    assert calls(file.write, MIB, 100) == [False, True, False]
    drop_cache(file.path)
    assert calls(file.read, 4 * KIB, 3 * MIB) == [True]
    assert calls(file.read, 4 * KIB, 3 * MIB + 4 * KIB) == [False], "it goes on there"
    assert calls(file.read, 100 * KIB, 100) == [False]
    assert calls(file.read, 256 * KIB, 2 * MIB + 100) == [False, True, False]
    drop_cache(file.path)
    assert calls(file.read, MIB, 0) == [True]
    Path(file.path).read_bytes()
    assert calls(file.read, MIB, 0) == [False], "it is in the page cache"
    assert calls(file.write, MIB, 0) == [True]
    drop_cache(file.path)
    assert calls(file.read, MIB, 0) == [True]
    file.close()


def test_a_read_that_is_cached_in_part_goes_to_the_drive(
    backend: PosixBackend, directory: str, residency: None
) -> None:
    file = backend.create(f"{directory}/file", 2 * MIB)
    memory = filled(backend, 2 * MIB, 1)
    file.write(memory, 0).result()
    for cached, expected in ((MIB, "direct: large"), (2 * MIB, "buffered: cached")):
        drop_cache(file.path)
        with open(file.path, "rb", buffering=0) as whole:
            os.posix_fadvise(whole.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no further
            assert len(whole.read(cached)) == cached
        before = counts(backend).get(f"read {expected}", 0)
        file.read(memory, 0).result()
        assert counts(backend)[f"read {expected}"] == before + 1
    file.close()


def test_small_reads_in_order_are_read_ahead_and_large_ones_are_not(
    backend: PosixBackend, directory: str, residency: None
) -> None:
    file = backend.create(f"{directory}/file", 4 * MIB)
    memory = filled(backend, 4 * MIB, 1)
    file.write(memory, 0).result()
    fd = os.open(file.path, os.O_RDONLY)
    for nbytes in (4 * KIB, MIB):
        drop_cache(file.path)
        file.read(memory.slice(0, nbytes), 0).result()
        cached = libc.cached_bytes(fd, 4 * MIB)
        assert cached is not None
        assert (cached > 4 * KIB) == (nbytes == 4 * KIB)
        assert cached <= 512 * KIB
    os.close(fd)
    file.close()


def test_what_has_left_the_page_cache_is_noticed_soon(
    backend: PosixBackend, directory: str, kernel: Kernel, residency: None
) -> None:
    file = backend.create(f"{directory}/file", 16 * MIB)
    memory = filled(backend, MIB, 1)
    for number in range(16):
        file.write(memory, number * MIB).result()
    Path(file.path).read_bytes()
    kernel.start()
    for number in range(16):
        if number == 9:
            drop_cache(file.path)
            del kernel.calls[:]
        file.read(memory, number * MIB).result()
    assert [call[1] for call in kernel.calls].index(True) < 4
    assert all(call[1] for call in kernel.calls[4:])
    file.close()


def test_a_small_file_has_one_descriptor_and_is_read_and_written_whole(
    backend: PosixBackend, directory: str, kernel: Kernel
) -> None:
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


def test_a_small_file_without_direct_io_does_not_claim_it(memory_directory: str) -> None:
    backend = PosixBackend(hybrid=True)
    with pytest.warns(DirectIOUnavailable):
        file = backend.create(f"{memory_directory}/small", 4000)
    assert not file.direct
    file.close()
    backend.close()


def test_what_is_read_again_is_brought_into_the_page_cache(
    backend: PosixBackend, directory: str, residency: None
) -> None:
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


def test_what_is_kept_in_the_page_cache_is_bounded(directory: str, residency: None) -> None:
    # A machine with 1 GB, of which this may have 4 MB: two files of 2 MB, and not a third.
    backend = PosixBackend(direct=True, hybrid=HybridPolicy(reread_share=0.0041))
    backend.hybrid = Hybrid(backend.hybrid.policy, read_text=lambda _: ROOMY)  # type: ignore[union-attr]
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
    backend.close()


# Memory.


@pytest.mark.parametrize(
    ("meminfo", "pressure", "pressed"),
    [
        pytest.param(ROOMY, "some avg10=0.00 avg60=9.00 total=1\n", False, id="enough"),
        pytest.param(ROOMY, "some avg10=10.5 avg60=0.00 total=1\n", True, id="stalls"),
        pytest.param(ROOMY, "full avg10=50.0 total=1\n", False, id="another-line"),
        pytest.param(
            "MemTotal: 1000000 kB\nMemAvailable: 40000 kB\n", "", True, id="little-available"
        ),
        pytest.param("", "", False, id="not-known"),
        pytest.param("MemTotal: many\n", "some avg10=much\n", False, id="nonsense"),
    ],
)
def test_memory_is_short(meminfo: str, pressure: str, pressed: bool) -> None:
    texts = {"/proc/meminfo": meminfo, "/proc/pressure/memory": pressure}
    assert Hybrid(read_text=texts.__getitem__).pressed() is pressed


def test_memory_is_looked_at_once_a_second() -> None:
    now = [100.0]
    looked: list[str] = []

    def read(path: str) -> str:
        looked.append(path)
        return ""

    hybrid = Hybrid(read_text=read, clock=lambda: now[0])
    for _ in range(5):
        hybrid.pressed()
    assert len(looked) == 2
    now[0] += 1.0
    hybrid.pressed()
    assert len(looked) == 4


def test_this_machine_tells_its_memory() -> None:
    hybrid = Hybrid()
    hybrid.pressed()
    physical = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    assert hybrid.claim_memory(physical // 8)
    assert not hybrid.claim_memory(physical)


def test_direct_and_hybrid_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="direct=False"):
        PosixBackend(direct=False, hybrid=True)


# Both modes on one file.


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_both_modes_moves_the_right_bytes(
    backend: PosixBackend, directory: str, seed: int
) -> None:
    draw = random.Random(seed)
    size = 3 * MIB + 777
    file = backend.create(f"{directory}/file", size)
    model = bytearray(size)
    memory = filled(backend, 2 * MIB, seed)
    for number in range(60):
        step = draw.choice([1, 512, ALIGNMENT, ALIGNMENT])
        offset = draw.randrange(size) // step * step
        nbytes = min(draw.choice([100, 4 * KIB, 60 * KIB, 200 * KIB, MIB, 2 * MIB]), size - offset)
        part = memory.slice(0, nbytes)
        if draw.random() < 0.5:
            part.memoryview()[:100] = bytes([number]) * min(100, nbytes)
            file.write(part, offset).result()
            model[offset : offset + nbytes] = contents(part)
        else:
            file.read(part, offset).result()
            assert contents(part) == model[offset : offset + nbytes]
        if draw.random() < 0.1:
            drop_cache(file.path)
    file.sync()
    file.close()
    drop_cache(f"{directory}/file")
    assert Path(f"{directory}/file").read_bytes() == model
    modes = {key.split(":")[0] for key in counts(backend)}
    assert modes == {"read direct", "read buffered", "write direct", "write buffered"}


def test_both_modes_at_once_beside_each_other_lose_nothing(directory: str, kernel: Kernel) -> None:
    lock, active, num_calls = threading.Lock(), [0, 0], [0, 0]

    def answer(name: str, real: Any, fd: int, view: memoryview, offset: int) -> int:
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
    nbytes, num_rounds = 256 * KIB, 24
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


def test_the_gate_keeps_the_modes_apart_and_lets_each_in_together() -> None:
    gate = WriteGate()
    inside: list[str] = []
    lock = threading.Lock()
    mixed: list[list[str]] = []
    most = 0

    def work(mode: Any) -> None:
        nonlocal most
        for _ in range(300):
            with gate.passing(mode):
                with lock:
                    inside.append(mode)
                    most = max(most, len(inside))
                    if len(set(inside)) > 1:
                        mixed.append(list(inside))
                with lock:
                    inside.remove(mode)

    threads = [threading.Thread(target=work, args=(mode,)) for mode in ("direct", "buffered") * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert mixed == []


def test_a_mode_that_waits_is_not_passed_by_newcomers() -> None:
    gate = WriteGate()
    order: list[str] = []
    first_in, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with gate.passing("direct"):
            first_in.set()
            go_on.wait(60)
            order.append("first")

    def other(mode: Any, name: str) -> threading.Thread:
        def run() -> None:
            with gate.passing(mode):
                order.append(name)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert first_in.wait(60)
    threads.append(other("direct", "together with the first"))
    threads[-1].join(60)
    threads.append(other("buffered", "waits"))
    while not gate._num_waiting["buffered"]:
        pass
    threads.append(other("direct", "behind it"))
    while not gate._num_waiting["direct"]:
        pass
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert order == ["together with the first", "first", "waits", "behind it"]


def test_a_write_that_fails_opens_the_gate(
    backend: PosixBackend, directory: str, kernel: Kernel
) -> None:
    file = backend.create(f"{directory}/file", MIB)

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    kernel.start(fail)
    for nbytes in (4 * KIB, MIB):
        with pytest.raises(OSError, match="Input/output"):
            file.write(backend.allocate(nbytes), 0).result()
    kernel.start()
    for nbytes in (4 * KIB, MIB, 4 * KIB):
        assert file.write(backend.allocate(nbytes), 0).result(60) == nbytes
    file.close()
