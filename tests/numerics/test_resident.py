"""State that stays in memory between steps: the same bits, fewer bytes moved."""

from __future__ import annotations

import pytest

import offload
from gds import MemoryBackend, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload.errors import BrokenOptimizerError, SealError
from tests.numerics.pairs import CASES, Cut, Pair

CHUNK_BYTES = 8192
EVERYTHING = "1GiB"


def pair_with(
    budget: int | str, name: str = "adamw", backend: WrapperBackend | None = None
) -> Pair:
    cut = Cut(CHUNK_BYTES, 2, settings={"host_memory": budget})
    return Pair(CASES[name], cut, backend or MemoryBackend(), keep=2)


@pytest.mark.parametrize(
    ("name", "budget", "wait"),
    [
        ("adamw", 100_000, True),
        ("sgd-momentum-in-some-groups", 100_000, False),
        ("adamw", 200_000, False),
        ("rprop", EVERYTHING, True),
        ("adamw", EVERYTHING, False),
    ],
)
def test_results_are_those_without_a_budget(name: str, budget: int | str, wait: bool) -> None:
    """A resume finds what was in memory, whether each checkpoint was waited for or not."""
    pair = pair_with(budget, name)
    for step in range(14):
        pair.step(step)
        pair.assert_same_parameters()
        if step in (0, 4, 5):
            pair.assert_same_state()
        if 6 <= step <= 8:
            handle = pair.optimizer.checkpoint()
            if wait:
                handle.result()
        if step == 8:
            assert pair.optimizer.stats().resident_bytes > 0
            pair.reopen()
            assert pair.optimizer.restore().step == 9
    assert pair.optimizer.stats().resident_bytes > 0
    pair.assert_same_state()


def test_a_restore_in_the_same_process_forgets_what_was_in_memory() -> None:
    pair = pair_with(EVERYTHING)
    pair.steps(5)
    pair.optimizer.checkpoint().result()
    for step in range(5, 8):
        pair.step_live(step)  # these never happened
    pair.optimizer.restore()
    for step in range(5, 9):
        pair.step(step)
        pair.assert_same_state()


def test_everything_resident_moves_bytes_at_a_seal_only() -> None:
    pair = pair_with(EVERYTHING)
    pair.steps(5)
    pair.optimizer.synchronize()
    stats = pair.optimizer.stats()
    assert (stats.bytes_read, stats.bytes_written) == (0, 0)
    pair.optimizer.checkpoint().result()
    moved = pair.optimizer.stats()
    assert moved.bytes_read == 0
    assert moved.bytes_written >= moved.state_bytes


def test_bytes_fall_in_proportion_to_what_is_resident() -> None:
    def moved_by_a_step(budget: int) -> tuple[int, int, offload.Stats]:
        pair = pair_with(budget)
        pair.steps(3)
        pair.optimizer.synchronize()
        before = pair.optimizer.stats()
        for step in range(3, 6):
            pair.step(step)
        pair.optimizer.synchronize()
        after = pair.optimizer.stats()
        written = after.bytes_written - before.bytes_written
        return after.bytes_read - before.bytes_read, written, after

    read, written, stats = moved_by_a_step(0)
    assert stats.resident_bytes == 0
    frame_bytes = stats.ring_bytes // 2
    num_chunks = -(-stats.num_parameters * 4 // CHUNK_BYTES)
    num_resident = num_chunks // 2
    fewer_read, fewer_written, stats = moved_by_a_step(num_resident * frame_bytes)
    assert stats.resident_bytes == num_resident * frame_bytes
    # chunks differ in how much of each array they have
    assert abs(fewer_written / written - 1 / 2) <= 2 / num_chunks
    assert fewer_read < read


class _Failing(WrapperBackend):
    """Fails every write to a file of that name while told to."""

    failing = ""

    def wrap_file(self, file):
        return _FailingFile(self, file)


class _FailingFile(WrapperFile):
    def __init__(self, backend, file) -> None:
        super().__init__(file)
        self._backend = backend

    def write(self, source, offset):
        if self._backend.failing and self._backend.failing in self.path:
            raise StorageError(5, "told to fail", self.path)
        return super().write(source, offset)


def test_a_seal_that_fails_before_it_is_written_leaves_memory_as_the_truth() -> None:
    backend = _Failing(MemoryBackend())
    pair = pair_with(EVERYTHING, backend=backend)
    pair.steps(3)
    backend.failing = "model.safetensors"
    handle = pair.optimizer.checkpoint()
    with pytest.raises(SealError, match="told to fail"):
        handle.result()
    backend.failing = ""
    with pytest.raises(SealError, match="told to fail"):
        pair.optimizer.step()
    pair.steps(3, 6)
    pair.assert_same_state()


def test_a_failed_write_of_resident_state_is_told_and_a_restore_goes_on() -> None:
    backend = _Failing(MemoryBackend())
    pair = pair_with(EVERYTHING, backend=backend)
    pair.steps(3)
    pair.optimizer.checkpoint().result()
    for step in range(3, 5):
        pair.step_live(step)
    backend.failing = "exp_avg_sq"
    with pytest.raises(SealError, match="told to fail"):
        pair.optimizer.checkpoint().result()
    backend.failing = ""
    with pytest.raises(BrokenOptimizerError, match=r"told to fail.*restore"):
        pair.optimizer.checkpoint()
    with pytest.warns(RuntimeWarning, match="told to fail"):
        pair.optimizer.restore()
    pair.steps(3, 6)
    pair.assert_same_state()
