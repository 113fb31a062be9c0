"""What several ranks restore together: each its part, all the same checkpoint, or none of them.

Two ranks play most cases; `tests.ranks_training.calls` has what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import offload
from tests.format.recorded_stores import Model as RecordedModel
from tests.format.recorded_stores import optimizer_for, unpack
from tests.ranks_training.blocks_of import eight_bit_state, encoded_anew
from tests.ranks_training.calls import Calls
from tests.ranks_training.cases import (
    BEGIN,
    ROUND,
    SEAL,
    Case,
    newest,
    of_each,
    on,
    require_success,
    run_all,
    run_cases,
)
from tests.ranks_training.rank_server import Jobs, Rank
from tests.stores.files import flip_on_disk

HERE = "tests.ranks_store.test_restores_by_ranks"
CLOSE: list[list[Any]] = [["close"]]


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    """A server of ranks."""
    server = Jobs()
    yield server
    server.close()


def do(name: str, *arguments: Any) -> list[Any]:
    """Return the call of a function of this module on a rank."""
    return ["do", f"{HERE}:{name}", *arguments]


def hold_checkpoint(calls: Calls) -> None:
    """Keep the checkpoint that was made last, as it is now."""
    calls.held = calls.handle.result()


def restore_held(calls: Calls) -> None:
    calls.optimizer.restore(calls.held)


def damage_the_model(calls: Calls) -> None:
    """Change a byte of the newest checkpoint, before any rank goes on."""
    if calls.rank == 0:
        file = newest(calls.directory) / "model.safetensors"
        flip_on_disk(file, file.stat().st_size - 1)
    dist.barrier()


def different_checkpoints() -> Case:
    """Ranks ask for different ones, and differ in what is to become of a damaged one."""
    begin = [*BEGIN, *ROUND]
    replaced = [do("hold_checkpoint"), ["set", {"lr": 0.5}], *SEAL]
    damaged, end = do("damage_the_model"), [["restore"], *CLOSE]
    first = [["restore", 1, {"discard_newer": True}], *replaced, ["restore"], damaged, ["restore"]]
    second = [["restore"], *replaced, do("restore_held"), damaged, ["restore", 2]]
    return [[*begin, *first, *end], [*begin, *second, *end]], {}


def another_train_state() -> Case:
    """One rank, on a host of its own, seals the same step again with another train state."""
    other = ["checkpoint", {"train_state": {"another": 1}}]
    first = [*on("a"), *ROUND, ["checkpoint"], ["result"], *CLOSE]
    second = [*on("b"), *ROUND, other, ["result"], *CLOSE]
    return [first, second], {}


def no_single_box(calls: Calls) -> dict[str, str]:
    """Train DTensors that no rank can have one box of; return the errors."""
    mesh = init_device_mesh("cpu", (calls.size,))
    own = torch.ones(2, 2)
    lies: dict[str, Any] = {"shape": (6, 2), "stride": (2, 1)}
    tensors = {
        "partial": DTensor.from_local(own, mesh, [Partial()]),
        "lies": DTensor.from_local(own, mesh, [Shard(0)], run_check=False, **lies),
        "apart": DTensor.from_local(own, mesh, [_StridedShard(0, split_factor=2)]),
    }
    found = {}
    for name, tensor in tensors.items():
        model = torch.nn.Module()
        model.register_parameter(name, torch.nn.Parameter(tensor))
        calls.model = model
        try:
            calls.open()
        except offload.OffloadError as error:
            found[name] = str(error)
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(distribute_tensor(own, mesh, [Shard(0)])))
    calls.model = model
    calls.open()
    model.w.grad = distribute_tensor(own, mesh, [Replicate()])
    try:
        calls.optimizer.step()
    except offload.OffloadError as error:
        found["gradient"] = str(error)
    return found


WRAPPED: dict[str, Callable[[Any], torch.nn.Module]] = {
    "plain": lambda model: model,
    "compiled": torch.compile,
    "compiled around": lambda model: torch.compile(torch.nn.Sequential(model)),
}


def names_of_wrapped(calls: Calls) -> list[list[str]]:
    """Seal models in wrappers; return the names that torch's distributed checkpoints give."""
    found = []
    for number, wrap in enumerate(WRAPPED.values()):
        layers = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Linear(3, 4))
        layers[1] = torch.compile(layers[1])
        inner = torch.nn.Sequential(layers, checkpoint_wrapper(torch.nn.Linear(4, 4)))
        calls.model = DistributedDataParallel(wrap(inner))
        calls.open(directory=calls.directory / str(number))
        calls.optimizer.checkpoint().result()
        calls.close()
        found.append(sorted(get_model_state_dict(calls.model)))
    return found


def recut_recorded_store(calls: Calls) -> None:
    """Go on from a store of one process with DTensors of rows, and of columns."""
    mesh, model = init_device_mesh("cpu", (calls.size,)), RecordedModel()
    for name, parameter in [*model.named_parameters()]:
        dim = int(name == "large")
        part = torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(dim)]))
        model.register_parameter(name, part)
    with optimizer_for(model, calls.directory, "int8") as optimizer:
        try:
            optimizer.restore()
        except offload.MismatchError as error:
            assert "restore(reencode=True)" in str(error)  # noqa: PT017  (on a rank)
            optimizer.restore(reencode=True)
            optimizer.checkpoint().result()


def add_different_parameters(calls: Calls) -> str:
    """Add a layer that each rank has another name for; return the error, and remove the layer."""
    name, layer = f"of_rank_{calls.rank}", torch.nn.Linear(3, 3).bfloat16()
    calls.model.add_module(name, layer)
    try:
        calls.optimizer.add_param_group({"params": [*layer.parameters()]})
    except offload.OffloadError as error:
        return type(error).__name__
    finally:
        delattr(calls.model, name)
    return ""


@pytest.fixture(scope="module")
def played(
    jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Mapping[str, list[Rank]]]:
    """All cases of two ranks, and the folder in which each has a folder."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "recorded store").mkdir()
    unpack("int8", folder / "recorded store")
    tier = {"options": {"tier": f"file://{folder}/tier"}, "given": True, "widths": (40, 24)}
    here = {"given": True, "widths": (40, 24)}
    goes_on = [*ROUND, ["whole"], ["verify"], *CLOSE]
    refused = [["open"], ["restore"], do("add_different_parameters"), *goes_on]
    cases: dict[str, Case] = {
        "different": different_checkpoints(),
        "train states": another_train_state(),
        "no single box": ([[do("no_single_box")]] * 2, {"kind": ""}),
        "names": ([[do("names_of_wrapped")]] * 2, {"kind": ""}),
        "recorded store": ([[do("recut_recorded_store")]] * 2, {"kind": ""}),
        "sent": ([[*BEGIN, *CLOSE]] * 2, tier),
        "sent/again": ([[["open"], ["restore"], *goes_on]] * 2, here),
        "fetched": ([refused] * 2, tier),
    }
    return folder, run_cases(jobs, folder, cases)


Played = tuple[Path, Mapping[str, list[Rank]]]


def test_ranks_that_ask_for_different_checkpoints_change_nothing(played: Played) -> None:
    """Also if they differ in what is to become of a damaged one, or one names a replaced one."""
    ranks = played[1]["different"]
    errors = [
        [(one["error"], one["message"]) for one in rank.outcomes if one["error"]] for rank in ranks
    ]
    for number, found in enumerate(errors):
        (older, _), (gone, why), (older_still, what) = found
        assert older == older_still == "RanksError", found
        assert gone == ("CheckpointNotFoundError" if number else "RanksError")
        assert "replaced by generation" in why
        assert "rank 1 for no older one" in what
    assert "step-00000001 and rank 1 for" in errors[0][0][1]
    assert "rank 1" in errors[0][1][1]
    assert [step for step, _ in of_each(ranks, "restore")] == [1, 1]


def test_a_train_state_that_is_another_one_on_one_rank_only_is_replaced(played: Played) -> None:
    """Also if that rank does not see what is stored, on another host."""
    folder, ranks = played[0] / "train states", played[1]["train states"]
    require_success(ranks)
    with offload.open_checkpoint(folder / "a", parts=[folder / "b"]) as checkpoint:
        assert checkpoint.train_states == [{"step": 1, "rank": 0}, {"another": 1}]
        assert checkpoint.verify().ok


def test_what_has_no_single_box_is_refused_by_name(played: Played) -> None:
    ranks = played[1]["no single box"]
    require_success(ranks)
    for found in of_each(ranks, "do"):
        assert "'partial' is a DTensor with the placement P" in found["partial"]
        assert "several boxes, expected one. Shard dimension 0" in found["apart"]
        assert "'lies' is a DTensor of shape [6, 2]" in found["lies"]
        assert "p.grad.redistribute" in found["gradient"]


def test_names_are_those_of_torchs_distributed_checkpoints(played: Played) -> None:
    """Wrappers are not part of a name."""
    ranks = played[1]["names"]
    require_success(ranks)
    for number, names in enumerate(of_each(ranks, "do")[0]):
        stored = load_file(newest(played[0] / f"names/run/{number}") / "model.safetensors")
        assert sorted(stored) == names


def test_8_bit_state_is_encoded_anew_only_if_that_is_asked_for(
    played: Played, tmp_path: Path
) -> None:
    require_success(played[1]["recorded store"])
    old, new = unpack("int8", tmp_path), played[0] / "recorded store/run"
    assert newest(old).name == newest(new).name, "it is replaced"
    found = encoded_anew(eight_bit_state(newest(old)), eight_bit_state(newest(new)))
    assert "large" in found


def test_parameters_that_are_refused_do_not_cost_the_state_that_arrives(played: Played) -> None:
    expected, found = played[1]["sent/again"], played[1]["fetched"]
    for ranks in (expected, found):
        require_success(ranks)
    assert of_each(found, "do") == ["UnsupportedParameterError"] * 2
    assert of_each(found, "whole") == of_each(expected, "whole")
    assert of_each(found, "verify") == [[], []]


def test_a_part_that_one_rank_cannot_open_is_let_go_of_by_the_others(
    jobs: Jobs, tmp_path: Path
) -> None:
    """A lock on it that stays would keep all ranks from ever writing it again."""
    run_all(jobs, tmp_path, [[*BEGIN, *CLOSE]] * 3, given=True)
    part = "owner-2"
    first = [["open"], ["keep_error", "restore"], ["open_files", part]]
    second = [["open"], ["fail", "open", part], ["keep_error", "restore"], ["open_files", part]]
    end = [["restore"], *CLOSE]
    for rank in run_all(
        jobs, tmp_path, [[*first, *end], [*second, *end]], kind="fsdp2", given=True
    ):
        assert rank.of("keep_error")["value"] != ""
        assert rank.of("open_files")["value"] == []
        assert rank.of("restore")["value"][0] == 1
