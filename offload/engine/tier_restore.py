"""Restoring from the tier into an empty store: training begins while the state still arrives.

`restore` waits for the parameters only, so the next forward can run. The state arrives in the slot
behind it, and the first step waits for it chunk by chunk. A checkpoint of several ranks arrives as
a whole, because it is read in another cut than it has.
"""

from __future__ import annotations

import time

from offload.checkpoint.checkpoint import Checkpoint
from offload.engine.arrival import Arrival
from offload.engine.matching import match_checkpoint, take_hyperparameters
from offload.engine.rank_arrival import download, note_damage
from offload.engine.training_state import Groups, TrainingState
from offload.engine.whole_model import load_whole
from offload.errors import DamagedError
from offload.journal import log_event
from offload.store.opening import StoredCheckpoint
from offload.store.store import Store
from offload.tiers.arriving import ArrivingState, open_newest
from offload.tiers.download import Download
from offload.units import duration


def restore_from_tier(state: TrainingState, groups: Groups) -> Checkpoint | None:
    """Continue from the newest whole checkpoint of the tier, whose state arrives meanwhile.

    A copy that is found damaged is passed over with a warning, and the one before it is taken. So
    is one whose state was found damaged when it arrived after an earlier `restore`.
    """
    store, url = state.store, state.lifecycle.tier_url
    if not url or store.checkpoints or store.refused or not isinstance(store, Store):
        return None
    tried: dict[str, str] = {}
    while True:
        share = open_newest(url, store, tried)
        if share is None:
            log_event(f"{url}: no complete checkpoint; training starts from the beginning")
            store.journal.tell()
            return None
        copy = share if isinstance(share, str) else share.url
        try:
            if isinstance(share, str):
                download(state, groups, share)
                return None
            return _take(state, store, groups, share)
        except DamagedError as error:
            if not note_damage(state, copy, error):
                raise
            tried[copy] = str(error)


def _take(state: TrainingState, store: Store, groups: Groups, share: Download) -> Checkpoint:
    """Continue from a checkpoint that arrives; the errors are those of `restore_from_tier`."""
    lifecycle, started = state.lifecycle, time.perf_counter()
    has_slot = False
    try:
        manifest, table, url = share.manifest, state.table, share.url
        trainables, stored = match_checkpoint(
            url, manifest, groups, table.model, state.rule, table.state_format, table.shards
        )
        compute = state.choose_device(groups, manifest.layout, trainables)
        lifecycle.broken = f"restoring {url} failed half way"
        state.forget()
        share.reserve(store)
        slot, has_slot = share.first_slot, True
        share.fetch_train_state()
        share.fetch_model()
        checkpoint = Checkpoint(store.backend, slot.path, manifest)
        _ = checkpoint.train_state
        found = StoredCheckpoint(store.sealing.path_of(manifest.step), manifest, slot)
        state.compute = compute
        table.adopt(manifest.layout, trainables, manifest.scalars)
        state.meter.restore_bytes = load_whole(found, slot, stored, state.block_buffers())
        table.give_back(stored, url)
        take_hyperparameters(groups, manifest, state.rule, url)
        slot.distrust()  # what has arrived is compared once more as it is read
        arrival = Arrival(ArrivingState(share), store, slot)
        state.slots.resume(slot, None)
        state.seal = arrival
        arrival.start(state.chunks())
    except BaseException:
        state.seal = None
        share.close()
        if has_slot:
            state.slots.forget()
        raise
    state.num_steps = manifest.step
    lifecycle.decided, lifecycle.broken = True, ""
    lifecycle.steps_settled = lifecycle.steps_in_seal = state.meter.steps
    state.meter.restore_s = time.perf_counter() - started
    checkpoint.path = found.path
    log_event(
        f"{url}: restored the parameters of step {manifest.step} in "
        f"{duration(state.meter.restore_s)}; the state is arriving in {store.directory}"
    )
    store.journal.tell()
    return checkpoint
