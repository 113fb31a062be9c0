"""Continuing from a checkpoint: choose one, match it with the live model, and load it.

The optimizer state is not read, unless the user asks for its check: the next step reads it from the
checkpoint. If the checkpoint was made by another number of ranks, or in another sharding, the next
step reads it from a `RecutSource`, and writes a slot of the present cut.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Final, TypeAlias, cast

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.recut.source import RecutSource
from offload.engine.matching import load_recut, load_whole, match_checkpoint, take_hyperparameters
from offload.engine.training_state import Groups, TrainingState
from offload.errors import CheckpointError, DamagedError, MismatchError
from offload.format.manifest import Manifest
from offload.journal import log_event
from offload.model.loading import must_give_back
from offload.model.parameters import Trainable
from offload.model.stored import Stored
from offload.store.opening import StoredCheckpoint, require_state
from offload.store.slots.slot import Slot
from offload.store.state_store import StateSource, StateStore, try_to_quarantine
from offload.stream.model_reader import ModelReader
from offload.stream.passes import check_state
from offload.units import duration, grouped, many, seen_from, size
from offload.update.coding.blocks8 import BlockRecoder

Match: TypeAlias = tuple[list[Trainable], list[Stored]]
"""The live parameters that have state in a checkpoint, and the live tensors that it has."""

_OTHER_CUT: Final = "another cut"

_CALLER = 5
"""Stack level of the code that called the optimizer's `restore`, seen from the helpers of `restore`
here that warn."""


def restore(
    state: TrainingState,
    groups: Groups,
    which: int | str | None,
    *,
    discard_newer: bool,
    verify: bool | None = None,
    reencode: bool | None = None,
    require: Callable[[], None],
) -> Checkpoint | None:
    """Continue from a checkpoint of the store, or from the one before it if it is damaged."""
    store, lifecycle = state.store, state.lifecycle
    state.collect_seal(wait=True, errors=False)
    if state.ranks.size == 1:
        require()
    store.refresh(warn_of_refused=False)
    _warn_of_refused(store)

    reencode = state.options.reencode if reencode is None else reencode
    how = " with reencode=True" if reencode else ""

    def choose() -> tuple[StoredCheckpoint | None, str]:
        """Return the checkpoint that this rank is asked for, also in words."""
        if state.ranks.size > 1:
            require()
        chosen = _choose(store, which, discard_newer=discard_newer)
        if chosen is not None:
            store.keeping.require_no_newer_pins(chosen)
        return chosen, f"{'no checkpoint' if chosen is None else chosen.path}{how}"

    found = state.ranks.choose("restore()", choose)
    if found is None and which is None:
        # Training that uses no tier does not load the code of tiers.
        from offload.engine.tier_restore import receive_from_tier, restore_from_tier

        arriving = receive_from_tier(state, groups) or restore_from_tier(state, groups)
        if arriving is not None:
            return arriving
        if store.checkpoints:  # all of it has been downloaded
            found = state.ranks.choose("restore()", choose)
    if found is None:
        if lifecycle.broken:
            lifecycle.require_usable()
        lifecycle.decided = True
        return None
    while True:
        started = time.perf_counter()
        try:
            return resume(state, groups, found, verify=verify, reencode=reencode)
        except DamagedError as error:
            older = state.ranks.choose(
                "restore()", partial(_give_up_damaged, store, found, error, which)
            )
            if older is None:
                raise DamagedError(f"{error}; {lifecycle.remedy()}") from error
            warnings.warn(
                f"{error}. {found.path} is quarantined; continuing from the one before it, "
                f"{older.path}",
                RuntimeWarning,
                stacklevel=_CALLER - 1,
            )
            log_event(
                f"{found.path}: fell back to step {older.manifest.step} after "
                f"{duration(time.perf_counter() - started)}: this checkpoint is damaged and "
                f"quarantined, and keeps {size(found.tensor_bytes)} of the disk"
            )
            found = older


def resume(
    state: TrainingState,
    groups: Groups,
    found: StoredCheckpoint,
    *,
    parameters: bool = True,
    verify: bool | None = None,
    reencode: bool = False,
    matched: Sequence[Trainable] | None = None,
) -> Checkpoint:
    """Make a checkpoint the present state.

    Args:
        state: State that the checkpoint replaces.
        groups: ``param_groups`` of the optimizer.
        found: One of the store's checkpoints.
        parameters: Whether parameters, buffers and hyper-parameters are loaded as well.
        verify: Whether the state is read and checked at once; None to follow the options.
        reencode: Whether 8-bit state may be encoded anew for another cut; the same on all ranks.
        matched: Parameters that have been matched with the checkpoint already, in its own cut, if
            `parameters` is not set. The model may have grown since.

    Raises:
        MismatchError: The checkpoint does not fit the optimizer and the model. Nothing has changed.
        DamagedError: The content is not what was written. The model may hold parts of it.
    """
    store, lifecycle, ranks = state.store, state.lifecycle, state.ranks
    if matched is None:
        state.know_parameters(groups)
    started = time.perf_counter()
    store.fetch(found)
    with ExitStack() as opened:
        checkpoint = store.reader_of(found)

        def match(manifest: Manifest) -> Match:
            """Check, before anything is changed, that this rank can load all that it needs."""
            if matched is None:
                match = _match(state, groups, found.path, manifest)
            else:
                match = [*matched], []
            if parameters:
                ranks.check_model(found)
            _ = checkpoint.train_state
            return match

        source, (trainables, stored) = _match_in_cut(state, found, match, opened, reencode=reencode)
        if source is not None and state.options.parameters == "drive":
            raise MismatchError(
                f'{found.path} was made by several ranks, which parameters="drive" does not read '
                "yet: restore it without this option, and make a checkpoint"
            )
        manifest = found.manifest if source is None else source.manifest
        compute = state.placement.choose(groups, manifest.layout, trainables)
        if source is not None:
            store.require_recut_room(manifest.layout, len(groups))
        if source is not None and reencode:
            level = _CALLER + 1 if parameters else _CALLER  # then `load_state_dict` was called
            _announce_reencoding(state, found.path, found.manifest, source, level)
        lifecycle.broken = f"restoring {found.path} failed half way"
        state.forget()
        state.compute = compute

        slots: list[StateSource] = []

        def take() -> bool:
            """Make the checkpoint the present state here; return whether more is to be done."""
            slot = store.slot_of(found) if source is None else source
            state.table.adopt(manifest.layout, trainables, manifest.scalars)
            state.meter.restore_bytes = 0
            if parameters:
                state.meter.restore_bytes = _load(state, found, slot, stored, groups)
            slot.distrust()  # the first pass checks the state, even if this process wrote it
            if state.options.verify == "at_restore" if verify is None else verify:
                chunks = state.chunks()
                state.meter.restore_bytes += check_state(state.ring(), slot, chunks, state.meter)
                _check_filed(state, slot, manifest)
            slots.append(slot)
            generation = found.manifest.generation
            if any(c.manifest.generation > generation for c in store.checkpoints):
                return True
            store.withdraw_newer(found)  # finds none, and removes spare slots
            return parameters and must_give_back(state.table.model, stored)

        has_more = ranks.everywhere("restore()", take)
        if parameters:
            ranks.share_model(stored)
        if any(has_more):
            if parameters:
                ranks.together("restore()", partial(state.table.give_back, stored, found.path))
            # Now that the older one has proved to be readable.
            ranks.together("restore()", partial(store.withdraw_newer, found))
        state.num_steps = found.manifest.step
        state.slots.resume(slots[0], found)
        opened.pop_all()  # the slots have it now
    lifecycle.decided, lifecycle.broken = True, ""
    lifecycle.steps_settled = state.meter.steps  # steps after the checkpoint are abandoned
    state.meter.restore_s = time.perf_counter() - started
    log_event(
        f"{checkpoint.path}: restored step {checkpoint.step} in "
        f"{duration(state.meter.restore_s)}, {size(state.meter.restore_bytes)} read"
    )
    store.journal.tell()
    return checkpoint


def _check_filed(state: TrainingState, slot: StateSource, manifest: Manifest) -> None:
    """Read and check the parameters that a restore leaves in the model file."""
    if state.options.parameters == "drive":
        with closing(ModelReader(cast(Slot, slot), state.ring(), restored=manifest)) as reader:
            reader.check_all()


def _announce_reencoding(
    state: TrainingState, path: str, manifest: Manifest, source: RecutSource, level: int
) -> None:
    """Warn, on rank 0, if state will be encoded anew on any rank. Collective."""
    mine = [n for n, t in enumerate(manifest.layout.model) if t.name in source.reencoded]
    num = len(state.ranks.union("restore()", lambda: mine))
    if not num:
        return
    message = (
        f"{path}: the present cut divides blocks of 32 elements that have one scale, so the 8-bit "
        f"state of {many(num, 'parameter')} is encoded anew. Each value changes by at most one "
        "rounding in its new block, and results are from now on not bit-identical to those of a "
        "run that was never resharded"
    )
    own = message if state.ranks.rank == 0 else ""
    state.ranks.warn_together("restore()", own, level)


def _warn_of_refused(store: StateStore) -> None:
    """Warn about directories that look like checkpoints but cannot be used."""
    for text in grouped([(path, seen_from(path, reason)) for path, reason in store.refused]):
        warnings.warn(f"not using {text}", RuntimeWarning, stacklevel=_CALLER)


def _match_in_cut(
    state: TrainingState,
    found: StoredCheckpoint,
    match: Callable[[Manifest], Match],
    opened: ExitStack,
    *,
    reencode: bool,
) -> tuple[RecutSource | None, Match]:
    """Match a checkpoint, in the present cut, with the live model. Collective.

    Returns its state in the present cut, which `opened` closes, or None if it was stored in this
    cut; and what matches.
    """
    store, ranks = state.store, state.ranks
    matches: list[Match] = []

    def try_to_match() -> str:
        """Say why the checkpoint does not match as it is, if so: one exchange finds out."""
        if not store.fits(found, ranks.cuts):
            return _OTHER_CUT
        try:
            matches.append(match(found.manifest))
        except Exception:  # noqa: BLE001  (raised below, unless a rank has another cut)
            return "no match"
        return ""

    said = ranks.everywhere("restore()", try_to_match)
    if not any(said):
        return None, matches[0]
    if _OTHER_CUT not in said:
        return None, ranks.together("restore()", lambda: match(found.manifest))
    with_state = ranks.union("restore()", lambda: store.seen_state(found))

    def open_source() -> RecutSource:
        """Open the state of the checkpoint for reading in the present cut."""
        recode = BlockRecoder() if reencode else None
        source = store.recut(
            found, ranks.cuts, with_state=with_state, recode=recode, shares=state.table.shares
        )
        opened.callback(source.close)
        return source

    source = ranks.together("restore()", open_source)
    return source, ranks.together("restore()", lambda: match(source.manifest))


def _choose(
    store: StateStore, which: int | str | None, *, discard_newer: bool
) -> StoredCheckpoint | None:
    """Return the checkpoint to restore; None if there is none and none was asked for."""
    newest = store.newest
    found = newest if which is None else store.find(which)
    usable = [c for c in store.checkpoints if not c.superseded]
    for one in [found] if found is not None else usable[-1:]:  # without newest, none has state
        require_state(one)
    if found is None and store.refused:
        listed = "; ".join(grouped(store.refused))
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


def _give_up_damaged(
    store: StateStore, damaged: StoredCheckpoint, error: DamagedError, which: int | str | None
) -> tuple[StoredCheckpoint | None, str]:
    """Quarantine a damaged checkpoint, and choose the newest one left; return it in words, too."""
    if refusal := try_to_quarantine(store, damaged, error):
        raise DamagedError(f"{error}. {refusal}") from error
    older = store.newest if which is None else None
    return older, "no older one" if older is None else older.path


def _match(state: TrainingState, groups: Groups, path: str, manifest: Manifest) -> Match:
    table = state.table
    return match_checkpoint(
        path, manifest, groups, table.model, state.rule, table.state_format, table.shards
    )


def _load(
    state: TrainingState,
    checkpoint: StoredCheckpoint,
    slot: StateSource,
    stored: Sequence[Stored],
    groups: Sequence[dict[str, Any]],
) -> int:
    """Load parameters, buffers and hyper-parameters in place; return the number of bytes read."""
    num_bytes = state.ranks.load_model(checkpoint, stored)
    if num_bytes is None and isinstance(slot, RecutSource):
        num_bytes = load_recut(state.store, checkpoint, stored, state.meter.traffic)
    elif num_bytes is None:
        num_bytes = load_whole(checkpoint, cast(Slot, slot), stored, state.block_buffers())
    take_hyperparameters(groups, checkpoint.manifest, state.rule, checkpoint.path)
    return num_bytes
