"""Continuing from a checkpoint: match it with the live model, then load the parameters.

The optimizer state is not read: the next step reads it from the checkpoint. Everything is matched
by name before anything is changed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from offload.errors import CheckpointError, DamagedError, MismatchError
from offload.format.arrays import StateFormat
from offload.format.layout import ParameterSpec
from offload.format.manifest import Manifest
from offload.model.loading import check_same
from offload.model.model_file import BlockBuffers, ModelImage, read_model
from offload.model.parameters import (
    Stored,
    Trainable,
    check_parameter,
    describe_model,
    describe_parameters,
)
from offload.model.replacing import replacing
from offload.store.giving_up import give_up
from offload.store.opening import StoredCheckpoint
from offload.store.slot import Slot
from offload.store.store import Store
from offload.units import many, said_once, seen_from
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


def choose_checkpoint(
    store: Store, which: int | str | None, *, discard_newer: bool
) -> StoredCheckpoint | None:
    """Return the checkpoint to restore; None if there is none and none was asked for.

    Warns about directories that look like checkpoints but cannot be used.

    Args:
        store: Store of the optimizer.
        which: Step number, or path or name of the checkpoint's directory; None for the newest.
        discard_newer: Whether newer checkpoints may be withdrawn.

    Raises:
        CheckpointNotFoundError: No checkpoint has that step, path or name.
        CheckpointError: There are checkpoints, but none can be used.
        MismatchError: There are newer checkpoints, and `discard_newer` is not set.
    """
    reasons = said_once([seen_from(path, reason) for path, reason in store.refused])
    for (path, _), reason in zip(store.refused, reasons, strict=True):
        warnings.warn(f"not using {path}: {reason}", RuntimeWarning, stacklevel=4)
    newest = store.newest
    found = newest if which is None else store.find(which)
    if found is None and store.refused:
        listed = "; ".join(said_once([reason for _, reason in store.refused]))
        raise CheckpointError(
            f"{store.directory}: none of its checkpoints can be used ({listed}). Repair them, or "
            "pass fresh=True to start over."
        )
    if found is not newest and found is not None and not discard_newer:
        raise MismatchError(
            f"{found.path} is not the newest checkpoint of its store; to train on from it, pass "
            "discard_newer=True, which withdraws the newer ones. To only read it, use "
            "open_checkpoint or load_parameters."
        )
    return found


def give_up_damaged(
    store: Store, damaged: StoredCheckpoint, error: DamagedError, which: int | str | None
) -> StoredCheckpoint | None:
    """Quarantine a damaged checkpoint, and choose the newest one left, with a warning.

    Args:
        store: Store of the optimizer.
        damaged: Checkpoint that was found damaged.
        error: Error that describes the damage.
        which: Checkpoint that the user asked for; None for the newest.

    Returns:
        The newest checkpoint left; None if there is none, or if the user asked for the damaged one.

    Raises:
        DamagedError: A newer checkpoint was quarantined already, so a person has to look.
    """
    if refusal := give_up(store, damaged, error):
        raise DamagedError(f"{error}. {refusal}") from error
    newest = store.newest
    if which is not None or newest is None:
        return None
    warnings.warn(
        f"{error}. {damaged.path} is quarantined; continuing from the one before it, {newest.path}",
        RuntimeWarning,
        stacklevel=4,
    )
    return newest


def match_checkpoint(
    checkpoint: StoredCheckpoint,
    groups: Sequence[Mapping[str, Any]],
    model: torch.nn.Module | None,
    rule: UpdateRule,
    state_format: StateFormat,
) -> tuple[list[Trainable], list[Stored]]:
    """Find, by name, the live tensor for every tensor of a checkpoint.

    The hyper-parameters are those of the checkpoint, as in torch's `load_state_dict`. A parameter
    that has state and is frozen now keeps its state, and is not stepped. A parameter that was
    frozen when the checkpoint was made and is trained now joins with the next step, like an added
    one.

    Args:
        checkpoint: Checkpoint to match.
        groups: ``param_groups`` of the optimizer.
        model: Model of the optimizer, or None.
        rule: Update rule of the optimizer.
        state_format: Form in which the optimizer stores its state.

    Returns:
        The trainable parameters in the checkpoint's order, and the tensors of its model file.

    Raises:
        MismatchError: The optimizer class, the groups, or names, shapes or dtypes are different.
        CheckpointError: The class cannot have the checkpoint's hyper-parameters or scalar state.
    """
    manifest, path = checkpoint.manifest, checkpoint.path
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
    restored = [
        {**rule.defaults, **saved, **{k: g[k] for k in ("params", "param_names") if k in g}}
        for saved, g in zip(manifest.groups, groups, strict=True)
    ]
    check_scalars(manifest, rules_of(rule, restored, path), path)
    saved_specs = {spec.name: spec for spec in manifest.layout.parameters}
    live = {
        t.spec.name: t
        for t in describe_parameters(
            restored, model, rule, state_format, also=saved_specs, constructed=True
        )
    }
    held = {tensor.name for tensor in manifest.layout.model}
    for name in live.keys() & held - saved_specs.keys():
        del live[name]  # it was frozen in the checkpoint, and joins with the next step
    live |= _not_given(manifest, restored, model, rule, state_format, live.keys(), path)
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
        stored = describe_model(model, groups, trainables)
    check_same(
        {t.name: (t.dtype, t.shape) for t in manifest.layout.model},
        {item.spec.name: (item.spec.dtype, item.spec.shape) for item in stored},
        path,
        **_ADVICE,
    )
    return trainables, stored


def _not_given(
    manifest: Manifest,
    groups: Sequence[Mapping[str, Any]],
    model: torch.nn.Module | None,
    rule: UpdateRule,
    state_format: StateFormat,
    given: Container[str],
    path: str,
) -> dict[str, Trainable]:
    """Find parameters of the model that have state but are in no group; their state is kept.

    These parameters are frozen now, or had been taken out of their group before the checkpoint.

    Raises:
        MismatchError: A parameter requires gradients, and may have been in a group of the
            checkpoint.
    """
    parameters = {} if model is None else dict(model.named_parameters())
    names = [tensor.name for tensor in manifest.layout.model]
    were_given = {names[i] for group in manifest.order or () for i in group}
    found = {}
    for spec in manifest.layout.parameters:
        parameter = parameters.get(spec.name)
        if spec.name in given or parameter is None:
            continue
        if parameter.requires_grad and (manifest.order is None or spec.name in were_given):
            raise MismatchError(
                f"{path}: parameter {spec.name!r} has optimizer state in the checkpoint and "
                "requires gradients now, but was not given to this optimizer. Construct it with "
                "that parameter, too, or freeze the parameter (requires_grad_(False)): then its "
                "state is kept for later"
            )
        check_parameter(spec.name, parameter)
        dtype = DTYPE_CODES[parameter.dtype]
        arrays = state_format.stored_arrays(dtype, rule.rule(groups[spec.group]).arrays)
        shape = tuple(parameter.shape)
        now = ParameterSpec(spec.name, dtype, shape, spec.group, arrays)
        found[spec.name] = Trainable(now, parameter)
    return found


def load_checkpoint(
    checkpoint: StoredCheckpoint,
    slot: Slot,
    stored: Sequence[Stored],
    buffers: BlockBuffers,
    groups: Sequence[dict[str, Any]],
) -> int:
    """Load parameters, buffers and hyper-parameters in place; return the number of bytes read.

    Args:
        checkpoint: Checkpoint to load.
        slot: Open files of the checkpoint.
        stored: Live tensors of the model file.
        buffers: Memory for copying tensors.
        groups: ``param_groups`` of the optimizer.

    Raises:
        DamagedError: The model file is damaged. Some parameters may have been overwritten.
    """
    manifest = checkpoint.manifest
    tensors = {item.spec.name: item.tensor for item in stored}
    image = ModelImage(manifest.layout.model_header, tensors, traffic=buffers.traffic)
    digests = manifest.model_digests
    read_model(image, slot.model, buffers, slot.context, digests, slot.model_leaves)
    for group, saved in zip(groups, manifest.groups, strict=True):
        group.update(copy.deepcopy(dict(saved)))  # a tensor learning rate is changed in place
    return image.data_bytes
