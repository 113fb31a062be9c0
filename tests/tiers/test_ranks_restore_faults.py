"""Faults while several ranks restore from a tier: all have the cause, and nothing is done twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.campaigns import FULL
from tests.limits import SHORT_AGREEMENT_S
from tests.ranks_training.rank_server import Jobs
from tests.tiers import rank_jobs
from tests.tiers.proxy import Proxy, Request
from tests.tiers.test_ranks_restore import case, is_content

STALLED = ["COMPLETE.json", "train_state.safetensors", *(["manifest.json"] if FULL else [])]


def test_a_part_that_cannot_be_sealed_makes_only_its_own_rank_fetch_again(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    """The others have sealed theirs by then, and find them in the next call of the same job."""
    rank_jobs.run(jobs, tmp_path, "run", 3, case("replicas", s3, 2))
    expected = rank_jobs.run(jobs, tmp_path, "run", 3, case("replicas", "", last=3))
    proxy.requests.clear()
    setting = case("replicas", s3, last=3, retries=1, unsealed=1, nth_table=2)
    found = rank_jobs.run(jobs, tmp_path, "new", 3, setting)
    for number, rank in enumerate(found):
        ((_, message),) = rank.pop("errors")
        assert "injected failure of write_bytes" in message, message
        assert ("rank 1" in message) == (number != 1)
    assert [(rank["resumed"], rank["bits"]) for rank in found] == [
        (2, rank["bits"]) for rank in expected
    ]
    asked = Counter((one.path, one.range) for one in proxy.requests if is_content(one))
    again = {path for (path, _), number in asked.items() if number > 1}
    assert all("/owner-1/" in path for path in again)
    assert {number for (path, _), number in asked.items() if "/owner-2/" in path} == {1}


@pytest.mark.parametrize("stalled", STALLED)
def test_a_server_that_accepts_and_stalls_is_named_by_all_ranks(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, stalled: str
) -> None:
    """The limit of the tier is longer than that after which a silent rank counts as lost.

    Both pass while nothing happens but that the server stalls; from then on the latter is short.
    """
    rank_jobs.run(jobs, tmp_path, "run", 2, case("replicas", s3, 1))

    def rule(one: Request) -> str:
        if one.method == "GET" and one.path.endswith(stalled):
            (tmp_path / "hurry").touch()
            return "hang"
        return ""

    proxy.rule = rule
    setting = case("replicas", s3, last=2, tier_timeout_s=2 * SHORT_AGREEMENT_S)
    found = rank_jobs.run(jobs, tmp_path, "new", 2, setting)
    for rank in found:
        ((_, message),) = rank["errors"]
        assert "does not answer" in message, message
        assert "lost" not in message
    assert found[0]["errors"][0][0] == "TierUnavailableError"


def test_warnings_as_errors_end_the_restore_on_all_ranks(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    proxy.rule = lambda one: (
        "503" if one.path.endswith("COMPLETE.json") and one.method == "PUT" else ""
    )
    rank_jobs.run(jobs, tmp_path, "run", 2, case("replicas", s3, 1, finish_s=2.0))
    proxy.rule = lambda _: ""
    setting = case("replicas", s3, last=1, strict=True)
    first, second = rank_jobs.run(jobs, tmp_path, "new", 2, setting)
    assert [kind for kind, _ in first["errors"]] == ["RuntimeWarning"]
    assert [kind for kind, _ in second["errors"]] == ["RanksError"]
    for rank in (first, second):
        assert "no complete copy of a checkpoint" in rank["errors"][0][1]
        assert "bits" not in rank, "it has trained"
