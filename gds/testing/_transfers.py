"""Contract tests of buffers, files, futures and counters."""
# ruff: noqa: S101 - these are tests, which are named for what they show

from __future__ import annotations

import gc
import random
import threading

import pytest

from gds.contract import ALIGNMENT, Backend, Buffer, BufferKind, File
from gds.errors import RefusedError, ShortReadError, StorageError
from gds.testing._harness import FILE_BYTES, Harness, contents, fails_with, filled, new_file, put

HUGE_BYTES = 2 << 20


class TransferContract(Harness):
    """Tests of all operations that move bytes."""

    @pytest.mark.parametrize("nbytes", [1, ALIGNMENT, ALIGNMENT + 1, HUGE_BYTES + 5])
    def test_a_buffer_is_zeroed_and_aligned(self, backend: Backend, nbytes: int) -> None:
        buffer = backend.allocate(nbytes)
        assert isinstance(buffer, Buffer)
        assert buffer.nbytes == nbytes
        assert buffer.address % ALIGNMENT == 0
        assert contents(buffer) == bytes(nbytes)

    @pytest.mark.parametrize("kind", ["host", "pinned", "device"])
    def test_memory_of_a_kind_is_of_that_kind_or_refused(
        self, backend: Backend, kind: BufferKind
    ) -> None:
        own = backend.allocate(ALIGNMENT).kind
        if kind != "host" and own == "host":
            with pytest.raises(RefusedError, match=backend.name):
                backend.allocate(ALIGNMENT, kind)
        else:
            buffer = backend.allocate(ALIGNMENT, kind)
            assert (buffer.kind, buffer.nbytes) == (kind, ALIGNMENT)

    def test_a_slice_shares_memory_and_keeps_it_alive(self, backend: Backend) -> None:
        whole = backend.allocate(ALIGNMENT)
        part = whole.slice(1000, 100).slice(10, 20)
        assert (part.nbytes, part.address) == (20, whole.address + 1010)
        assert part.kind == whole.kind
        put(whole.slice(1010, 20), b"x" * 20)
        assert contents(part) == b"x" * 20
        del whole
        gc.collect()
        assert contents(part) == b"x" * 20

    @pytest.mark.parametrize(("start", "nbytes"), [(-1, 2), (0, -1), (0, 101), (101, 0)])
    def test_a_slice_outside_its_buffer_is_refused(
        self, backend: Backend, start: int, nbytes: int
    ) -> None:
        with pytest.raises(ValueError, match="100"):
            backend.allocate(100).slice(start, nbytes)

    def test_a_new_file_has_its_size_and_reads_as_zeros(
        self, backend: Backend, directory: str
    ) -> None:
        file = backend.create(f"{directory}/new", FILE_BYTES)
        assert isinstance(file, File)
        assert file.size_bytes == FILE_BYTES
        assert file.alignment in (1, ALIGNMENT)
        into = filled(backend, FILE_BYTES, seed=1)
        assert file.read(into, 0).result() == FILE_BYTES
        assert contents(into) == bytes(FILE_BYTES)

    def test_a_file_is_closed_at_the_end_of_its_block(
        self, backend: Backend, directory: str
    ) -> None:
        with new_file(backend, f"{directory}/file", seed=3) as file:
            assert isinstance(file, File)
            inode, memory = file.inode, backend.allocate(FILE_BYTES)
            future = file.read(memory, 0)
        assert future.done()
        assert contents(memory) == contents(filled(backend, FILE_BYTES, seed=3))
        with fails_with("EBADF"):
            file.sync()
        assert file.inode == inode
        with file:
            pass  # closing is idempotent

    def test_a_file_is_closed_after_an_error_which_is_raised_all_the_same(
        self, backend: Backend, directory: str
    ) -> None:
        with (
            pytest.raises(ZeroDivisionError, match="in the block"),
            new_file(backend, f"{directory}/file") as file,
        ):
            raise ZeroDivisionError("in the block")
        with fails_with("EBADF"):
            file.sync()

    def test_an_empty_file_can_be_made_and_opened(self, backend: Backend, directory: str) -> None:
        backend.create(f"{directory}/empty", 0).close()
        file = backend.open(f"{directory}/empty", writable=True)
        assert file.size_bytes == 0
        assert file.read_bytes(0, 0) == b""
        assert file.write(backend.allocate(0), 0).result() == 0
        file.sync()

    @pytest.mark.parametrize("seed", range(8))
    def test_any_mix_of_offsets_lengths_and_memory_moves_the_right_bytes(
        self, backend: Backend, directory: str, seed: int
    ) -> None:
        draw = random.Random(seed)
        file = new_file(backend, f"{directory}/mix", seed)
        model = bytearray(contents(filled(backend, FILE_BYTES, seed)))
        for number in range(60):
            step = draw.choice([1, 1, 512, ALIGNMENT, ALIGNMENT])
            offset = draw.randrange(FILE_BYTES) // step * step
            nbytes = draw.randint(0, FILE_BYTES - offset)
            if draw.random() < 0.5:
                nbytes = nbytes // step * step
            if draw.random() < 0.3:
                nbytes = FILE_BYTES - offset  # up to the end of the file
            same_phase = offset % ALIGNMENT
            misaligned_by = draw.choice([0, 0, same_phase, 1, 512])
            memory = filled(backend, nbytes, number, misaligned_by=misaligned_by)
            if draw.random() < 0.5:
                assert file.write(memory, offset).result() == nbytes
                model[offset : offset + nbytes] = contents(memory)
            else:
                assert file.read(memory, offset).result() == nbytes
                assert contents(memory) == model[offset : offset + nbytes]
        assert file.read_bytes(0, FILE_BYTES) == bytes(model)
        file.close()
        assert self.raw(backend, f"{directory}/mix") == bytes(model)

    def test_a_read_leaves_the_memory_around_it_alone(
        self, backend: Backend, directory: str
    ) -> None:
        file = new_file(backend, f"{directory}/around")
        whole = filled(backend, 4 * ALIGNMENT, seed=2)
        before = contents(whole)
        for start, nbytes in [(ALIGNMENT, 2 * ALIGNMENT), (ALIGNMENT + 7, 5000)]:
            put(whole, before)
            file.read(whole.slice(start, nbytes), 3 * ALIGNMENT).result()
            after = contents(whole)
            assert after[:start] == before[:start]
            assert after[start + nbytes :] == before[start + nbytes :]
            assert after != before

    @pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
    def test_what_is_read_again_is_what_the_file_holds(
        self, backend: Backend, directory: str, direct: bool
    ) -> None:
        draw = random.Random(direct)
        file = new_file(backend, f"{directory}/again", 4)
        model = bytearray(contents(filled(backend, FILE_BYTES, 4)))
        for number in range(20):
            step = draw.choice([1, ALIGNMENT])
            offset = draw.randrange(FILE_BYTES) // step * step
            nbytes = draw.randint(0, FILE_BYTES - offset)
            misaligned_by = draw.choice([0, offset % ALIGNMENT, 1])
            memory = filled(backend, nbytes, number, misaligned_by=misaligned_by)
            file.write(memory, offset).result()  # not synced, and must not be lost
            model[offset : offset + nbytes] = contents(memory)
            whole = filled(backend, 3 * ALIGNMENT, number)
            before = contents(whole)
            at = draw.randint(0, FILE_BYTES - ALIGNMENT)
            into = whole.slice(ALIGNMENT + draw.choice([0, 7]), ALIGNMENT)
            start = into.address - whole.address
            assert file.read_again(into, at, direct=direct).result() == ALIGNMENT
            after = contents(whole)
            assert after[start : start + ALIGNMENT] == bytes(model[at : at + ALIGNMENT])
            assert after[:start] == before[:start]
            assert after[start + ALIGNMENT :] == before[start + ALIGNMENT :]
        assert file.read_bytes(0, FILE_BYTES) == bytes(model)

    @pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
    def test_reading_again_past_the_end_says_so(
        self, backend: Backend, directory: str, direct: bool
    ) -> None:
        file = new_file(backend, f"{directory}/short")
        with pytest.raises(ShortReadError) as caught:
            file.read_again(backend.allocate(11), FILE_BYTES - 10, direct=direct).result()
        assert (caught.value.filename, caught.value.offset) == (
            f"{directory}/short",
            FILE_BYTES - 10,
        )
        with pytest.raises(ValueError, match="-1"):
            file.read_again(backend.allocate(1), -1, direct=direct)

    def test_small_ranges_and_transfers_see_each_other(
        self, backend: Backend, directory: str
    ) -> None:
        file = new_file(backend, f"{directory}/both")
        expected = contents(filled(backend, FILE_BYTES, 1))
        assert file.read_bytes(5000, 9000) == expected[5000:14000]
        file.write_bytes(b"header", 0)
        file.write_bytes(b"tail", FILE_BYTES - 4)
        into = backend.allocate(FILE_BYTES)
        file.read(into, 0).result()
        assert contents(into) == b"header" + expected[6:-4] + b"tail"

    def test_concurrent_requests_from_several_threads_do_not_mix(
        self, backend: Backend, directory: str
    ) -> None:
        nbytes, num_parts = 8 * ALIGNMENT + 100, 24
        file = backend.create(f"{directory}/concurrent", nbytes * num_parts)
        failures: list[BaseException] = []

        def work(parts: range) -> None:
            try:
                sources = [filled(backend, nbytes, part) for part in parts]
                writes = [
                    file.write(source, part * nbytes)
                    for part, source in zip(parts, sources, strict=True)
                ]
                assert [write.result() for write in writes] == [nbytes] * len(parts)
                targets = [backend.allocate(nbytes) for _ in parts]
                reads = [
                    file.read(target, part * nbytes)
                    for part, target in zip(parts, targets, strict=True)
                ]
                assert [read.result() for read in reads] == [nbytes] * len(parts)
                assert list(map(contents, targets)) == list(map(contents, sources))
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=(range(first, num_parts, 3),)) for first in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [
            pytest.param(8 * ALIGNMENT, 2 * ALIGNMENT, id="aligned-across-the-end"),
            pytest.param(FILE_BYTES - 10, 11, id="one-byte-too-many"),
            pytest.param(FILE_BYTES, 1, id="from-the-end"),
            pytest.param(100 * ALIGNMENT, ALIGNMENT, id="far-behind"),
        ],
    )
    def test_a_read_past_the_end_says_so(
        self, backend: Backend, directory: str, offset: int, nbytes: int
    ) -> None:
        file = new_file(backend, f"{directory}/short")
        with pytest.raises(ShortReadError) as caught:
            file.read(backend.allocate(nbytes), offset).result()
        assert (caught.value.filename, caught.value.offset) == (f"{directory}/short", offset)
        assert str(nbytes) in str(caught.value)
        with pytest.raises(ShortReadError):
            file.read_bytes(offset, nbytes)

    @pytest.mark.parametrize("offset", [FILE_BYTES - 5, FILE_BYTES, 100 * ALIGNMENT])
    def test_a_write_past_the_end_is_refused_before_anything_is_written(
        self, backend: Backend, directory: str, offset: int
    ) -> None:
        file = new_file(backend, f"{directory}/fixed")
        before = file.read_bytes(0, FILE_BYTES)
        with pytest.raises(StorageError) as caught:
            file.write(filled(backend, 6, seed=3), offset).result()
        assert (caught.value.filename, caught.value.offset) == (f"{directory}/fixed", offset)
        with pytest.raises(StorageError):
            file.write_bytes(b"sixsix", offset)
        assert file.read_bytes(0, FILE_BYTES) == before
        found = backend.stat(f"{directory}/fixed")
        assert found is not None
        assert found.size_bytes == FILE_BYTES

    def test_a_negative_offset_is_refused(self, backend: Backend, directory: str) -> None:
        file = new_file(backend, f"{directory}/negative")
        with pytest.raises(ValueError, match="-1"):
            file.read(backend.allocate(1), -1)
        with pytest.raises(ValueError, match="-1"):
            file.write(backend.allocate(1), -1)

    def test_a_file_opened_for_reading_cannot_be_written(
        self, backend: Backend, directory: str
    ) -> None:
        new_file(backend, f"{directory}/read-only").close()
        file = backend.open(f"{directory}/read-only")
        before = file.read_bytes(0, FILE_BYTES)
        with fails_with("EBADF"):
            file.write(backend.allocate(ALIGNMENT), 0).result()
        with fails_with("EBADF"):
            file.write_bytes(b"x", 0)
        assert file.read_bytes(0, FILE_BYTES) == before

    def test_a_result_can_be_asked_for_again(self, backend: Backend, directory: str) -> None:
        file = new_file(backend, f"{directory}/again")
        good = file.read(backend.allocate(10), 0)
        bad = file.read(backend.allocate(10), FILE_BYTES)
        assert [good.result(), good.result(timeout=60)] == [10, 10]
        for _ in range(2):
            with pytest.raises(ShortReadError):
                bad.result()
        assert good.done()
        assert bad.done()

    @pytest.mark.parametrize("offset", [0, FILE_BYTES], ids=["succeeds", "fails"])
    def test_a_callback_is_called_once_however_late_it_comes(
        self, backend: Backend, directory: str, offset: int
    ) -> None:
        file = new_file(backend, f"{directory}/callback")
        early: list[object] = []
        late: list[object] = []
        called = threading.Event()

        def note(done: object) -> None:
            early.append(done)
            called.set()

        future = file.read(backend.allocate(10), offset)
        future.add_done_callback(note)
        assert called.wait(60)
        future.add_done_callback(late.append)
        assert early == late == [future]

    def test_dropping_future_and_buffer_does_not_stop_a_transfer(
        self, backend: Backend, directory: str
    ) -> None:
        nbytes, num_writes = HUGE_BYTES, 8
        file = backend.create(f"{directory}/dropped", nbytes * num_writes)
        for number in range(num_writes):
            file.write(filled(backend, nbytes, number), number * nbytes)
        file.close()
        gc.collect()
        file = backend.open(f"{directory}/dropped")
        into = backend.allocate(nbytes)
        for number in range(num_writes):
            file.read(into, number * nbytes).result()
            assert contents(into) == contents(filled(backend, nbytes, number))

    def test_closing_a_file_waits_for_its_transfers(self, backend: Backend, directory: str) -> None:
        file = backend.create(f"{directory}/drained", HUGE_BYTES)
        source = filled(backend, HUGE_BYTES, seed=4)
        futures = [file.write(source, 0) for _ in range(6)]
        file.close()
        file.close()
        assert [future.done() for future in futures] == [True] * 6
        assert [future.result() for future in futures] == [HUGE_BYTES] * 6

    def test_a_closed_file_refuses_everything(self, backend: Backend, directory: str) -> None:
        file = new_file(backend, f"{directory}/closed")
        file.close()
        memory = backend.allocate(1)
        for operation in (
            lambda: file.read(memory, 0).result(),
            lambda: file.read_again(memory, 0, direct=True).result(),
            lambda: file.write(memory, 0).result(),
            lambda: file.read_bytes(0, 1),
            lambda: file.write_bytes(b"x", 0),
            file.sync,
        ):
            with pytest.raises(StorageError, match="closed"):
                operation()

    def test_counters_equal_what_was_transferred(self, backend: Backend, directory: str) -> None:
        before = backend.counters()
        file = backend.create(f"{directory}/counted", FILE_BYTES)
        file.write(backend.allocate(FILE_BYTES), 0).result()
        file.write(backend.allocate(100), 50).result()
        file.read(backend.allocate(ALIGNMENT), 0).result()
        file.read_again(backend.allocate(10), 0, direct=False).result()
        file.sync()
        file.write_bytes(b"not counted", 0)
        file.read_bytes(0, 10)
        with pytest.raises(ShortReadError):
            file.read(backend.allocate(10), FILE_BYTES - 5).result()
        with pytest.raises(StorageError):
            file.write(backend.allocate(10), FILE_BYTES).result()
        after = backend.counters()
        assert after.bytes_written - before.bytes_written == FILE_BYTES + 100
        assert after.num_writes - before.num_writes == 2
        assert after.bytes_read - before.bytes_read == ALIGNMENT + 10
        assert after.num_reads - before.num_reads == 2
        assert after.num_syncs - before.num_syncs == 1
        assert after.read_s > before.read_s
        assert after.write_s > before.write_s
