"""Several processes: what is refused by name before a directory is touched, and what is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import offload
from gds import MemoryBackend, PosixBackend
from offload import AdamW, open_checkpoint
from offload.distributed.rank_group import require_beside_forward
from offload.errors import ProcessGroupError
from tests.dying import dying
from tests.stores.training import Model, Reference, differences, optimizer_for, options
from tests.threads import one_thread
from tests.torch_contract.ranks import NUM_RANKS, STEPS

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Run the two processes; returns their directory, and what each of them has found."""
    root = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch_contract.ranks", str(root)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            dying([*command, str(rank)]),
            stdout=pipe,
            stderr=pipe,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for rank in range(NUM_RANKS)
    ]
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=280)
            assert process.returncode == 0, err
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return root, found


def test_several_ranks_train_into_one_directory_and_no_other(ranks: Any) -> None:
    root, found = ranks
    for one in found:
        for case in ("one directory for all", "ddp of several ranks", "a group of one"):
            assert one[case] == "constructed"
        assert one["one directory each"].startswith("RanksError: open(): rank 1 on ")
        assert "each-1' is not the directory of rank 0" in one["one directory each"]
    assert (root / "common").is_dir()
    assert not [*root.glob("each-*")]


def test_one_of_several_ranks_says_what_was_resumed(ranks: Any) -> None:
    root, found = ranks
    expected = f"offload: resumed step 1 from {root}/resumed/step-00000001\n"
    assert [one["resumed"] for one in found] == [expected, ""]


def test_ranks_go_on_in_a_store_of_one_process_that_gave_up_state(ranks: Any) -> None:
    for found in ranks[1]:
        refused, restored, *listed = found["beside"]
        assert "step-00000001: parameters only" in refused
        assert (restored, listed) == ("3", ["1 only", "2 only", "3", "4"])


def test_what_ranks_cannot_do_yet_is_refused_before_anything_is_touched(ranks: Any) -> None:
    for found in ranks[1]:
        assert found["overlap backward"].startswith('ValueError: overlap="backward" is not supp')
        assert "ParametersOnly(...) does not work with several ranks" in found["parameters only"]
        assert "DriveTuning(shares=...) is not supported with several ranks" in found["shares"]
        assert 'parameters="drive" is not supported with several' in found["parameters on drive"]
        assert found["environment"].startswith("ProcessGroupError: the environment has WORLD_SIZE=")
        assert "call torch.distributed.init_process_group() before" in found["environment"]
        assert found["made"] == []


def test_steps_beside_the_forward_are_refused_where_they_were_not_tried() -> None:
    """By the function itself: there is no GPU here whose parameters an optimizer could take."""
    with FakeTensorMode():
        parameter = torch.empty(1, device="cuda:1")
    with pytest.raises(ValueError, match=r"with NCCL for example: 'w' is on cuda:1"):
        require_beside_forward([("v", torch.empty(1)), ("w", parameter)])


@pytest.mark.parametrize(
    ("case", "words", "remedy"),
    [
        ("ddp", "model= is a DistributedDataParallel", "pass that module (`ddp.module`)"),
        ("ddp inside", "model= has a DistributedDataParallel in it ('net')", "pass that module"),
        ("fsdp", "model= is a FullyShardedDataParallel", "use torch.distributed.fsdp.fully_shard"),
        ("fsdp of several ranks", "model= is a FullyShardedDataParallel", "fully_shard instead"),
    ],
)
def test_a_wrapped_model_is_refused_by_name(ranks: Any, case: str, words: str, remedy: str) -> None:
    for found in ranks[1]:
        assert found[case].startswith(f"ProcessGroupError: {words}")
        assert remedy in found[case]
        assert found["ddp.module"] == "constructed"


@pytest.mark.parametrize(
    ("case", "name"),
    [("fsdp2", "0.weight"), ("fsdp2 without model", "group0.param0"), ("fsdp2 frozen", "1.0.wei")],
)
def test_sharded_parameters_are_refused_by_name(ranks: Any, case: str, name: str) -> None:
    for found in ranks[1]:
        assert found[case].startswith(f"UnsupportedParameterError: '{name}")
        assert "is a DTensor" in found[case]


def test_separate_models_are_trained_to_the_bits_of_plain_torch(ranks: Any) -> None:
    for rank in range(NUM_RANKS):
        with open_checkpoint(ranks[0] / f"own-{rank}", backend=PosixBackend(direct=False)) as found:
            assert differences(found, found.backend, Reference(history=rank).after(STEPS)) == []
            found.backend.close()


def test_one_rank_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MemoryBackend()
    for size in ("1", "", "many"):
        monkeypatch.setenv("WORLD_SIZE", size)
        optimizer_for(Model(), "/run", options(backend)).close()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ProcessGroupError, match="WORLD_SIZE=4"):
        optimizer_for(Model(), "/other", options(backend))
    assert backend.stat("/other") is None


def test_data_parallel_is_refused(tmp_path: Path) -> None:
    model = torch.nn.DataParallel(torch.nn.Linear(3, 3))
    with pytest.raises(ProcessGroupError, match="model= is a DataParallel"):
        AdamW(model.parameters(), directory=tmp_path / "run", model=model)
    with pytest.raises(TypeError, match=r"takes None for the default group, .*; got object"):
        AdamW(model.parameters(), directory=tmp_path / "run", process_group=object())
    assert repr(offload.SEPARATE) == "offload.SEPARATE"
    assert list(tmp_path.iterdir()) == []
