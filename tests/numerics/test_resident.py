"""State that stays in memory between steps: the same bits, fewer bytes moved."""

from __future__ import annotations

import pytest
import torch

import offload
from gds import MemoryBackend, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload.errors import BrokenOptimizerError, SealError
from tests.numerics.models import clip, give_gradients
from tests.numerics.pairs import CASES, MAX_NORM, Cut, Pair, memory_pair
from tests.numerics.reference import assert_same_parameters

CHUNK_BYTES = 8192
EVERYTHING = "1GiB"
BUDGETS = [100_000, 200_000, EVERYTHING]
"""Bytes: of the 200 kB of Adam's state, a part, most, and all."""


def pair_with(budget: int | str, name: str = "adamw", ring: int = 2) -> Pair:
    cut = Cut(CHUNK_BYTES, ring, settings={"host_memory": budget})
    return memory_pair(CASES[name], cut, keep=2)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-in-some-groups", "rprop"])
def test_results_are_those_without_a_budget(name: str, budget: int | str) -> None:
    pair = pair_with(budget, name)
    for step in range(14):
        pair.step(step)
        pair.assert_same_parameters()
        if step in (0, 4, 5, 9):
            pair.assert_same_state()
    assert pair.optimizer.stats().resident_bytes > 0
    pair.assert_same_state()


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "at-once"])
def test_a_resume_finds_what_was_in_memory(budget: int | str, wait: bool) -> None:
    pair = pair_with(budget)
    for step in range(9):
        pair.step(step)
        handle = pair.optimizer.checkpoint()
        if wait:
            handle.result()
    pair.reopen()
    pair.optimizer.restore()
    for step in range(9, 16):
        pair.step(step)
        pair.assert_same_parameters()
    pair.assert_same_state()


def test_a_restore_in_the_same_process_forgets_what_was_in_memory() -> None:
    pair = pair_with(EVERYTHING)
    for step in range(5):
        pair.step(step)
    pair.optimizer.checkpoint().result()
    for step in range(5, 8):
        pair.step_live(step)  # these never happened
    pair.optimizer.restore()
    for step in range(5, 9):
        pair.step(step)
        pair.assert_same_parameters()
    pair.assert_same_state()


def test_everything_resident_moves_bytes_at_a_seal_only() -> None:
    pair = pair_with(EVERYTHING)
    for step in range(5):
        pair.step(step)
    pair.optimizer.synchronize()
    stats = pair.optimizer.stats()
    assert (stats.bytes_read, stats.bytes_written) == (0, 0)
    pair.optimizer.checkpoint().result()
    moved = pair.optimizer.stats()
    assert moved.bytes_read == 0
    assert moved.bytes_written >= moved.state_bytes


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_bytes_fall_in_proportion_to_what_is_resident(fraction: float) -> None:
    def moved_by_a_step(budget: int) -> tuple[int, int, offload.engine.stats.Stats]:
        pair = pair_with(budget)
        for step in range(3):
            pair.step(step)
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
    num_resident = int(num_chunks * fraction)
    fewer_read, fewer_written, stats = moved_by_a_step(num_resident * frame_bytes)
    assert stats.resident_bytes == num_resident * frame_bytes
    chunk_share = 1 / num_chunks  # chunks differ in how much of each array they have
    assert abs(fewer_written / written - (1 - fraction)) <= 2 * chunk_share
    assert fewer_read < read


def test_groups_may_join_while_state_is_in_memory() -> None:
    pair = pair_with(EVERYTHING)
    for step in range(3):
        pair.step(step)
    extra = [torch.nn.Parameter(torch.full((600,), 0.5).bfloat16()) for _ in range(2)]
    pair.optimizer.add_param_group({"params": [extra[0]], "lr": 0.01})
    pair.reference.add_param_group({"params": [extra[1]], "lr": 0.01})
    for step in range(3, 7):
        for parameter in extra:
            parameter.grad = torch.full_like(parameter, 0.25 * step)
        pair.step(step)
        pair.assert_same_parameters()
        assert_same_parameters([("extra", extra[0])], [("extra", extra[1])])


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


def train(pair: Pair, steps: range) -> None:
    for step in steps:
        give_gradients(step, pair.live, pair.expected)
        clip(pair.live, MAX_NORM)
        clip(pair.expected, MAX_NORM)
        pair.optimizer.step()
        pair.reference.step()


def test_a_seal_that_fails_before_it_is_written_leaves_memory_as_the_truth() -> None:
    backend = _Failing(MemoryBackend())
    cut = Cut(CHUNK_BYTES, 2, settings={"host_memory": EVERYTHING})
    pair = Pair(CASES["adamw"], cut, backend)
    train(pair, range(3))
    backend.failing = "model.safetensors"
    handle = pair.optimizer.checkpoint()
    with pytest.raises(SealError, match="told to fail"):
        handle.result()
    backend.failing = ""
    with pytest.raises(SealError, match="told to fail"):
        pair.optimizer.step()
    train(pair, range(3, 6))
    pair.assert_same_parameters()
    pair.assert_same_state()


def test_a_failed_write_of_resident_state_is_told_and_a_restore_goes_on() -> None:
    backend = _Failing(MemoryBackend())
    cut = Cut(CHUNK_BYTES, 2, settings={"host_memory": EVERYTHING})
    pair = Pair(CASES["adamw"], cut, backend)
    train(pair, range(3))
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
    train(pair, range(3, 6))
    pair.assert_same_parameters()
    pair.assert_same_state()
