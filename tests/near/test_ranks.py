"""Ranks with a server each: the bits of plain torch, and checkpoints that all servers have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import offload
from tests.near.ranks import SETTING, opened, plain, run
from tests.near.servers import Server
from tests.ranks_training.cases import Calls, of_each, values
from tests.ranks_training.models import Masters
from tests.ranks_training.rank_server import Jobs

SEAL: Calls = [["checkpoint"], ["result"]]


def own(path: str, *arguments: Any) -> list[Any]:
    """Return the call of a function below on a rank."""
    return ["do", f"tests.near.test_ranks:{path}", *arguments]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp"])
def test_stopped_and_resumed_they_have_the_bits_of_plain_torch(
    jobs: Jobs, urls: list[str], tmp_path: Path, kind: str
) -> None:
    begin: Calls = [["step"], ["step"], *SEAL, ["step"], *SEAL, ["step"], ["close"]]
    first = run(jobs, tmp_path, opened(urls, begin), kind=kind)
    expected = plain(jobs, tmp_path, 5, kind=kind)
    assert [values(rank, "step") for rank in first] == [bits[:4] for bits in expected]
    go_on: Calls = [["restore"], ["bits"], ["step"], ["step"], *SEAL]
    again = run(jobs, tmp_path, opened(urls, go_on), kind=kind)
    assert of_each(again, "restore") == [[3, {"step": 3, "rank": rank}] for rank in range(2)]
    assert of_each(again, "bits") == [bits[2] for bits in expected]
    assert [values(rank, "step") for rank in again] == [bits[3:] for bits in expected]


def test_each_server_has_whole_parameters_and_none_has_those_of_the_other(
    jobs: Jobs, servers: list[Server], urls: list[str], tmp_path: Path
) -> None:
    run(jobs, tmp_path, opened(urls, [["step"], *SEAL]))
    name = urls[0].rpartition("/")[2]
    parts = [
        load_file(server.runs / name / "step-00000001" / "model.safetensors") for server in servers
    ]
    assert not parts[0].keys() & parts[1].keys()
    found = {name: tuple(value.shape) for part in parts for name, value in part.items()}
    assert found == {
        "layers.0.weight": (70, 40),
        "layers.0.bias": (70,),
        "layers.1.weight": (33, 70),
        "layers.1.bias": (33,),
        "maybe.weight": (33, 33),
        "frozen": (5,),
        "seen": (),
    }
    sizes = [sum(value.numel() for value in part.values()) for part in parts]
    assert max(sizes) < 2 * min(sizes)


def keeping(calls: Any) -> list[Any]:
    """Say what the optimizer has: steps, pins, and whether the link has carried anything."""
    optimizer = calls.optimizer
    sent = optimizer.stats().to_server_bytes
    return [[one.step for one in optimizer.checkpoints()], [*optimizer.pins()], sent > 0]


def best_by(calls: Any, url: str) -> None:
    """Begin with a policy by metrics, which only rank 0 measures in earnest."""
    calls.open(directory=url, keep=offload.LastK(1) | offload.BestBy("loss"))


def sealed(calls: Any, loss: float) -> dict[str, float]:
    """Make a checkpoint with a metric that differs between the ranks."""
    made = calls.optimizer.checkpoint({}, metrics={"loss": loss + 10 * loss * calls.rank})
    return dict(made.result().metrics)


def test_pins_and_retention_are_the_same_on_all_servers(
    jobs: Jobs, urls: list[str], tmp_path: Path
) -> None:
    rest: Calls = [["step"], own("sealed", 0.1), ["pin", "first"]]
    for loss in (0.5, -0.1, 0.3, 0.7):
        rest += [["step"], own("sealed", loss)]
    rest += [own("keeping"), ["unpin", "first"], ["restore", 3, {"discard_newer": True}]]
    rest += [own("keeping")]
    ranks = run(jobs, tmp_path, [[own("best_by", url), *rest] for url in urls])
    said = [values(rank, "do") for rank in ranks]
    for rank, own_said in enumerate(said):
        assert own_said[1]["loss"] == 0.1
        assert own_said[1].keys() == {"loss", f"rank_{rank}_of_2"}
        # The newest, the best, the pinned one, and one more than was asked for.
        assert own_said[-2] == [[1, 3, 4, 5], ["first"], True]
        assert own_said[-1] == [[1, 3], [], True]
    assert of_each(ranks, "restore") == [[3, {}]] * 2


def test_a_second_checkpoint_of_a_step_is_the_first_one_or_refused(
    jobs: Jobs, urls: list[str], tmp_path: Path
) -> None:
    again: Calls = [["step"], *SEAL, ["checkpoint"], ["result"], ["step"], *SEAL]
    again += [["checkpoint", {"train_state": {"other": 1}}]]
    for rank in jobs.run(tmp_path, opened(urls, again), **SETTING):
        assert values(rank, "result") == [1, 1, 2]
        assert rank.failed() == ["SealError"]
        assert "step 2 is a checkpoint already" in rank.outcomes[-1]["message"]


def alone(calls: Any) -> int:
    """Wait for a checkpoint on one rank, while the other one does something else."""
    return int(calls.handle.result().step) if calls.rank == 0 else 0


def test_one_rank_alone_may_wait_for_a_checkpoint(
    jobs: Jobs, urls: list[str], tmp_path: Path
) -> None:
    calls: Calls = [["step"], ["checkpoint"], own("alone"), ["backward"], ["update"]]
    assert of_each(run(jobs, tmp_path, opened(urls, calls)), "do") == [1, 0]


def bad_gradient(calls: Any) -> None:
    """Take a step that one rank cannot take."""
    calls.backward()
    if calls.rank == 1:
        calls.sparse_gradient()
    calls.update()


def test_a_step_that_fails_on_one_rank_is_given_up_by_all(
    jobs: Jobs, urls: list[str], tmp_path: Path
) -> None:
    begin: Calls = [["step"], *SEAL, ["step"], own("bad_gradient")]
    rest: Calls = [["update"], ["checkpoint"], ["zero"], ["restore"], ["step"], ["step"], ["step"]]
    ranks = jobs.run(tmp_path, opened(urls, [*begin, *rest]), **SETTING)
    for rank in ranks:
        assert rank.failed() == [
            "UnsupportedParameterError",
            "BrokenOptimizerError",
            "BrokenOptimizerError",
        ]
    said = [rank.of("do")["message"] for rank in ranks]
    assert "is sparse" in said[1]
    assert said[0].startswith("rank 1")
    expected = plain(jobs, tmp_path, 4)
    assert [values(rank, "step")[-3:] for rank in ranks] == [bits[1:] for bits in expected]


def grouped(calls: Any, url: str) -> None:
    """Make an optimizer, or masters in memory, of two groups; one server has the first alone."""
    first, *others = calls.model.parameters()
    groups = [{"params": [first], "lr": 0.1}, {"params": others, "weight_decay": 0.2}]
    if calls.setting.is_plain:
        calls.masters = Masters("AdamW", groups, calls.setting.hyper)
    else:
        calls.open(params=groups, model=None, directory=url)


def test_groups_of_one_server_alone_and_parameters_without_a_model(
    jobs: Jobs, urls: list[str], tmp_path: Path
) -> None:
    begin: Calls = [["step"], ["step"], *SEAL, ["step"]]
    first = run(jobs, tmp_path, [[own("grouped", url), *begin] for url in urls])
    go_on: Calls = [["restore"], ["step"]]
    again = run(jobs, tmp_path, [[own("grouped", url), *go_on] for url in urls])
    in_memory: Calls = [own("grouped", ""), *[["step"]] * 3]
    expected = run(jobs, tmp_path / "plain", [in_memory] * 2, is_plain=True)
    assert [values(rank, "step") for rank in first] == [values(rank, "step") for rank in expected]
    assert of_each(again, "step") == of_each(expected, "step")


def test_a_checkpoint_that_is_damaged_on_one_server_is_given_up_on_all(
    jobs: Jobs, servers: list[Server], urls: list[str], tmp_path: Path
) -> None:
    run(jobs, tmp_path, opened(urls, [["step"], *SEAL, ["step"], *SEAL]))
    folder = servers[1].runs / urls[1].rpartition("/")[2] / "step-00000002"
    model = folder / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"?")
    calls: Calls = [["restore"], ["restore"], ["step"], ["step"], *SEAL]
    ranks = jobs.run(tmp_path, opened(urls, calls), **SETTING)
    expected = plain(jobs, tmp_path, 3)
    for number, rank in enumerate(ranks):
        assert rank.failed() == ["DamagedError"]
        assert values(rank, "restore") == [None, [1, {"step": 1, "rank": number}]]
        assert values(rank, "step") == expected[number][1:]
