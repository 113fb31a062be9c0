"""Ranks whose model is mostly frozen write little at each seal: what the slot's file lacks.

Also if seals fail. This module has what a rank does for that as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from gds import Buffer, File, IOFuture, PosixBackend, WrapperBackend
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
        self._backend.written += len(data) * self._is_model
        super().write_bytes(data, offset)

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        self._backend.read_back += into.nbytes * self._is_model
        return super().read_again(into, offset, direct=direct)


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
    fails: Calls = [["only", 1, ["fail", "write", "model.safetensors"]]]
    cases = {"": case("fsdp2", [*BEGIN, *before, *fails, *failed])}
    ranks = run_cases(jobs, tmp_path, cases, widths=WIDTHS, given=True)[""]
    require_success(ranks)
    for rank in ranks:
        found = [written for written, _ in moves(rank)][NUM_SLOTS + 2 :]
        assert found[0] >= FROZEN // 2
        # Only the ranks' next agreement on the slot gives its content a name again.
        assert found[NUM_SLOTS] >= FROZEN // 2
        others = [*found[1:NUM_SLOTS], *found[NUM_SLOTS + 1 :]]
        assert all(written <= MOST for written in others), found
    require_whole(ranks, tmp_path, 3 * NUM_SLOTS + 3)


def test_what_a_torn_step_and_a_failed_sync_leave_in_model_files_is_written_anew(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Two faults at once: the writer has no slot of its own in the seal whose sync fails."""
    calls: Calls = [
        *BEGIN, *ROUND * (NUM_SLOTS + 1), ["close"], *BEGIN, ["restore"], fill(2.0),
        ["only", 0, ["fail", "read", "exp_avg"]], ["only", 0, ["keep_error", "step"]],
        ["only", 1, ["step"]], ["only", 1, ["fail", "sync", "model.safetensors"]],
        ["keep_error", "checkpoint"], ["settle"], ["restore"], fill(2.0), *COUNT, *END,
    ]  # fmt: skip
    ranks = run_cases(jobs, tmp_path, {"": case("fsdp2", calls)}, widths=WIDTHS, given=True)[""]
    failed = [one["call"] for rank in ranks for one in errors(rank)]
    assert failed == ["settle"]
    require_whole(ranks, tmp_path, NUM_SLOTS + 2)
    torn, other = (values(rank, "keep_error") for rank in ranks)
    assert (torn, other) == (["StorageError", "BrokenOptimizerError"], [""])
    assert "injected failure of sync" in ranks[1].of("settle")["value"]
    written, _ = moves(ranks[1])[-1]
    assert written >= FROZEN // 2
