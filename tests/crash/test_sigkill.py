"""Killed with SIGKILL time and again, a run ends with the bits of one that nobody disturbed.

With ``FULL_TESTS=1`` there are 144 kills; NUM_KILLS=120 makes it 360, or as many more as wanted.
KILL_SEED chooses the moments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from gds import PosixBackend
from offload import list_checkpoints, open_checkpoint
from tests.campaigns import FULL
from tests.crash import killing
from tests.forking import Children
from tests.stores.training import Reference, differences

SEED = int(os.environ.get("KILL_SEED", "20260711"))
NUM_KILLS = int(os.environ.get("NUM_KILLS", "48" if FULL else "0"))
IS_CAMPAIGN = NUM_KILLS > 0
HALF = NUM_KILLS // 2
CASES = [
    *[(1, 1, False, None, NUM_KILLS), (2, 1, False, None, NUM_KILLS), (1, 3, False, None, HALF)],
    *[(2, 2, False, None, HALF), (1, 1, True, None, HALF), (2, 2, True, None, HALF)],
    *[(1, 1, False, "drive", NUM_KILLS), (2, 2, False, "drive", HALF)],
]
SMOKE = [(1, 1, False, None, 4), (2, 2, False, None, 4), (1, 2, True, None, 4)]
SMOKE += [(1, 1, False, "drive", 4)]

TIMEOUT_S = 20.0
"""For one kill, which takes less than a second."""


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    server = Children("tests.crash.killing")
    yield server
    server.close()


@pytest.mark.parametrize(
    ("keep", "drives", "only", "parameters", "num_kills"),
    CASES if IS_CAMPAIGN else SMOKE,
)
def test_killed_at_random_moments(
    keep: int,
    drives: int,
    only: bool,
    parameters: str | None,
    num_kills: int,
    children: Children,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    plan = {"keep": keep, "drives": drives, "only": only, "num_kills": num_kills, "seed": SEED}
    plan["parameters"] = parameters
    (tmp_path / killing.PLAN).write_text(json.dumps(plan))
    pid = children.start(killing.kill_at_random_moments, tmp_path)
    ended = children.wait(pid, tmp_path, 300.0 + TIMEOUT_S * num_kills)
    assert ended.status == 0, ended.output
    assert "Traceback" not in ended.output
    result = json.loads(ended.output.splitlines()[-1])
    print(f"KILL_SEED={SEED}, {plan}: {result}")
    record_property("kills", result["killed"])

    assert result["killed"] == num_kills == sum(result["phases"].values())
    if IS_CAMPAIGN:
        assert result["phases"].keys() >= {"s", "c"}, "kills must hit steps and seals"
    restored = result["restored"]
    assert all(earlier <= later for earlier, later in pairwise(restored))
    assert len(set(restored)) > num_kills // 10, "the run must have got on between the kills"
    first, *others = result["left"]
    first = [name for name in first if not name.strip(".").startswith(("status.", "history."))]
    store = tmp_path / "stores" / "killed"
    reduced = [info for info in list_checkpoints(store) if info.parameters_only]
    assert bool(reduced) == only
    first = [name for name in first if name not in {info.path[-13:] for info in reduced}]
    for info in reduced:
        with open_checkpoint(info.path) as found:
            expected = replace(Reference().after(info.step), arrays={})
            assert differences(found, PosixBackend(), expected) == []
    assert len(first) <= 1 + (drives > 1) + keep + 1, "LOCK, store.json, and keep + 1 slots"
    assert all(len(other) <= 1 + keep + 1 for other in others), "LOCK, and a part of each slot"

    last_step = result["last_step"]
    assert result["acknowledged"] == last_step
    name = f"step-{last_step:08d}"
    with open_checkpoint(store / name) as found:
        assert found.train_state == {"step": last_step}
        assert differences(found, PosixBackend(), Reference().after(last_step)) == []
        assert len(found.parts) == drives - 1
