"""`dcp.load` of checkpoints as they lie, by real ranks, into torch's own optimizers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from offload import open_checkpoint, read_state
from offload.integrations.dcp import CheckpointReader
from tests.ranks_training.calls import Model
from tests.ranks_training.given import set_gradients, train_alone
from tests.ranks_training.loading import digest, load, newest, state_of, steps, stock
from tests.ranks_training.rank_server import Jobs
from tests.ranks_training.test_readers import WIDTHS, trained
from tests.stores.files import flip_on_disk

LOAD = "tests.ranks_training.loading:load"
FP32 = {"kind": "fsdp2", "dtype": "float32"}


def loaded(
    jobs: Jobs, folder: Path, num_ranks: int, store: Path, **how: Any
) -> list[dict[str, Any]]:
    """Let ranks load a checkpoint; return what each of them says."""
    folder.mkdir(exist_ok=True)
    call = ["do", LOAD, str(store), WIDTHS, how]
    ended = jobs.run(folder, [[call]] * num_ranks, kind="one")
    for rank in ended:
        assert rank.failed() == [], rank.of("do")["message"]
    return [rank.of("do")["value"] for rank in ended]


def plain(num_steps: int, optimizer: str = "AdamW", skip: str = "", **hyper: Any) -> dict[str, str]:
    """Return the digests of the same training by torch in one process, in memory."""
    torch.manual_seed(7)
    model = Model(WIDTHS)
    made = stock(model, optimizer, **hyper)
    steps(model, made, 1, num_steps, skip)
    return digest(state_of(model, made))


CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "adamw-3-to-2-flat": (3, 2, {}, {"flat": True}),
    "amsgrad-3-to-1": (3, 1, {"amsgrad": True}, {}),
    "momentum-2-to-3": (2, 3, {"optimizer": "SGD", "momentum": 0.9}, {}),
    "tensor-parallel": (3, 2, {}, {"layout": "tp"}),
    "fsdp-and-tensor-parallel": (2, 4, {}, {"layout": "fsdp-tp"}),
    "hsdp": (3, 4, {}, {"layout": "hsdp"}),
    "from-fsdp-and-tensor-parallel": (4, 3, {}, {"from": "fsdp-tp"}),
    "unstepped-2-to-2": (2, 2, {"skip": "maybe"}, {}),
}
"""Ranks that save, ranks that load, arguments of both, and those of the loading ranks."""


@pytest.mark.parametrize(("saved_by", "loaded_by", "how", "more"), CASES.values(), ids=CASES)
def test_training_goes_on_with_torchs_own_optimizer_to_the_same_bits(
    jobs: Jobs,
    tmp_path: Path,
    saved_by: int,
    loaded_by: int,
    how: dict[str, Any],
    more: dict[str, Any],
) -> None:
    more = dict(more)
    saving = {"kind": "", "layout": more.pop("from")} if "from" in more else {"kind": "fsdp2"}
    setting = {**FP32, "kind": saving.pop("kind")}
    store = trained(jobs, tmp_path / "saved", saved_by, setting, {**how, **saving})
    found = loaded(jobs, tmp_path / "loaded", loaded_by, store, num=2, **{**how, **more})
    expected = plain(5, **how)
    for one in found:
        got = one["digest"]
        if "skip" in how:  # torch's own state dict of a parameter without a step has zeros
            assert [got.pop(key) for key in set(got) - set(expected)]
        assert got == expected


def test_masters_of_16_bit_parameters_are_loaded_into_fp32_parameters(
    jobs: Jobs, tmp_path: Path
) -> None:
    store = trained(jobs, tmp_path / "saved", 2, {"kind": "fsdp2"}, {})
    found = loaded(jobs, tmp_path / "loaded", 3, store, num=2)
    torch.manual_seed(7)
    live = Model(WIDTHS).bfloat16()
    model = Model(WIDTHS)
    model.load_state_dict(live.state_dict())
    made = stock(model, "AdamW")
    for step in range(1, 4):  # as masters in memory are stepped, with gradients of 16 bits
        set_gradients(live, step)
        for (_, master), (_, parameter) in zip(
            model.named_parameters(), live.named_parameters(), strict=True
        ):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        made.step()
    model.zero_grad()
    steps(model, made, 4, 2)
    expected = digest(state_of(model, made))
    assert [one["digest"] for one in found] == [expected] * 3


FORMATS = {
    "split": {"kind": "fsdp2", "options": {"master": "split"}},
    "bfloat16": {"kind": "ddp", "options": {"state_dtype": "bfloat16"}},
    "int8": {"kind": "ddp", "options": {"state_dtype": "int8"}},
}


@pytest.mark.parametrize("setting", FORMATS.values(), ids=FORMATS)
def test_every_state_format_is_decoded(jobs: Jobs, tmp_path: Path, setting: dict[str, Any]) -> None:
    store = trained(jobs, tmp_path / "saved", 2, setting, {})
    (one, *others) = loaded(jobs, tmp_path / "loaded", 3, store)
    assert [other["digest"] for other in others] == [one["digest"]] * 2
    with open_checkpoint(store) as opened:
        for name in [spec.name for spec in opened.manifest.layout.parameters]:
            state = digest(read_state(opened, name))
            assert one["digest"][f"model/{name}"] == state.pop("master")
            assert {array: one["digest"][f"state/{name}/{array}"] for array in state} == state


@pytest.mark.parametrize("loaded_by", [1, 2, 3, 4])
def test_each_rank_reads_its_own_bytes_only(
    jobs: Jobs, saved: dict[int, Path], tmp_path: Path, loaded_by: int
) -> None:
    plans = [(saved_by, False) for saved_by in saved]
    if loaded_by in saved:  # the same cut: the chunks of an owner are those of its rank
        plans.append((loaded_by, True))
    calls = [
        ["do", LOAD, str(saved[saved_by]), WIDTHS, {"verify": verify}] for saved_by, verify in plans
    ]
    expected = plain(3)
    for rank in jobs.run(tmp_path, [calls] * loaded_by, kind="one"):
        assert rank.failed() == []
        for plan, outcome in zip(plans, rank.outcomes, strict=True):
            value = outcome["value"]
            assert value["read"] == value["own"], plan
            assert value["digest"] == expected, plan


@pytest.fixture(scope="module")
def saved(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return the stores of 1, 2 and 3 ranks."""
    folder = tmp_path_factory.mktemp("saved")
    stores = {n: trained(jobs, folder / f"{n}", n, FP32, {}) for n in (2, 3)}
    return {1: train_alone(folder / "1", {**FP32, "widths": WIDTHS}), **stores}


def test_a_damaged_chunk_is_a_named_error_and_none_of_it_is_handed_out(
    jobs: Jobs, tmp_path: Path
) -> None:
    store = trained(jobs, tmp_path / "saved", 2, FP32, {})
    with open_checkpoint(store) as opened:
        (owner,) = opened.owners
        layout = opened.manifest.layout
        expected = {
            f"{t.name}/{array}": value.flatten().tolist()
            for t in layout.model
            if t.name not in ("frozen", "seen")
            for array, value in read_state(opened, t.name).items()
        }
    path = Path(owner.path) / "exp_avg.safetensors"
    flip_on_disk(path, path.stat().st_size - 5)
    call = ["do", "tests.ranks_training.loading:load_damaged", str(store), WIDTHS]
    for rank in jobs.run(tmp_path, [[call]] * 3, kind="one"):
        assert rank.failed() == []
        value = rank.of("do")["value"]
        assert value["errors"]
        assert {kind for kind, _ in value["errors"].values()} == {"DamagedError"}
        assert all(str(path) in message for _, message in value["errors"].values())
        missing = 0
        for name, numbers in value["loaded"].items():
            for found, right in zip(numbers, expected.get(name, numbers), strict=True):
                missing += math.isnan(found)
                assert found == right or math.isnan(found)
        assert missing


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_loads_what_several_ranks_saved(jobs: Jobs, tmp_path: Path) -> None:
    store = trained(jobs, tmp_path / "saved", 2, FP32, {})
    found = load(None, str(newest(store)), WIDTHS, layout="one", num=2)
    assert found["digest"] == plain(5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_without_a_prefix_and_other_values(jobs: Jobs, tmp_path: Path) -> None:
    store = trained(jobs, tmp_path / "saved", 2, {"kind": "ddp"}, {})
    model = Model(WIDTHS).bfloat16()
    state = {**model.state_dict(), "step": 0, "master": {"layers.0.weight": torch.zeros(70, 40)}}
    dcp_load(state, storage_reader=CheckpointReader(store, model="", optimizer=None), no_dist=True)
    assert state["step"] == 3
    with open_checkpoint(store) as opened:
        master = read_state(opened, "layers.0.weight")["master"]
    assert torch.equal(state["master"]["layers.0.weight"], master)
    assert torch.equal(state["layers.0.weight"], master.bfloat16())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_reader_of_hugging_face_files_takes_the_model_file(
    jobs: Jobs, tmp_path: Path
) -> None:
    store = trained(jobs, tmp_path / "saved", 3, {"kind": "fsdp2"}, {})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(newest(store) / "model.safetensors")
    model = Model(WIDTHS).bfloat16()
    state = model.state_dict()
    dcp_load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    with open_checkpoint(store) as opened:
        for name, _ in model.named_parameters():
            if name != "frozen":
                master = read_state(opened, name)["master"]
                assert torch.equal(state[name], master.bfloat16())


def test_state_that_is_not_held_is_refused_with_the_remedy(jobs: Jobs, tmp_path: Path) -> None:
    ask = ["do", "tests.ranks_training.loading:ask_for_the_state"]
    calls = [["open"], ["step"], ask, ["step"], ["close"]]
    for rank in jobs.run(tmp_path, [calls] * 2, kind="fsdp2"):
        assert rank.failed() == ["KeyError"]
