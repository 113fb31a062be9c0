"""What ranks with a server each cannot do is refused by name on all of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import offload
from tests.near.ranks import SETTING, opened, run
from tests.near.servers import Server
from tests.ranks_training.cases import Calls, errors
from tests.ranks_training.rank_server import Jobs

SEAL: Calls = [["checkpoint"], ["result"]]
BEGIN: Calls = [["step"], *SEAL]


def refused(jobs: Jobs, folder: Path, calls: list[Calls], **setting: Any) -> list[tuple[str, str]]:
    """Run ranks that end with a call that fails, the only one; return the errors and messages."""
    folder.mkdir(exist_ok=True)
    found = []
    for rank in jobs.run(folder, calls, **{**SETTING, **setting}):
        assert [one["call"] for one in errors(rank)] == [rank.outcomes[-1]["call"]], rank.outcomes
        found.append((rank.outcomes[-1]["error"], rank.outcomes[-1]["message"]))
    return found


def with_policy(calls: Any, url: str) -> None:
    """Begin with a policy that goes by the clock."""
    calls.open(directory=url, keep=offload.LastK(2) | offload.EverySeconds(60))


def test_clocks_and_steps_beside_the_forward(jobs: Jobs, urls: list[str], tmp_path: Path) -> None:
    policy = [[["do", "tests.near.test_ranks_refused:with_policy", url]] for url in urls]
    beside = {"options": {"backend": None, "overlap": "forward"}}
    found = refused(jobs, tmp_path, policy) + refused(jobs, tmp_path, opened(urls, []), **beside)
    for _, message in found:
        assert "overlap= and EverySeconds" in message


def test_two_ranks_of_one_run(jobs: Jobs, urls: list[str], tmp_path: Path) -> None:
    found = refused(jobs, tmp_path, opened([urls[0], urls[0]], []))
    assert {error for error, _ in found} == {"StoreLockedError", "RanksError"}
    for _, message in found:
        assert "another client trains here" in message
    run(jobs, tmp_path, opened(urls, BEGIN))  # nothing is left of it


def test_a_server_and_a_directory(jobs: Jobs, urls: list[str], tmp_path: Path) -> None:
    calls = opened([urls[0], str(tmp_path / "run")], [])
    for _, message in refused(jobs, tmp_path, calls):
        assert "differ in directory=" in message


def test_other_numbers_of_ranks_and_servers_of_other_ranks(
    jobs: Jobs, servers: list[Server], urls: list[str], tmp_path: Path
) -> None:
    run(jobs, tmp_path, opened(urls, BEGIN))
    name = urls[0].rpartition("/")[2]
    for _, message in refused(jobs, tmp_path, opened([*urls, servers[0].url(f"{name}-3")], [])):
        assert "was made by rank_" in message
    (alone,) = refused(jobs, tmp_path, opened([urls[0]], [["restore"]]), kind="one")
    assert alone[0] == "MismatchError"
    for _, message in refused(jobs, tmp_path, opened(urls[::-1], [])):
        assert "was made by rank_" in message
        assert "give each rank the server that it had" in message
    run(jobs, tmp_path, opened(urls, [["restore"], ["step"]]))  # nothing has changed


def test_runs_without_a_common_checkpoint(
    jobs: Jobs, servers: list[Server], urls: list[str], tmp_path: Path
) -> None:
    name = urls[0].rpartition("/")[2]
    run(jobs, tmp_path, opened(urls, BEGIN))
    other = [server.url(f"{name}-other") for server in servers]
    run(jobs, tmp_path, opened(other, BEGIN))
    # Another training has a checkpoint of the same step, and parameters of the same names.
    mixed = [urls[0], other[1]]
    for error, message in refused(jobs, tmp_path, opened(mixed, [["restore"]])):
        assert error == "CheckpointNotFoundError"
        assert "rank 0 has [1]; rank 1 has [1]" in message
    shutil.rmtree(servers[1].runs / name)
    for error, message in refused(jobs, tmp_path, opened(urls, [["restore"]])):
        assert error == "CheckpointNotFoundError"
        assert "rank 0 has [1]; rank 1 has []" in message
    for error, _ in refused(jobs, tmp_path, opened(urls, [["step"]])):
        assert error in ("NotRestoredError", "RanksError")
    again: Calls = [["step"], ["step"], *SEAL]
    run(jobs, tmp_path, opened(urls, again, fresh=True))
    found = run(jobs, tmp_path, opened(urls, [["restore"]]))
    assert [rank.of("restore")["value"][0] for rank in found] == [2, 2]


def test_a_reference_of_one_rank(jobs: Jobs, urls: list[str], tmp_path: Path) -> None:
    for error, message in refused(jobs, tmp_path, opened(urls, [*BEGIN, ["load", "reference"]])):
        assert (error, message) == (
            "NearError",
            "load_state_dict() needs one store for all ranks: call restore()",
        )


def one_parameter(calls: Any, url: str) -> None:
    """Begin with a single parameter."""
    calls.open(params=[next(calls.model.parameters())], model=None, directory=url)


def test_more_ranks_than_parameters(jobs: Jobs, urls: list[str], tmp_path: Path) -> None:
    calls = [[["do", "tests.near.test_ranks_refused:one_parameter", url]] for url in urls]
    for _, message in refused(jobs, tmp_path, calls):
        assert "of 2 would have no parameter: use fewer ranks" in message
