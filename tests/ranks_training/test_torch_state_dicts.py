"""State of several ranks in and out by torch's own functions for state dicts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.integrations.rank_jobs import RankJobs
from tests.ranks_training.cases import Case, do, of_each, require_success, run_cases, values
from tests.ranks_training.exchange_calls import WIDTHS, load, plain
from tests.ranks_training.rank_server import Jobs, Rank
from tests.ranks_training.test_readers import FP32, call, loaded

EXAMPLES = Path(__file__).parents[2] / "docs/examples"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CASES: dict[str, tuple[int, dict[str, Any], list[list[Any]]]] = {
    # Ranks, setting, and calls.
    # Training with torch's state dicts, beside torch's own optimizer.
    "beside flat": (2, {"kind": "fsdp2"}, [call("beside_torch", flat=True, amsgrad=True)]),
    "beside momentum": (
        2, {"kind": "fsdp2"}, [call("beside_torch", optimizer="SGD", momentum=0.9)],
    ),
    "beside unstepped": (2, {"kind": "fsdp2"}, [call("beside_torch", skip="maybe")]),
    "beside full": (2, {"kind": "fsdp2"}, [call("beside_torch", full=True)]),
    "beside tensor-parallel": (2, {"kind": "tp"}, [call("beside_torch")]),
    "beside hsdp": (4, {"kind": "hybrid"}, [call("beside_torch")]),
    "saved ddp": (2, {"kind": "ddp"}, []),
    "saved fsdp2": (2, {"kind": "fsdp2"}, []),
    "saved fsdp-tp": (4, {"kind": "grid"}, []),
    # State of torch's own optimizer.
    "given ddp": (2, {"kind": "ddp"}, [call("from_torch")]),
    "given fsdp2": (2, {"kind": "fsdp2"}, [call("from_torch")]),
    "given from rank 0": (2, {"kind": "fsdp2"}, [call("from_torch", full=True)]),
    "given hsdp": (4, {"kind": "hybrid"}, [call("from_torch")]),
    # The whole state goes into another store.
    "there ddp": (2, {"kind": "ddp", "dtype": "bfloat16"}, [call("there_and_back")]),
    "there fsdp2": (2, {"kind": "fsdp2", "dtype": "bfloat16"}, [call("there_and_back")]),
    "there hsdp": (4, {"kind": "hybrid"}, [call("there_and_back")]),
    # State of another cut is held before the first step.
    "cut": (2, {"kind": "ddp"}, [call("train")]),
    "cut/other": (2, {"kind": "fsdp2"}, [call("held_after_restore")]),
    "shards": (2, {"kind": "fsdp2"}, [call("other_shards")]),
    "not held": (
        2, {"kind": "fsdp2"},
        [["open"], ["step"], do("odd_calls:ask_for_the_state"), ["step"]],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dicts")


@pytest.fixture(scope="module")
def played(jobs: Jobs, folder: Path) -> dict[str, list[Rank]]:
    """Return what ranks have done in each case; what they save is in folders ``dcp NAME``."""
    found: dict[str, list[Rank]] = {}
    for size in (2, 4):
        cases: dict[str, Case] = {}
        for name, (num, setting, calls) in CASES.items():
            saves = [call("beside_torch", out=str(folder / f"dcp {name}"))]
            if num == size:
                cases[name] = ([calls or saves] * size, {**FP32, **setting})
        found |= run_cases(jobs, folder, cases, widths=WIDTHS)
    assert [rank.failed() for rank in found["not held"]] == [["KeyError"]] * 2
    for name, ranks in found.items():
        if name != "not held":
            require_success(ranks)
    return found


def test_each_rank_has_the_state_that_torchs_optimizer_would_have(
    played: dict[str, list[Rank]],
) -> None:
    for name in (one for one in played if one.startswith(("beside", "saved"))):
        for found in of_each(played[name], "do"):
            assert found["different"] == [], name
            assert found["stepped"], name
            assert found["empty"], name


def test_dcp_saves_it_and_torchs_own_optimizer_goes_on_to_the_same_bits(
    jobs: Jobs, played: dict[str, list[Rank]], folder: Path, tmp_path: Path
) -> None:
    saved = {name: str(folder / f"dcp {name}") for name in played if name.startswith("saved")}
    loads = {name: call("load", path, num=2, is_ours=False) for name, path in saved.items()}
    for name, found in loaded(jobs, tmp_path, 3, loads).items():
        assert [one["digest"] for one in found] == [plain(5)] * 3, name
    alone = load(None, saved["saved fsdp-tp"], kind="one", num=2, is_ours=False)
    assert alone["digest"] == plain(5)


def test_state_of_torchs_own_optimizer_is_loaded(played: dict[str, list[Rank]]) -> None:
    """The whole state also goes into another store, and what is not held is refused."""
    for name in (one for one in played if one.startswith("given")):
        assert of_each(played[name], "do") == [plain(5)] * len(played[name]), name
    for name in (one for one in played if one.startswith("there")):
        for found in of_each(played[name], "do"):
            assert found["found"] == found["expected"], name
            has_masters = any(key.startswith("master") for key in found["expected"])
            assert has_masters == ("dtype" in CASES[name][1])


def test_whole_tensors_are_loaded_and_other_shards_are_refused_on_all_ranks(
    played: dict[str, list[Rank]],
) -> None:
    assert of_each(played["cut/other"], "do") == [plain(3)] * 2
    for number, rank in enumerate(played["shards"]):
        ((shards, bad, is_same),) = values(rank, "do")
        assert "Redistribute it" in shards
        assert "MismatchError" in shards
        assert "num_steps" in bad
        assert number == 0 or "rank 0" in bad
        assert is_same == "True"


def test_the_example_of_plain_torch_goes_on_from_the_masters(jobs: Jobs, tmp_path: Path) -> None:
    """Two ranks of the example have the losses of one process that goes on in torch."""
    example, store = EXAMPLES / "dcp_load.py", tmp_path / "run"
    found: dict[str, Any] = {}
    exec(compile(example.read_text(), str(example), "exec"), found)
    torch.manual_seed(3)
    live = found["make_model"]().bfloat16()
    options = offload.Options(drives=offload.DriveTuning(calibrate=False))
    with offload.AdamW(
        live.named_parameters(), lr=1e-3, directory=store, model=live, options=options
    ) as optimizer:
        for _ in range(3):
            live(torch.randn(16, found["WIDTH"]).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.checkpoint().result()
        state = optimizer.full_state_dict()
    model = found["make_model"]()
    masters = dict(zip(dict(model.named_parameters()), state["master"].values(), strict=True))
    model.load_state_dict(masters)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain.load_state_dict(state)
    expected = []
    torch.manual_seed(1)
    for _ in range(3):
        x = torch.randn(16, found["WIDTH"])
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        plain.step()
        plain.zero_grad()
        expected.append(loss.item())
    arguments = [f"--directory={store}", "--steps=3"]
    examples = RankJobs(jobs, "")
    examples.run(tmp_path, example="dcp_load.py", arguments=arguments)
    printed = examples.printed[0]
    assert "loaded step 3" in printed
    losses = {int(n): float(x) for n, x in re.findall(r"step (\d+) loss (\S+)", printed)}
    assert list(losses) == [4, 5, 6]
    assert [*losses.values()] == pytest.approx(expected, rel=1e-5)
