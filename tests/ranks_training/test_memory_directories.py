"""Ranks whose state stays in the memory of directories: one cause for all, and the same bits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gds import probe
from tests.limits import UNREACHED_AGREEMENT_S, UNREACHED_S
from tests.ranks_training.rank_server import Jobs


@pytest.fixture
def shm() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield Path(path)
    except OSError as error:
        pytest.skip(f"no writable /dev/shm: {error}")


def opened(directory: Path, size: int | None = 1 << 20) -> list[Any]:
    module = "tests.ranks_training.memory_calls"
    return ["do", f"{module}:open_in", str(directory), size]


KEPT = ["do", "tests.ranks_training.memory_calls:kept_bytes"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_directory_that_one_rank_cannot_use_is_refused_by_all(
    jobs: Jobs, tmp_path: Path, shm: Path, kind: str
) -> None:
    if probe.mount_of(str(tmp_path)).filesystem in probe.MEMORY_FILESYSTEMS:
        pytest.skip(f"{tmp_path} is memory")
    then = [opened(shm), ["step"], ["step"], KEPT, ["checkpoint"], ["result"], ["verify"]]
    store = tmp_path / "store"
    store.mkdir()
    calls = [[opened(shm), *then], [opened(tmp_path), *then]]
    ranks = jobs.start(store, calls, kind=kind, timeout_s=UNREACHED_AGREEMENT_S).wait(UNREACHED_S)
    assert [rank.status for rank in ranks] == [0, 0], [rank.outcomes for rank in ranks]
    for number, rank in enumerate(ranks):
        refused = rank.outcomes[0]
        assert refused["error"] == ("RefusedError" if number else "RanksError")
        assert "whose files are not memory" in refused["message"]
        assert ("rank 1" in refused["message"]) == (number == 0)
        assert rank.failed() == [refused["error"]]
        assert rank.of("verify")["value"] == []
        kept = [one["value"] for one in rank.outcomes if one["call"] == "do"]
        assert kept[-1] > 0
    (tmp_path / "plain").mkdir()
    plain = jobs.run(tmp_path / "plain", [[["open"], ["step", 2]]] * 2, kind=kind, is_plain=True)
    assert [rank.of("step")["value"] for rank in ranks] == [
        rank.of("step")["value"] for rank in plain
    ]


def test_ranks_must_say_how_much_each_takes(jobs: Jobs, tmp_path: Path, shm: Path) -> None:
    ranks = jobs.start(tmp_path, [[opened(shm, None)]] * 2, kind="ddp").wait(UNREACHED_S)
    for rank in ranks:
        assert "2 ranks take memory" in rank.outcomes[0]["message"]
