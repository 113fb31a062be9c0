"""Ranks on several hosts, each with drives of its own, which train into one store.

The hosts are directories of one machine; only what a rank says of its own running system is set by
the test.
"""

from __future__ import annotations

from pathlib import Path

import offload
from tests.ranks_training.cases import (
    ROUND,
    Calls,
    Case,
    do,
    durable,
    errors,
    names,
    of_each,
    on,
    require_success,
    run_all,
    run_cases,
    values,
)
from tests.ranks_training.rank_server import Jobs

__all__ = ["on", "run_all"]

AGAIN: Calls = [["restore"], *ROUND]
BEGUN: Case = ([[*on(host), *ROUND] for host in "ab"], {})


def verified(folder: Path) -> offload.Checkpoint:
    """Return the newest checkpoint of hosts a and b, which is whole."""
    checkpoint = offload.open_checkpoint(folder / "a", parts=[folder / "b"])
    assert checkpoint.verify().ok
    return checkpoint


def test_hosts_that_are_missing_changed_fresh_or_damaged(jobs: Jobs, tmp_path: Path) -> None:
    """One error says who lacks what; ranks that have changed hosts take what is there.

    What runs without a checkpoint have left on hosts is no copy.
    """
    missing = tmp_path / "missing"
    swapped = [[*on(host), *AGAIN] for host in "ba"]
    cases: dict[str, Case] = {
        "one": ([[["open"], *ROUND]] * 2, {}),
        "one/again": ([[["open"], *AGAIN]] * 2, {}),
        "changed": BEGUN,
        "changed/again": (swapped, {}),
        "left": ([on(host) for host in "ab"], {}),
        "left/first": ([[*on(host), *ROUND] for host in "ba"], {}),
        "left/second": ([[*on(host), *AGAIN] for host in "ba"], {}),
        "left/third": ([[*on(host), *AGAIN] for host in "ab"], {}),
        "damaged": ([[*on(host), *ROUND, *ROUND] for host in "ab"], {}),
        "missing": BEGUN,
        **{f"missing/{hosts}": ([on(h) for h in hosts], {}) for hosts in ("ac", "aa", "bb", "cb")},
        "missing/there": ([[*on(host), *AGAIN] for host in "ab"], {}),
    }
    played = run_cases(jobs, tmp_path, cases)
    for hosts in ("ac", "aa", "bb", "cb"):
        for rank in played.pop(f"missing/{hosts}"):
            (failed,) = errors(rank)
            if "a" in hosts:
                assert "has parts of owner 1, and no rank sees them" in failed["message"]
                assert "rank 0 on a sees the first directory" in failed["message"]
                assert "c" not in hosts or "rank 1 on c sees nothing" in failed["message"]
            else:
                assert "no rank sees the first directory of store" in failed["message"]
                assert "rank 1 on b sees owner 1" in failed["message"]
    for ranks in played.values():
        require_success(ranks)
    assert names(missing) == ["a/step-00000001", "a/step-00000002", "b/owner-1"]
    found = played["changed/again"]
    assert of_each(found, "restore") == [[1, {"step": 1, "rank": number}] for number in range(2)]
    assert of_each(found, "step") == of_each(played["one/again"], "step")
    with verified(tmp_path / "changed") as checkpoint:  # its writer is not rank 0
        assert checkpoint.train_states == [{"step": 2, "rank": rank} for rank in range(2)]
    assert of_each(played["left/third"], "result") == [3, 3]
    parts = (tmp_path / "damaged/b/owner-1").glob("part-*")
    next(max(parts, key=lambda p: p.stat().st_mtime).glob("*exp_avg.safetensors")).unlink()
    again = run_all(jobs, tmp_path / "damaged", [[*on(host), *AGAIN] for host in "ab"])
    assert [step for step, _ in of_each(again, "restore")] == [1, 1]


def test_hosts_with_several_drives_and_calls_besides_training(jobs: Jobs, tmp_path: Path) -> None:
    """Pins, an older checkpoint, other train states for the same step, and a fresh start.

    A fresh start may have more ranks than the store has owners.
    """
    calls: Calls = [
        *ROUND, *ROUND, ["pin", "best"], ["unpin", "best"],
        ["checkpoint", {"train_state": {"other": 1}}], ["result"],
        ["restore", 1, {"discard_newer": True}], *ROUND,
    ]  # fmt: skip
    drives = {"a": ["a0", "a1"], "b": ["b0", "b1"]}
    hosts = "aabb"
    swapped = [[*on(host, *drives[host][::-1]), *AGAIN] for host in hosts]
    cases: dict[str, Case] = {
        "run": ([[*on(host, *drives[host]), *calls] for host in hosts], {}),
        "run/again": (swapped, {}),
        "run/fresh": ([[*on(host, *drives[host], fresh=True), *ROUND] for host in hosts], {}),
    }
    played = run_cases(jobs, tmp_path, cases)
    for ranks in played.values():
        require_success(ranks)
    assert of_each(played["run/again"], "result") == [3] * 4
    found = names(tmp_path / "run")
    assert {"a0/step-00000001", "a1/owner-1", "b0/owner-2", "b1/owner-3"} <= {*found}
    few = tmp_path / "few"
    run_all(jobs, few, BEGUN[0])
    more = run_all(jobs, few, [[*on(host, fresh=True), *ROUND, *ROUND] for host in "abb"])
    assert of_each(more, "result") == [2] * 3
    more = run_all(jobs, few, [[*on(host), *AGAIN] for host in "abb"])
    assert [step for step, _ in of_each(more, "restore")] == [2] * 3


def test_the_writer_is_killed_and_the_hosts_resume_the_newest_durable_checkpoint(
    jobs: Jobs, tmp_path: Path
) -> None:
    killed: Calls = [*on("a"), *ROUND, ["kill_at", "rename", "step-", 2], ["train", 9, 1]]
    ranks = jobs.run(tmp_path, [killed, [*on("b"), *ROUND, ["train", 9, 1]]])
    assert ranks[0].status == -9
    assert ranks[1].has_come_to_its_end, ranks[1].errors
    found = run_all(jobs, tmp_path, [[*on(host), *AGAIN] for host in "ab"])
    (step,) = {step for step, _ in of_each(found, "restore")}
    assert step >= durable(ranks)
    verified(tmp_path).close()


def test_a_host_without_the_checkpoints_is_told_no_train_state_of_before(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Its checkpoints are known anew after each `pin`; a step is sealed again all the same."""
    look, generation = do("odd_calls:sealed_train_state"), do("odd_calls:generation")
    other = ["checkpoint", {"train_state": {"other": 1}}]
    calls: Calls = [
        *ROUND, ["restore"], generation, other, look, ["pin", "best"], other, ["result"],
        generation, ["restore"],
    ]  # fmt: skip
    near, far = run_all(jobs, tmp_path, [[*on(host), *calls] for host in "ab"])
    for rank in (near, far):
        first, told, second = values(rank, "do")
        assert first == second, "the same step was stored again"
        assert told == {"other": 1} if rank is near else "has not been sent here" in told
        assert rank.of("restore")["value"] == [1, {"other": 1}]
