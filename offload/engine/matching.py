"""Match of a checkpoint with the live model, by name, before anything is changed; and its model.

The model file is that of one process, which writes and reads it as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gds import StorageError
from offload.checkpoint.sealed_slot import model_file
from offload.device.staging import Traffic
from offload.engine.seal import Captured
from offload.errors import MismatchError
from offload.format.arrays import StateFormat
from offload.format.layout import ParameterSpec
from offload.format.manifest import Manifest
from offload.model.homes import stays_filed
from offload.model.loading import check_same, in_checkpoint, names_in_checkpoint
from offload.model.model_copy import WholeCopy
from offload.model.model_file import BlockBuffers, ModelImage, digest_model
from offload.model.model_reading import LiveBox, ModelReading, StoredModel, read_model
from offload.model.model_writing import CloneSource, TensorRanges
from offload.model.parameters import (
    Trainable,
    check_parameter,
    describe_parameters,
    make_trainable,
    names_of,
)
from offload.model.replacing import replacing
from offload.model.shards import Shards
from offload.model.stored import Stored, describe_model
from offload.store.opening import StoredCheckpoint
from offload.store.slots.slot import Slot
from offload.store.state_store import StateStore
from offload.units import many
from offload.update.dtypes import DTYPE_CODES
from offload.update.hyperparameters import check_hyperparameters, check_scalars, rules_of
from offload.update.rules import UpdateRule

_ADVICE = {
    "call": "restore()",
    "instead": (
        "if this is another run, give it another directory=, or pass fresh=True to start over"
    ),
}
"""Advice for the user about a checkpoint of another model."""


def match_checkpoint(
    path: str,
    manifest: Manifest,
    groups: Sequence[Mapping[str, Any]],
    model: torch.nn.Module | None,
    rule: UpdateRule,
    state_format: StateFormat,
    shards: Shards | None = None,
) -> tuple[list[Trainable], list[Stored]]:
    """Find, by name, the live tensor for every tensor of a checkpoint.

    The hyper-parameters are those of the checkpoint, as in torch's `load_state_dict`. A parameter
    that has state and is frozen now keeps its state, and is not stepped. A parameter that was
    frozen when the checkpoint was made and is trained now joins with the next step, like an added
    one. So do all parameters if no optimizer has seen the weights; see `match_weights`.
    """
    if manifest.is_untrained:
        return [], match_weights(path, manifest, groups, model, rule, state_format, shards)
    match_class(path, manifest, groups, rule)
    restored = [
        {**rule.defaults, **saved, **{k: g[k] for k in ("params", "param_names") if k in g}}
        for saved, g in zip(rule.without_flags(manifest.groups), groups, strict=True)
    ]
    check_scalars(manifest, rules_of(rule, restored, path), path)
    saved_specs = {spec.name: spec for spec in manifest.layout.parameters}
    live = {
        t.spec.name: t
        for t in describe_parameters(
            restored,
            model,
            rule,
            state_format,
            also=saved_specs,
            constructed=True,
            shards=shards,
        )
    }
    held = {tensor.name for tensor in manifest.layout.model}
    for name in live.keys() & held - saved_specs.keys():
        del live[name]  # it was frozen in the checkpoint, and joins with the next step
    live |= _not_given(manifest, restored, model, rule, state_format, live.keys(), path, shards)
    for name, spec in saved_specs.items():
        if name in live and live[name].spec.cut != spec.cut:
            raise _other_cut_error(path, spec, repr(live[name].spec.stored_name))
    check_same(
        {n: (s.dtype, s.shape) for n, s in saved_specs.items()},
        {n: (t.spec.dtype, t.spec.shape) for n, t in live.items()},
        path,
        **_ADVICE,
    )
    for name, spec in saved_specs.items():
        if live[name].spec != spec:
            raise MismatchError(
                f"{path}: parameter {name!r} was in group {spec.group} and kept "
                f"{list(spec.arrays)}; it is in group {live[name].spec.group} and would keep "
                f"{list(live[name].spec.arrays)}. Construct the optimizer with the same groups and "
                "with the same Options(master=, state_dtype=)."
            )
    if manifest.layout.state_dtype != state_format.state_dtype:
        raise MismatchError(
            f"{path} keeps its state as {manifest.layout.state_dtype}, this optimizer as "
            f"{state_format.state_dtype}: pass "
            f"options=Options(state_dtype={manifest.layout.state_dtype!r})"
        )
    trainables = [live[spec.name] for spec in manifest.layout.parameters]
    with replacing():
        stored = describe_model(model, groups, trainables, shards)
        stored = in_checkpoint(model, stored, manifest.layout.model, path, shards)
    check_same(
        {t.name: (t.dtype, t.shape) for t in manifest.layout.model},
        {item.spec.name: (item.spec.dtype, item.spec.shape) for item in stored},
        path,
        **_ADVICE,
    )
    return trainables, stored


def match_weights(
    path: str,
    manifest: Manifest,
    groups: Sequence[Mapping[str, Any]],
    model: torch.nn.Module | None,
    rule: UpdateRule,
    state_format: StateFormat,
    shards: Shards | None = None,
) -> list[Stored]:
    """Find the live tensor for every tensor of a checkpoint that no optimizer has seen.

    The file may have a tied tensor under any of its names. Buffers that it lacks stay as they are.
    """
    trainables = describe_parameters(
        groups, model, rule, state_format, constructed=True, shards=shards
    )
    held = manifest.layout.model
    with replacing():
        live = describe_model(model, groups, trainables, shards)
        live = in_checkpoint(model, live, held, path, shards)
    names = names_in_checkpoint(live, held)
    stored = [item.called(name) for name, item in zip(names, live, strict=True)]
    present = {tensor.name for tensor in held}
    stored = [
        item
        for item in stored
        if item.spec.name in present or isinstance(item.parameter, torch.nn.Parameter)
    ]
    check_same(
        {t.name: (t.dtype, t.shape) for t in held},
        {item.spec.name: (item.spec.dtype, item.spec.shape) for item in stored},
        path,
        call="restore()",
        instead=(
            "or import weights of this model: --dtype converts them, --skip leaves out tensors, "
            "and --tied ALIAS=NAME one of two copies"
        ),
    )
    return stored


def match_class(
    path: str, manifest: Manifest, groups: Sequence[Mapping[str, Any]], rule: UpdateRule
) -> None:
    """Check what of a match does not depend on how the state is divided."""
    if manifest.is_untrained:
        return
    if manifest.optimizer != rule.class_name:
        raise MismatchError(
            f"{path} was made with {manifest.optimizer}, this optimizer is {rule.class_name}: "
            "construct the same class, or use another directory"
        )
    check_hyperparameters(manifest, rule.defaults, path)
    if len(manifest.groups) != len(groups):
        raise MismatchError(
            f"{path} has {many(len(manifest.groups), 'parameter group')}, this optimizer has "
            f"{len(groups)}: construct it with the same groups, and add those that were added "
            "during training, before calling restore()"
        )


def take_hyperparameters(
    groups: Sequence[dict[str, Any]], manifest: Manifest, rule: UpdateRule, path: str
) -> None:
    """Make the hyper-parameters of a checkpoint those of the groups that it was matched with.

    The groups keep theirs if no optimizer has seen the checkpoint.
    """
    if manifest.is_untrained:
        return
    rule.rewind(groups)
    for group, saved in zip(groups, rule.without_flags(manifest.groups, path), strict=True):
        group.update(copy.deepcopy(saved))  # a tensor learning rate is changed in place


def _other_cut_error(path: str, spec: ParameterSpec, found: str) -> MismatchError:
    """Return the error for a parameter of which this rank steps another part than was stored."""
    return MismatchError(
        f"{path} has the state of {spec.stored_name!r}, this rank steps {found}: resume with as "
        "many ranks as it was made with, and the same sharding"
    )


def _not_given(
    manifest: Manifest,
    groups: Sequence[Mapping[str, Any]],
    model: torch.nn.Module | None,
    rule: UpdateRule,
    state_format: StateFormat,
    given: Container[str],
    path: str,
    shards: Shards | None,
) -> dict[str, Trainable]:
    """Find parameters of the model that have state but are in no group; their state is kept.

    These parameters are frozen now, or had been taken out of their group before the checkpoint.
    """
    parameters: dict[str, torch.Tensor] = {}
    if model is not None:
        named = names_of(model, shards)
        parameters = {named(name): parameter for name, parameter in model.named_parameters()}
    names = [tensor.name for tensor in manifest.layout.model]
    were_given = {names[i] for group in manifest.order or () for i in group}
    found = {}
    for spec in manifest.layout.parameters:
        parameter = parameters.get(spec.name)
        if spec.name in given or parameter is None:
            continue
        if shards is not None and shards(spec.name, parameter) is None:
            raise _other_cut_error(path, spec, "nothing of it")
        if parameter.requires_grad and (manifest.order is None or spec.name in were_given):
            raise MismatchError(
                f"{path}: parameter {spec.name!r} has optimizer state in the checkpoint and "
                "requires gradients now, but was not given to this optimizer. Construct it with "
                "that parameter, too, or freeze the parameter (requires_grad_(False)): then its "
                "state is kept for later"
            )
        check_parameter(spec.name, parameter, sharded=shards is not None)
        dtype = DTYPE_CODES[parameter.dtype]
        arrays = state_format.stored_arrays(dtype, rule.rule(groups[spec.group]).arrays)
        trainable = make_trainable(spec.name, parameter, spec.group, arrays, shards)
        if trainable is not None:
            found[spec.name] = trainable
    return found


def whole_copy(
    store: StateStore,
    slot: Slot,
    captured: Captured,
    buffers: BlockBuffers,
    *,
    reads_back: bool = False,
) -> WholeCopy:
    """Return the copy of all tensors that a seal makes into its slot; see `WholeCopy`."""
    return WholeCopy(
        slot.layout,
        captured.stored,
        slot.model,
        buffers,
        slot.context,
        slot.model_leaves,
        captured.marks,
        partial(_clone_source, store, slot),
        reads_back=reads_back,
    )


def _clone_source(store: StateStore, slot: Slot, trained: TensorRanges) -> CloneSource | None:
    """Return the newest checkpoint's model file, if it can be cloned from."""
    newest = store.newest  # it stays the newest until this seal has ended
    source = newest.slot if newest is not None else None
    if newest is None or source is None or not len(source.model_leaves):
        return None
    if source.layout.model_header.encoded != slot.layout.model_header.encoded:
        return None
    try:
        if not store.is_usable(newest):
            return None  # it was quarantined or replaced while training runs
    except StorageError:
        return None
    return CloneSource(source.model, source.path, source.model_leaves, trained)


def load_whole(
    checkpoint: StoredCheckpoint, slot: Slot, stored: Sequence[Stored], buffers: BlockBuffers
) -> int:
    """Load all tensors of a checkpoint's model file in place; return the number of bytes read."""
    content = model_file(checkpoint.manifest)
    # What stays in the file is read, and compared with its digests, when it is used.
    boxes = [(item.spec.name, item.tensor) for item in stored if not stays_filed(item.parameter)]
    wanted = [LiveBox.whole(name, tensor) for name, tensor in boxes]
    file = StoredModel(slot.model, content, slot.model_leaves)
    reading = ModelReading([file], wanted, batch_bytes=buffers.block_bytes)
    reading.read(buffers, slot.context)
    return reading.num_bytes


def load_recut(
    store: StateStore, checkpoint: StoredCheckpoint, stored: Sequence[Stored], traffic: Traffic
) -> int:
    """Load the model of a checkpoint that several ranks have made; return the bytes read."""
    wanted = [LiveBox.whole(item.spec.name, item.tensor) for item in stored]
    return read_model(
        store.backend,
        checkpoint.path,
        checkpoint.manifest,
        wanted,
        traffic,
        parts=store.directories[1:],
    )


def has_same_model(
    sealed: StoredCheckpoint, stored: Sequence[Stored], buffers: BlockBuffers
) -> bool:
    """Return whether parameters and buffers equal those of a checkpoint, bit for bit.

    Reads memory, not storage. The optimizer state cannot differ, because no step has been taken.
    """
    manifest, slot = sealed.manifest, sealed.slot
    if slot is None:
        return False
    tensors = {item.spec.name: item.tensor for item in stored}
    header, digests = manifest.layout.model_header, manifest.model_digests
    image = ModelImage(header, tensors, traffic=buffers.traffic, file=slot.model)
    return tuple(digest_model(image, buffers, slot.context, digests)) == digests
