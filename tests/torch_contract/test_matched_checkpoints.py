"""Which live tensors a checkpoint is matched with, and what makes it one of another model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gds import MemoryBackend
from offload import open_checkpoint
from offload.engine.matching import match_checkpoint, take_hyperparameters
from offload.errors import CheckpointError, MismatchError, UnsupportedParameterError
from offload.format.arrays import StateFormat
from offload.format.manifest import Manifest
from offload.model.shards import Shard, Shards, cut_of, is_dtensor, local, rows
from offload.update.rules import UpdateRule
from tests.stores.small import STORE, make_model, make_optimizer, memory_store

RULE = UpdateRule(torch.optim.AdamW, {}, allow_fused=False)
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """Return the manifest of a checkpoint of `make_model`."""
    with open_checkpoint(STORE, backend=memory_store(1)) as opened:
        return opened.manifest


@pytest.fixture
def model() -> torch.nn.Sequential:
    made: torch.nn.Sequential = make_model()
    return made


def matched(
    manifest: Manifest,
    model: torch.nn.Module,
    given: Sequence[str] = NAMES,
    shards: Shards | None = None,
) -> list[str]:
    """Match with an optimizer of some parameters; return the names of those that have state."""
    parameters = dict(model.named_parameters())
    group = {**RULE.defaults, "params": [parameters[name] for name in given]}
    trainables, _ = match_checkpoint(STORE, manifest, [group], model, RULE, StateFormat(), shards)
    for trainable in trainables:
        assert trainable.parameter is parameters[trainable.spec.name]
    return [trainable.spec.name for trainable in trainables]


def halves(_: str, tensor: torch.Tensor) -> Shard:
    """Give this rank the first half of the rows of each tensor."""
    return local(tensor, "") if is_dtensor(tensor) else rows(tensor, 0, len(tensor) // 2)  # type: ignore[arg-type,return-value]


def cut_by(manifest: Manifest, model: torch.nn.Module, shards: Shards) -> Manifest:
    """Return the manifest that a rank has which steps its part of each parameter."""
    specs = []
    for spec in manifest.layout.parameters:
        shard = shards(spec.name, model.get_parameter(spec.name))
        assert shard is not None
        specs.append(replace(spec, shape=cut_of(shard).box.sizes, cut=shard.cut))
    return replace(manifest, layout=replace(manifest.layout, parameters=tuple(specs)))


def other_for(name: str, other: Callable[[torch.Tensor], Shard | None]) -> Shards:
    """Give this rank another part of one parameter, and the first half of all others."""
    return lambda found, tensor: other(tensor) if found == name else halves(found, tensor)


class TestRanks:
    """Each rank steps a part of each parameter, and has stored the state of that part."""

    def test_the_same_parts_are_matched(
        self, manifest: Manifest, model: torch.nn.Sequential
    ) -> None:
        assert matched(cut_by(manifest, model, halves), model, shards=halves) == NAMES

    @pytest.mark.parametrize("name", NAMES)
    def test_another_part_of_any_parameter_is_refused_by_name(
        self, name: str, manifest: Manifest, model: torch.nn.Sequential
    ) -> None:
        stored = cut_by(manifest, model, halves)
        shards = other_for(name, lambda tensor: rows(tensor, 0, 1))
        with pytest.raises(MismatchError, match="resume with as many ranks") as caught:
            matched(stored, model, shards=shards)
        assert f"this rank steps '{name}[0:1," in str(caught.value)

    @pytest.mark.parametrize("name", ["1.weight", "1.bias"])
    def test_one_that_is_not_given_and_whose_part_another_rank_has_is_refused_by_name(
        self, name: str, manifest: Manifest, model: torch.nn.Sequential
    ) -> None:
        stored = cut_by(manifest, model, halves)
        model.requires_grad_(False)
        shards = other_for(name, lambda _: None)
        with pytest.raises(MismatchError, match="this rank steps nothing of it") as caught:
            matched(stored, model, NAMES[:2], shards)
        assert f"has the state of '{name}[0:" in str(caught.value)

    def test_one_that_is_not_given_and_has_no_elements_here_any_more_is_refused_by_name(
        self, manifest: Manifest, model: torch.nn.Sequential
    ) -> None:
        stored = cut_by(manifest, model, halves)
        model.requires_grad_(False)
        shards = other_for("1.bias", lambda tensor: rows(tensor, 2, 2))
        with pytest.raises(MismatchError, match=r"'1\.bias' is only in the checkpoint"):
            matched(stored, model, NAMES[:3], shards)

    @pytest.fixture
    def mesh(self) -> Iterator[dist.device_mesh.DeviceMesh]:
        """Return a mesh of two ranks, of which this one is the first, and the other is nobody."""
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        try:
            yield dist.device_mesh.init_device_mesh("cpu", (2,))
        finally:
            dist.destroy_process_group()

    def test_a_frozen_dtensor_that_is_not_given_keeps_its_state(
        self, mesh: dist.device_mesh.DeviceMesh, manifest: Manifest, model: torch.nn.Sequential
    ) -> None:
        from torch.distributed.tensor import Shard as Sharded
        from torch.distributed.tensor import distribute_tensor

        weight = model.get_parameter("1.weight").detach()
        sharded = distribute_tensor(weight, mesh, [Sharded(0)])
        model[1].weight = torch.nn.Parameter(sharded, requires_grad=False)
        stored = cut_by(manifest, model, halves)
        assert matched(stored, model, [n for n in NAMES if n != "1.weight"], halves) == NAMES


class TestNotGiven:
    """Parameters with state that are in no group of the optimizer."""

    @pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "known"])
    def test_one_that_is_trained_and_may_have_been_given_is_refused(
        self, is_known: bool, manifest: Manifest, model: torch.nn.Sequential
    ) -> None:
        """Manifests of earlier versions do not say which parameters were given."""
        stored = manifest if is_known else replace(manifest, order=None)
        model.get_parameter("1.weight").requires_grad_(False)
        with pytest.raises(MismatchError, match=r"'1\.bias' .* was not given"):
            matched(stored, model, NAMES[:2])

    def test_one_that_had_been_taken_out_before_the_checkpoint_keeps_its_state(
        self, manifest: Manifest, model: torch.nn.Sequential
    ) -> None:
        stored = replace(manifest, order=((0, 1, 2),))
        assert matched(stored, model, NAMES[:3]) == NAMES

    def test_one_that_cannot_be_trained_any_more_is_refused(
        self, manifest: Manifest, model: torch.nn.Sequential
    ) -> None:
        model[1].requires_grad_(False)
        model[1].to("meta")
        with pytest.raises(UnsupportedParameterError, match=r"parameter '1\.weight' is on meta"):
            matched(manifest, model, NAMES[:2])


class TestContradictions:
    """A manifest whose digest is right, and that no optimizer of this class can have written."""

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"groups": ({"lr": "high"},)}, r"param_groups\[0\]\['lr'\] is 'high'"),
            ({"scalars": ((("step", "f32", -1.0),),) * 4}, "step count of '0.weight' is -1"),
        ],
        ids=["hyper-parameters", "scalars"],
    )
    def test_it_is_refused(
        self,
        changes: Mapping[str, Any],
        words: str,
        manifest: Manifest,
        model: torch.nn.Sequential,
    ) -> None:
        with pytest.raises(CheckpointError, match=words):
            matched(replace(manifest, **changes), model)


def test_every_group_gets_the_hyper_parameters_of_the_checkpoint(manifest: Manifest) -> None:
    groups: list[dict[str, Any]] = [{"lr": 1.0}, {"lr": 2.0}]
    saved = replace(manifest, groups=({"lr": 3.0}, {"lr": 4.0}))
    take_hyperparameters(groups, saved, RULE, "/run")
    assert groups == [{"lr": 3.0}, {"lr": 4.0}]


def test_a_restore_does_not_need_the_other_optimizers_of_the_model_at_rest() -> None:
    """One of them has applied its gradients in backward, and its step is still to come."""
    model, backend = make_model(), MemoryBackend()
    restored, other = (
        make_optimizer(
            model,
            backend,
            params=[*layer.parameters()],
            directory=f"/store-{number}",
            settings={"overlap": "backward"},
        )
        for number, layer in enumerate(model)
    )
    with restored, other:
        for step in (1, 2):
            model(torch.ones(5, 30, dtype=torch.bfloat16)).float().sum().backward()
            if step == 1:
                restored.step()
                other.step()
                restored.checkpoint().result()
                sealed = model.get_parameter("0.weight").detach().clone()
        assert restored.restore() is not None
        assert torch.equal(model.get_parameter("0.weight"), sealed)
        other.step()
        assert (restored.num_steps, other.num_steps) == (1, 2)
