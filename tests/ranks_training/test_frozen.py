"""Ranks whose model is mostly frozen write little at each seal: what the slot's file lacks.

Also if seals fail, or take longer than steps. This module has what a rank does for that as well.
"""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import offload
from gds import Buffer, File, IOFuture, PosixBackend, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from tests.crash.fault_backend import FaultBackend
from tests.ranks_training.calls import Calls as Ranks
from tests.ranks_training.cases import (
    ROUND,
    SEAL,
    Calls,
    Case,
    do,
    errors,
    newest,
    of_each,
    require_success,
    run_cases,
    values,
)
from tests.ranks_training.models import inner
from tests.ranks_training.rank_server import Jobs, Rank

WIDTHS = (1024, 2048, 4)
NUM_SLOTS = 3
"""Two checkpoints, and one that is written."""

FROZEN = 2 * 1024 * 2048
"""Bytes of the frozen matrix."""

MOST = 2 * 2048 * 4 + 64 * 1024
"""Bytes that are trained, and a constant for the blocks that they end in and the header."""


class Counted(WrapperBackend):
    """Counts the bytes that are written to model files, and those that are read from the drive."""

    def __init__(self) -> None:
        super().__init__(PosixBackend())
        self.written = self.read_back = 0
        self.write_s = 0.0
        """Seconds for each small write to model files."""
        self.held: threading.Event | None = None
        """If set, the next sync of a model file waits for it, and then fails."""

    def wrap_file(self, file: File) -> File:
        return CountedFile(file, self)


class CountedFile(WrapperFile):
    def __init__(self, wrapped: File, backend: Counted) -> None:
        super().__init__(wrapped)
        self._backend = backend
        self._is_model = "model" in wrapped.path

    def write(self, source: Buffer, offset: int) -> IOFuture:
        self._backend.written += source.nbytes * self._is_model
        return super().write(source, offset)

    def write_bytes(self, data: bytes, offset: int) -> None:
        time.sleep(self._backend.write_s * self._is_model)
        self._backend.written += len(data) * self._is_model
        super().write_bytes(data, offset)

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        self._backend.read_back += into.nbytes * self._is_model
        return super().read_again(into, offset, direct=direct)

    def sync(self) -> None:
        held = self._backend.held
        if held is None or not self._is_model:
            super().sync()
            return
        held.wait()
        self._backend.held = None
        raise StorageError(errno.EIO, "injected failure of sync", self.path)


def begin(ranks: Ranks) -> None:
    """Freeze the first layer, which is nearly all of the model, and count from now on."""
    inner(ranks.model).layers[0].requires_grad_(False)
    ranks.backend = FaultBackend(Counted())


def counted(ranks: Ranks) -> Counted:
    """Return the backend that counts."""
    found = ranks.backend.inner
    assert isinstance(found, Counted)
    return found


def moved(ranks: Ranks) -> list[int]:
    """Return the bytes written and read back since the last call."""
    backend = counted(ranks)
    found = [backend.written, backend.read_back]
    backend.written = backend.read_back = 0
    return found


def slow(ranks: Ranks, seconds: float) -> None:
    """Let each small write to model files take long."""
    counted(ranks).write_s = seconds


def hold_sync(ranks: Ranks) -> None:
    """Let the next sync of a model file wait for `fail_sync`, and then fail."""
    counted(ranks).held = threading.Event()


def fail_sync(ranks: Ranks) -> None:
    """Let the sync fail that waits."""
    held = counted(ranks).held
    assert held is not None, "no sync is held"
    held.set()


def of(name: str, *arguments: Any) -> list[Any]:
    """Return a call of one of the functions above."""
    return do(f"test_frozen:{name}", *arguments)


def fill(value: float) -> list[Any]:
    """Return the call that fills the frozen matrix."""
    return do("odd_calls:fill", "layers.0.weight", value)


MOVED = of("moved")
BEGIN: Calls = [of("begin"), ["open"]]
COUNT: Calls = [["step"], MOVED, *SEAL, MOVED]
END: Calls = [["write_values", "values.safetensors"], ["verify"]]


def case(kind: str, calls: Calls) -> Case:
    """Return the case of two ranks, of which one alone makes the calls ``["only", rank, call]``."""
    return [
        [one[2] if one[0] == "only" else one for one in calls if one[0] != "only" or one[1] == rank]
        for rank in range(2)
    ], {"kind": kind}


def moves(rank: Rank) -> list[list[int]]:
    """Return the bytes written and read back in each seal."""
    return [found for found in values(rank, "do") if isinstance(found, list)][1::2]


def require_whole(ranks: list[Rank], folder: Path, step: int) -> None:
    """Check the newest checkpoint with its digests, and its model with safetensors' own file."""
    assert of_each(ranks, "verify") == [[], []]
    path = newest(folder / "run")
    assert path.name == f"step-{step:08}"
    found = load_file(path / "model.safetensors")
    expected = load_file(folder / "values.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(value) for name, value in expected.items())


def test_what_is_frozen_is_written_once_for_each_slot(jobs: Jobs, tmp_path: Path) -> None:
    cases: dict[str, Case] = {}
    for kind in ("ddp", "fsdp2"):
        cases[kind] = case(kind, [*BEGIN, *COUNT * (NUM_SLOTS + 3), *END])
        cases[f"{kind}/later"] = case(kind, [*BEGIN, ["restore"], *COUNT * (NUM_SLOTS + 2), *END])
    played = run_cases(jobs, tmp_path, cases, widths=WIDTHS, given=True)
    for kind in ("ddp", "fsdp2"):
        for rank in played[kind]:
            found = moves(rank)
            assert all(written >= FROZEN // 2 for written, _ in found[:NUM_SLOTS])
            assert all(written <= MOST for written, _ in found[NUM_SLOTS:])
            assert not any(read for _, read in found)
        for rank in played[f"{kind}/later"]:
            found = moves(rank)
            assert all(written <= MOST for written, _ in found)
            assert all(read >= FROZEN // 2 for _, read in found[: NUM_SLOTS - 1])
            assert not any(read for _, read in found[NUM_SLOTS:])
        require_whole(played[f"{kind}/later"], tmp_path / kind, 2 * NUM_SLOTS + 5)


def test_after_a_seal_that_failed_on_one_rank_all_write_everything(
    jobs: Jobs, tmp_path: Path
) -> None:
    before, after = COUNT * (NUM_SLOTS + 1), COUNT * (2 * NUM_SLOTS + 1)
    failed: Calls = [["step"], MOVED, ["checkpoint"], ["settle"], MOVED, *after, *END]
    cases: dict[str, Case] = {}
    for victim in (0, 1):
        fails: Calls = [["only", victim, ["fail", "write", "model.safetensors"]]]
        cases[str(victim)] = case("fsdp2", [*BEGIN, *before, *fails, *failed])
    for name, ranks in run_cases(jobs, tmp_path, cases, widths=WIDTHS, given=True).items():
        require_success(ranks)
        for rank in ranks:
            found = [written for written, _ in moves(rank)][NUM_SLOTS + 2 :]
            assert found[0] >= FROZEN // 2
            # Only the ranks' next agreement on the slot gives its content a name again.
            assert found[NUM_SLOTS] >= FROZEN // 2
            others = [*found[1:NUM_SLOTS], *found[NUM_SLOTS + 1 :]]
            assert all(written <= MOST for written in others), found
        require_whole(ranks, tmp_path / name, 3 * NUM_SLOTS + 3)


LATE: dict[str, tuple[str, Calls, int]] = {
    # Kind, calls, and the step that is sealed last.
    # The state has moved on to the next slot when a seal fails: nothing known of that is spoiled.
    **{
        f"moved on, {kind}": (
            kind,
            [
                *BEGIN, fill(1.0), *ROUND * (NUM_SLOTS + 1), ["step"],
                ["only", 1, of("hold_sync")], ["checkpoint"], ["step"],
                ["only", 1, of("fail_sync")], ["settle"], fill(2.0), *SEAL, fill(1.0),
                *ROUND * NUM_SLOTS, *END,
            ],
            2 * NUM_SLOTS + 3,
        )
        for kind in ("ddp", "fsdp2")
    },
    # The next slot was refused before the seal failed: ranks write the file of their slot.
    "refused": (
        "fsdp2",
        [
            *BEGIN, ["step"], ["only", 0, of("hold_sync")], ["checkpoint"],
            ["only", 1, ["fail", "make_dir", "owner-1/part-"]], ["keep_error", "step"],
            ["only", 0, of("fail_sync")], ["settle"], ["step"], *SEAL, *END,
        ],
        2,
    ),
    # Two faults at once: the writer has no slot of its own in the seal whose sync fails.
    "torn step": (
        "fsdp2",
        [
            *BEGIN, *ROUND * (NUM_SLOTS + 1), ["close"], *BEGIN, ["restore"], fill(2.0),
            ["only", 0, ["fail", "read", "exp_avg"]], ["only", 0, ["keep_error", "step"]],
            ["only", 1, ["step"]], ["only", 1, ["fail", "sync", "model.safetensors"]],
            ["keep_error", "checkpoint"], ["settle"], ["restore"], fill(2.0), *COUNT, *END,
        ],
        NUM_SLOTS + 2,
    ),
}  # fmt: skip


def test_what_a_late_failure_leaves_in_model_files_is_written_anew(
    jobs: Jobs, tmp_path: Path
) -> None:
    cases = {name: case(kind, calls) for name, (kind, calls, _) in LATE.items()}
    played = run_cases(jobs, tmp_path, cases, widths=WIDTHS, given=True)
    for name, (_, _, step) in LATE.items():
        ranks = played[name]
        failed = [one["call"] for rank in ranks for one in errors(rank)]
        assert failed == (["settle"] if name == "torn step" else []), name
        require_whole(ranks, tmp_path / name, step)
        said = [failed for rank in ranks for failed in values(rank, "settle")]
        assert "injected failure of sync" in said[-1], (name, said)
    assert all(of_each(played["refused"], "keep_error"))
    torn, other = (values(rank, "keep_error") for rank in played["torn step"])
    assert (torn, other) == (["StorageError", "BrokenOptimizerError"], [""])
    written, _ = moves(played["torn step"][1])[-1]
    assert written >= FROZEN // 2


def test_steps_go_on_while_a_seal_writes(jobs: Jobs, tmp_path: Path) -> None:
    """The ranks write the next slots while the model file of an earlier one is written."""
    begun: Calls = [of("begin"), of("slow", 0.1), ["open"]]
    calls: Calls = [*begun, *[["step"], ["checkpoint"]] * 4, ["step"], ["step"], ["settle"]]
    cases: dict[str, Case] = {}
    for kind in ("ddp", "fsdp2"):
        cases[kind] = case(kind, [*calls, ["verify"]])
        in_memory, setting = case(kind, [of("begin"), ["open"], ["step", 6]])
        cases[f"memory-{kind}"] = (in_memory, {**setting, "is_plain": True})
    played = run_cases(jobs, tmp_path, cases, given=True)
    for kind in ("ddp", "fsdp2"):
        require_success(played[kind])
        assert of_each(played[kind], "step") == of_each(played[f"memory-{kind}"], "step")
        with offload.open_checkpoint(tmp_path / kind / "run") as checkpoint:
            assert checkpoint.step == 4
            assert checkpoint.verify().ok
        parts = [*(tmp_path / kind / "run/owner-1").glob("part-*")]
        assert len(parts) <= 4, "two checkpoints, one that is written, and one that is sealed"
