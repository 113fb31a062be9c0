"""Contract tests of `File.clone`."""
# ruff: noqa: S101 - these are tests, which are named for what they show

from __future__ import annotations

import pytest

from gds.contract import ALIGNMENT, Backend
from gds.errors import StorageError
from gds.testing._harness import FILE_BYTES, Harness, contents, fails_with, filled, new_file

_OFFSET, _NBYTES = 2 * ALIGNMENT, 4 * ALIGNMENT


def _of(backend: Backend, seed: int) -> bytes:
    """Return the bytes of a new file that was filled with `seed`."""
    return contents(filled(backend, FILE_BYTES, seed))


class CloneContract(Harness):
    """Tests that a clone either takes over the bytes of the source, or changes nothing."""

    def test_a_clone_has_the_bytes_of_its_source_or_nothing_has_changed(
        self, backend: Backend, directory: str
    ) -> None:
        source = new_file(backend, f"{directory}/source", seed=1)
        target = new_file(backend, f"{directory}/target", seed=2)
        done = target.clone(source, _OFFSET, _NBYTES)
        if self.clones is not None:
            assert done is self.clones
        assert backend.capabilities(directory).clones is done
        expected = bytearray(_of(backend, 2))
        if done:
            part = slice(_OFFSET, _OFFSET + _NBYTES)
            expected[part] = _of(backend, 1)[part]
        assert target.read_bytes(0, FILE_BYTES) == bytes(expected)
        into = backend.allocate(FILE_BYTES)
        target.read(into, 0).result()
        assert contents(into) == bytes(expected)
        assert source.read_bytes(0, FILE_BYTES) == _of(backend, 1)
        for file in (source, target):
            file.sync()
            file.close()
        assert self.raw(backend, f"{directory}/target") == bytes(expected)

    def test_what_is_written_to_either_afterwards_does_not_show_in_the_other(
        self, backend: Backend, directory: str
    ) -> None:
        files = [new_file(backend, f"{directory}/{seed}", seed) for seed in (1, 2)]
        files[1].clone(files[0], _OFFSET, _NBYTES)
        before = [file.read_bytes(0, FILE_BYTES) for file in files]
        for number, file in enumerate(files):
            memory = filled(backend, ALIGNMENT, seed=3 + number)
            file.write(memory, _OFFSET + ALIGNMENT).result()
            file.write_bytes(b"small", _OFFSET + 10)
            changed = bytearray(before[number])
            changed[_OFFSET + ALIGNMENT : _OFFSET + 2 * ALIGNMENT] = contents(memory)
            changed[_OFFSET + 10 : _OFFSET + 15] = b"small"
            before[number] = bytes(changed)
            assert [f.read_bytes(0, FILE_BYTES) for f in files] == before

    def test_a_clone_sees_what_was_written_to_its_source_and_not_synced(
        self, backend: Backend, directory: str
    ) -> None:
        source = new_file(backend, f"{directory}/source", seed=1)
        target = new_file(backend, f"{directory}/target", seed=2)
        source.write(filled(backend, ALIGNMENT, seed=3), _OFFSET).result()
        source.write_bytes(b"unsynced", _OFFSET + ALIGNMENT + 1)
        target.write_bytes(b"overwritten", _OFFSET)
        target.read_bytes(0, FILE_BYTES)  # fills the cache with bytes that the clone makes stale
        expected = source.read_bytes(_OFFSET, _NBYTES)
        if target.clone(source, _OFFSET, _NBYTES):
            assert target.read_bytes(_OFFSET, _NBYTES) == expected

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [
            pytest.param(_OFFSET + 512, _NBYTES, id="offset-not-aligned"),
            pytest.param(_OFFSET, _NBYTES + 512, id="length-not-aligned"),
        ],
    )
    def test_a_range_that_is_not_whole_blocks_is_not_cloned(
        self, backend: Backend, directory: str, offset: int, nbytes: int
    ) -> None:
        source = new_file(backend, f"{directory}/source", seed=1)
        target = new_file(backend, f"{directory}/target", seed=2)
        assert not target.clone(source, offset, nbytes)
        assert target.read_bytes(0, FILE_BYTES) == _of(backend, 2)

    def test_a_source_that_is_shorter_is_not_cloned(self, backend: Backend, directory: str) -> None:
        source = new_file(backend, f"{directory}/source", seed=1, nbytes=3 * ALIGNMENT)
        target = new_file(backend, f"{directory}/target", seed=2)
        assert not target.clone(source, _OFFSET, _NBYTES)
        assert target.read_bytes(0, FILE_BYTES) == _of(backend, 2)

    def test_nothing_can_be_cloned_from_a_file_of_another_backend(
        self, backend: Backend, directory: str
    ) -> None:
        class Foreign:
            """A file that belongs to no backend of this package."""

            path = "/foreign"
            size_bytes = FILE_BYTES

        target = new_file(backend, f"{directory}/target", seed=2)
        assert not target.clone(Foreign(), _OFFSET, _NBYTES)  # type: ignore[arg-type]
        assert target.read_bytes(0, FILE_BYTES) == _of(backend, 2)

    def test_no_bytes_to_clone_change_nothing(self, backend: Backend, directory: str) -> None:
        source = new_file(backend, f"{directory}/source", seed=1)
        target = new_file(backend, f"{directory}/target", seed=2)
        target.clone(source, _OFFSET, 0)
        assert target.read_bytes(0, FILE_BYTES) == _of(backend, 2)

    def test_a_clone_is_not_counted_as_a_transfer(self, backend: Backend, directory: str) -> None:
        source = new_file(backend, f"{directory}/source", seed=1)
        target = new_file(backend, f"{directory}/target", seed=2)
        before = backend.counters()
        target.clone(source, _OFFSET, _NBYTES)
        after = backend.counters()
        assert (after.bytes_read, after.num_reads) == (before.bytes_read, before.num_reads)
        assert (after.bytes_written, after.num_writes) == (before.bytes_written, before.num_writes)

    def test_what_cannot_be_written_cannot_be_cloned_into(
        self, backend: Backend, directory: str
    ) -> None:
        source = new_file(backend, f"{directory}/source", seed=1)
        new_file(backend, f"{directory}/target", seed=2).close()
        target = backend.open(f"{directory}/target")
        with fails_with("EBADF"):
            target.clone(source, _OFFSET, _NBYTES)
        target.close()
        target = backend.open(f"{directory}/target", writable=True)
        with fails_with("EFBIG"):
            target.clone(source, 8 * ALIGNMENT, 2 * ALIGNMENT)
        with pytest.raises(ValueError, match="-4096"):
            target.clone(source, -ALIGNMENT, ALIGNMENT)
        target.close()
        with pytest.raises(StorageError, match="closed"):
            target.clone(source, _OFFSET, _NBYTES)
        assert backend.open(f"{directory}/target").read_bytes(0, FILE_BYTES) == _of(backend, 2)

    def test_a_source_that_is_opened_for_reading_will_do(
        self, backend: Backend, directory: str
    ) -> None:
        new_file(backend, f"{directory}/source", seed=1).close()
        source = backend.open(f"{directory}/source")
        target = new_file(backend, f"{directory}/target", seed=2)
        done = target.clone(source, _OFFSET, _NBYTES)
        if self.clones is not None:
            assert done is self.clones
