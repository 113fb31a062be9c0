"""Ranks whose parameters are here, and whose state is arriving from the tier.

`restore` returns when all ranks have loaded the parameters, so the next forward can run. The share
of each rank arrives on a thread of that rank. The next call that needs the state waits until all
shares are there. Then the writer publishes the checkpoint, and all ranks go on from it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from offload.checkpoint.checkpoint import Checkpoint
from offload.engine.matching import match_checkpoint, take_hyperparameters
from offload.engine.training_state import Groups, TrainingState
from offload.format.shares.owners import OwnerReference
from offload.journal import log_event
from offload.model.parameters import Trainable
from offload.model.stored import Stored
from offload.tiers.arriving import ArrivingState
from offload.tiers.download import Download
from offload.units import duration, size

_CALL = "restore()"


def load_parameters(
    state: TrainingState, groups: Groups, share: Download, began_s: float
) -> Checkpoint:
    """Load the parameters of a checkpoint, whose state begins to arrive then. Collective.

    Args:
        state: State of this rank. It becomes that of the checkpoint, but for what arrives.
        groups: ``param_groups`` of the optimizer.
        share: Share of this rank, whose model has been fetched. From now on `state` closes it,
            unless an error is raised.
        began_s: Time when the restore began, as of `time.perf_counter`.

    Returns:
        The checkpoint, as this rank sees it. Its train state has been read.

    Raises:
        MismatchError: The checkpoint does not fit the optimizer and the model.
        RanksError: A rank was lost, or cannot load its share of the model.
        DamagedError: The model differs from the digests. Some parameters may have been overwritten.
    """
    ranks, store, table, own = state.ranks, state.store, state.table, share.own_manifest
    folder = str(ranks.gather(_CALL, share.folder, _first))
    with ranks.hold(folder, share.manifest, own, share.slot) as found:
        store.fetch(found)
        checkpoint = store.reader_of(found)

        def match() -> tuple[Sequence[Trainable], Sequence[Stored]]:
            """Check, before anything is changed, that this rank can load what it needs."""
            matched = match_checkpoint(
                share.url, own, groups, table.model, state.rule, table.state_format, table.shards
            )
            ranks.check_model(found)
            _ = checkpoint.train_state
            return matched

        trainables, stored = ranks.together(_CALL, match)
        state.forget()
        read = ranks.together(_CALL, lambda: ranks.load_model(found, stored))
        ranks.share_model(stored)
        ranks.together(_CALL, lambda: table.give_back(stored, share.url))
    take_hyperparameters(groups, own, state.rule, share.url)
    state.meter.restore_bytes = read or 0
    state.num_steps = own.step
    arriving = ArrivingState(share, ranks.progress)
    state.arriving_groups, state.arriving_trainables = [*groups], trainables
    state.arriving = arriving  # set before the thread begins, as the start may be interrupted
    arriving.start()
    state.lifecycle.decided, state.lifecycle.broken = True, ""
    state.lifecycle.steps_settled = state.lifecycle.steps_in_seal = state.meter.steps
    state.meter.restore_s = time.perf_counter() - began_s
    checkpoint.path = store.sealing.path_of(own.step)
    log_event(
        f"{share.url}: restored the parameters of step {own.step} in "
        f"{duration(state.meter.restore_s)}; the state is arriving in {store.directory}"
    )
    store.journal.tell()
    return checkpoint


def complete(state: TrainingState, share: Download, call: str) -> None:
    """Make the shares of all ranks, which have been fetched, a checkpoint. Collective.

    Args:
        state: State of this rank.
        share: Share of this rank.
        call: Call of the user, for messages.

    Raises:
        RanksError: A rank could not make its share durable, or was lost.
        gds.StorageError: This one could not.
    """
    ranks = state.ranks
    ranks.together(call, share.seal_parts)
    own = [asdict(reference) for reference in share.tell_references()]
    references = [OwnerReference(**one) for one in ranks.gather(call, own, _references)]
    ranks.together(call, lambda: share.publish(references))
    share.published()
    state.store.refresh(warn_of_refused=False)
    log_event(
        f"{share.url}: complete in {state.store.directory}; rank {ranks.rank} has fetched "
        f"{size(share.bytes_fetched)}, and {size(share.bytes_kept)} were here"
    )
    state.store.journal.tell()


def _first(said: Sequence[Any]) -> Any:
    """Return what the only rank says that says anything: the writer."""
    return next((one for one in said if one), "")


def _references(said: Sequence[Any]) -> list[Any]:
    """Return the references of all ranks, by rising owner."""
    return sorted((one for own in said for one in own), key=lambda one: one["owner"])
