"""Readers of checkpoints that several ranks made, against one process that trains the same.

`read_state`, exports, and `dcp.load` of checkpoints as they lie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from offload import (
    CheckpointError,
    DamagedError,
    export_checkpoint,
    open_checkpoint,
    read_state,
)
from offload.integrations.dcp import CheckpointReader
from tests.numerics.reference import assert_same_bits
from tests.ranks_training.cases import (
    Case,
    do,
    newest,
    of_each,
    require_success,
    run_cases,
)
from tests.ranks_training.exchange_calls import (
    WIDTHS,
    digest,
    load,
    plain,
    state_of,
    stock,
    stock_steps,
    train_alone,
)
from tests.ranks_training.models import Model, set_gradients
from tests.ranks_training.rank_server import Jobs
from tests.stores.files import flip_on_disk

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FP32 = {"dtype": "float32"}
STORES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ddp-bf16": (2, {"kind": "ddp"}, {}),
    "ddp-unstepped": (2, {"kind": "ddp", **FP32}, {"skip": "maybe", "amsgrad": True}),
    "ddp-int8": (2, {"kind": "ddp", "options": {"state_dtype": "int8"}}, {}),
    "fsdp2-split": (2, {"kind": "fsdp2", "options": {"master": "split"}}, {}),
    "fsdp2-2": (2, {"kind": "fsdp2", **FP32}, {}),
    "damaged": (2, {"kind": "fsdp2", **FP32}, {}),
    "fsdp2-3": (3, {"kind": "fsdp2", **FP32}, {}),
    "momentum": (3, {"kind": "fsdp2", **FP32}, {"optimizer": "SGD", "momentum": 0.9}),
    "fsdp-tp": (4, {"kind": "grid", **FP32}, {}),
}
"""Ranks, settings and arguments of each training."""


def call(name: str, *arguments: Any, **how: Any) -> list[Any]:
    """Return a call of one of the functions of `exchange_calls`."""
    return [*do(f"exchange_calls:{name}", *arguments), how]


@pytest.fixture(scope="module")
def stores(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return a store of each training."""
    folder = tmp_path_factory.mktemp("stores")
    for size in (2, 3, 4):
        cases: dict[str, Case] = {
            name: ([[call("train", **how)]] * size, setting)
            for name, (num, setting, how) in STORES.items()
            if num == size
        }
        for ranks in run_cases(jobs, folder, cases, widths=WIDTHS).values():
            require_success(ranks)
    return {name: folder / name / "run" for name in STORES}


EXACT = ["ddp-bf16", "ddp-unstepped", "fsdp2-split", "momentum", "fsdp-tp"]


@pytest.mark.parametrize("name", EXACT)
def test_state_of_each_parameter_is_that_of_one_process(
    stores: Mapping[str, Path], tmp_path: Path, name: str
) -> None:
    num_ranks, setting, how = STORES[name]
    alone = train_alone(tmp_path / "alone", setting, **how)
    with open_checkpoint(stores[name]) as ours, open_checkpoint(alone) as expected:
        assert len(ours.owners) == num_ranks - 1
        names = [spec.name for spec in expected.manifest.layout.parameters]
        assert len(names) == 5
        for parameter in names:
            found, whole = read_state(ours, parameter), read_state(expected, parameter)
            assert found.keys() == whole.keys()
            for array, value in whole.items():
                assert_same_bits(found[array], value, f"{array} of {parameter}")
        if ours.manifest.layout.shard is None:
            # So whatever opens the model file of one process opens this one, as it lies.
            ours_file, expected_file = (
                Path(one.path, "model.safetensors").read_bytes() for one in (ours, expected)
            )
            assert ours_file == expected_file
        assert (ours.manifest.layout.shard is None) is (name != "fsdp-tp"), "columns of a tensor"


@pytest.mark.parametrize("name", ["fsdp-tp"])
def test_exports_are_byte_for_byte_those_of_one_process(
    stores: Mapping[str, Path], tmp_path: Path, name: str
) -> None:
    _, setting, how = STORES[name]
    paths = {"ours": stores[name], "alone": train_alone(tmp_path / "one", setting, **how)}
    for kind in ("pt", "hf", "safetensors", "dcp"):
        for whose, path in paths.items():
            told: list[tuple[int, int]] = []
            (tmp_path / whose).mkdir(exist_ok=True)
            with open_checkpoint(path) as opened:
                export_checkpoint(
                    opened,
                    tmp_path / whose / kind,
                    kind,
                    progress=lambda *now, told=told: told.append(now),
                )
            assert told == sorted(told)
            assert told[-1][0] == told[-1][1]
        ours, expected = (content(tmp_path / whose / kind) for whose in paths)
        if kind == "dcp":  # torch puts a random number into the file
            found, wanted = (
                FileSystemReader(tmp_path / whose / kind).read_metadata() for whose in paths
            )
            assert found.state_dict_metadata == wanted.state_dict_metadata
            assert found.storage_data == wanted.storage_data
            del ours[".metadata"], expected[".metadata"]
        assert ours == expected, kind


def content(path: Path) -> dict[str, bytes]:
    """Return the content of a file, or of each file in a directory."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: file.read_bytes() for file in files}


LOADS: dict[str, tuple[int, str, dict[str, Any]]] = {
    # Ranks that load, the store, and how.
    "flat": (2, "fsdp2-3", {"flat": True}),
    "tensor-parallel": (2, "fsdp2-3", {"kind": "tp"}),
    "unstepped": (2, "ddp-unstepped", {}),
    "momentum": (3, "momentum", {}),
    "from-fsdp-and-tensor-parallel": (3, "fsdp-tp", {}),
    "fsdp-and-tensor-parallel": (4, "fsdp2-2", {"kind": "grid"}),
    "hsdp": (4, "fsdp2-3", {"kind": "hybrid"}),
}
OTHERS: dict[str, tuple[int, str, dict[str, Any]]] = {
    **{f"read {n} {v}": (n, f"fsdp2-{n}", {"verify": v}) for n in (2, 3) for v in (False, True)},
    "read anew": (2, "fsdp2-3", {"verify": False}),
    "masters": (2, "ddp-bf16", {"num": 2}),
    "format fsdp2-split": (2, "fsdp2-split", {}),
    "format ddp-int8": (2, "ddp-int8", {}),
}
"""The same, for what each rank reads, and what it makes of other formats."""


def loaded(jobs: Jobs, folder: Path, size: int, loads: dict[str, list[Any]]) -> dict[str, Any]:
    """Let ranks make calls of `load`; return what each rank says of each."""
    cases: dict[str, Case] = {name: ([[one]] * size, {}) for name, one in loads.items()}
    played = run_cases(jobs, folder, cases, kind="")
    for ranks in played.values():
        require_success(ranks)
    return {name: of_each(ranks, "do") for name, ranks in played.items()}


@pytest.fixture(scope="module")
def loads(
    jobs: Jobs, stores: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return what each rank says of each load."""
    found: dict[str, Any] = {}
    for size in (2, 3, 4):
        calls = {
            name: call("load", str(stores[store]), **{"num": 2, **STORES[store][2], **how})
            for name, (num, store, how) in LOADS.items()
            if num == size
        }
        calls |= {
            name: call("load", str(stores[store]), **how)
            for name, (num, store, how) in OTHERS.items()
            if num == size
        }
        found |= loaded(jobs, tmp_path_factory.mktemp("loads"), size, calls)
    return found


def test_training_goes_on_with_torchs_own_optimizer_to_the_same_bits(
    loads: dict[str, Any],
) -> None:
    for name, (_, store, _) in LOADS.items():
        how = STORES[store][2]
        expected = plain(5, **how)
        for one in loads[name]:
            got = dict(one["digest"])
            if "skip" in how:  # torch's own state dict of a parameter without a step has zeros
                assert [got.pop(key) for key in set(got) - set(expected)]
            assert got == expected, name


def test_each_rank_reads_its_own_bytes_only(loads: dict[str, Any]) -> None:
    """In the same cut also with digests: chunks of an owner are its rank's."""
    for name in (one for one in OTHERS if one.startswith("read")):
        for one in loads[name]:
            assert one["read"] == one["own"], name
            assert one["digest"] == plain(3), name


def test_masters_of_16_bit_parameters_are_loaded_into_fp32_parameters(
    loads: dict[str, Any],
) -> None:
    torch.manual_seed(7)
    live = Model(WIDTHS).bfloat16()
    model = Model(WIDTHS)
    model.load_state_dict(live.state_dict())
    made = stock(model)
    for step in range(1, 4):  # as masters in memory are stepped, with gradients of 16 bits
        set_gradients(live, step)
        for (_, master), (_, parameter) in zip(
            model.named_parameters(), live.named_parameters(), strict=True
        ):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        made.step()
    model.zero_grad()
    stock_steps(model, made, 4, 2)
    assert [one["digest"] for one in loads["masters"]] == [digest(state_of(model, made))] * 2


def test_every_state_format_is_decoded(loads: dict[str, Any], stores: Mapping[str, Path]) -> None:
    for name in ("fsdp2-split", "ddp-int8"):
        one, other = loads[f"format {name}"]
        assert other["digest"] == one["digest"]
        with open_checkpoint(stores[name]) as opened:
            for parameter in [spec.name for spec in opened.manifest.layout.parameters]:
                state = digest(read_state(opened, parameter))
                assert one["digest"][f"model/{parameter}"] == state.pop("master")
                found = {array: one["digest"][f"state/{parameter}/{array}"] for array in state}
                assert found == state, (name, parameter)


def test_one_process_loads_it_also_by_names_of_its_own(stores: Mapping[str, Path]) -> None:
    store = str(newest(stores["fsdp2-2"]))
    assert load(None, store, kind="one", num=2)["digest"] == plain(5)
    store = str(newest(stores["ddp-bf16"]))
    model, name = Model(WIDTHS).bfloat16(), "layers.0.weight"
    state = {**model.state_dict(), "step": 0, "master": {name: torch.zeros(70, 40)}}
    dcp_load(state, storage_reader=CheckpointReader(store, model="", optimizer=None), no_dist=True)
    assert state["step"] == 3
    with open_checkpoint(store) as opened:
        master = read_state(opened, name)["master"]
    assert torch.equal(state["master"][name], master)
    assert torch.equal(state[name], master.bfloat16())


def test_torchs_reader_of_hugging_face_files_takes_the_model_file(
    stores: Mapping[str, Path], tmp_path: Path
) -> None:
    store = newest(stores["ddp-bf16"])
    (tmp_path / "model.safetensors").symlink_to(store / "model.safetensors")
    model = Model(WIDTHS).bfloat16()
    state = model.state_dict()
    dcp_load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    with open_checkpoint(store) as opened:
        for name, _ in model.named_parameters():
            if name != "frozen":
                master = read_state(opened, name)["master"]
                assert torch.equal(state[name], master.bfloat16())


def test_a_damaged_chunk_is_a_named_error_and_none_of_it_is_handed_out(
    jobs: Jobs, stores: Mapping[str, Path], tmp_path: Path
) -> None:
    """By `dcp.load`, and by `read_state`; so is what is missing."""
    store = stores["damaged"]
    with open_checkpoint(store) as opened:
        (part,) = [Path(owner.path) for owner in opened.owners]
        expected = {
            f"{t.name}/{array}": value.flatten().tolist()
            for t in opened.manifest.layout.model
            if t.name not in ("frozen", "seen")
            for array, value in read_state(opened, t.name).items()
        }
    path, name = part / "exp_avg.safetensors", "layers.0.weight"
    flip_on_disk(path, path.stat().st_size - 5)
    with open_checkpoint(store) as opened, pytest.raises(DamagedError, match=str(path)):
        [read_state(opened, tensor.name) for tensor in opened.manifest.layout.parameters]
    damaged = loaded(jobs, tmp_path, 2, {"damaged": call("load_damaged", str(store))})
    for value in damaged["damaged"]:
        assert {kind for kind, _ in value["errors"]} == {"DamagedError"}
        assert all(str(path) in message for _, message in value["errors"])
        missing = 0
        for key, numbers in value["loaded"].items():
            for found, right in zip(numbers, expected.get(key, numbers), strict=True):
                missing += math.isnan(found)
                assert found == right or math.isnan(found)
        assert missing
    flip_on_disk(path, path.stat().st_size - 5)
    with open_checkpoint(store) as opened:
        whole = read_state(opened, name)["exp_avg"]
        assert whole.flatten().tolist() == expected[f"{name}/exp_avg"]
    part.parent.rename(tmp_path / "owner-1")
    with open_checkpoint(store) as opened:
        with pytest.raises(CheckpointError, match="owner 1"):
            read_state(opened, name)
        with pytest.raises(CheckpointError, match="owner 1"):
            export_checkpoint(opened, tmp_path / "out", "safetensors")
    assert not (tmp_path / "out").exists()
    with open_checkpoint(store, parts=[tmp_path]) as opened:
        assert torch.equal(read_state(opened, name)["exp_avg"], whole)
    (tmp_path / "owner-1").rename(part.parent)
    part.rename(part.with_name("part-77"))
    with pytest.raises(CheckpointError, match=r"the part of owner 1 in its state is missing"):
        open_checkpoint(store).close()
