"""Restoring from the tier into an empty store: training begins while the state still arrives.

`restore` waits for the parameters only. One process waits in its first step for each chunk of the
state; several ranks wait for all of it in the first call that needs it. A checkpoint in another cut
than the present one is downloaded as a whole first. Ranks agree after each step, and an error of
one is raised on all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from offload.checkpoint.checkpoint import Checkpoint
from offload.distributed.ranks import Ranks
from offload.engine.matching import load_whole, match_checkpoint, match_class, take_hyperparameters
from offload.engine.seal_handle import Arrival
from offload.engine.training_state import Groups, TrainingState
from offload.errors import DamagedError, MismatchError, RanksError
from offload.format.shares.owners import OwnerReference
from offload.journal import log_event
from offload.model.parameters import Trainable, names_of
from offload.model.stored import Stored
from offload.store.opening import StoredCheckpoint
from offload.store.shared import Serving
from offload.store.store import Store
from offload.tiers.arriving import ArrivingState, find_newest, open_newest, open_share
from offload.tiers.download import Download
from offload.tiers.services.address import parse_address
from offload.tiers.services.opening import note_damaged
from offload.units import duration, size

_CALL = "restore()"

_SIGN_S = 0.1
"""Seconds between two calls that give a sign; most of them are too early, and cost nothing."""


def receive_from_tier(state: TrainingState, groups: Groups) -> Checkpoint | None:
    """Take the newest complete checkpoint of the tier into the store of all ranks. Collective.

    After an error nothing has become a checkpoint, and the next call goes on from what has arrived.
    """
    ranks, store, lifecycle = state.ranks, state.store, state.lifecycle
    serving = ranks.serving()
    if serving is None:
        return None
    is_empty = not store.checkpoints and not store.refused
    url = _common_tier(ranks.everywhere(_CALL, lambda: [lifecycle.tier_url, is_empty]))
    if not url:
        return None
    tried: dict[str, str] = {}

    def look() -> tuple[str, str]:
        """Look for the newest copy, on the writer, which alone has a warning."""
        if not serving.is_writer:
            return "", ""
        with giving_signs(ranks):
            return find_newest(url, store.directory, tried)

    while True:
        newest, warning = ranks.everywhere(_CALL, look)[serving.writer]
        ranks.warn_together(_CALL, warning if serving.is_writer else "", level=5)
        if not newest:
            log_event(f"{url}: no complete checkpoint; training starts from the beginning")
            store.journal.tell()
            return None
        state.know_parameters(groups)
        try:
            return download(state, groups, newest, serving)
        except DamagedError as error:  # on all ranks
            if not note_damage(state, newest, error):
                raise
            tried[newest] = str(error)


def note_damage(state: TrainingState, url: str, error: DamagedError) -> bool:
    """Note that a copy is damaged, for the next `restore`; return whether the copy is at fault."""
    is_of_copy = url in str(error)
    if is_of_copy:
        note_damaged(state.store.directory, parse_address(url).url, url, str(error))
    return is_of_copy


def download(
    state: TrainingState, groups: Groups, url: str, serving: Serving | None = None
) -> Checkpoint | None:
    """Download a copy and make it a checkpoint of the store. Collective.

    Returns the checkpoint if its parameters are the present ones, and its state is arriving; None
    if all of it is the store's newest checkpoint now. `serving` is None for one process.
    """
    ranks, store = state.ranks, state.store
    served: Sequence[int] = (0,)
    rank, sees_all = 0, True
    if serving is not None:
        served, rank, sees_all = serving.owners, serving.rank, serving.sees_all
    began_s = time.perf_counter()
    opened: list[Download] = []
    backend = store.backend
    try:

        def open_own() -> Download:
            """Open the copy, and read what it says of the share of this rank."""
            with giving_signs(ranks):
                opened.append(
                    open_share(url, backend, store.directory, served, rank, sees_all=sees_all)
                )
            return opened[0]

        def fetch() -> None:
            """Fetch the train state, and this rank's share of the model."""
            with giving_signs(ranks):
                share.fetch_train_state()
            share.fetch_model(ranks.progress)

        share = ranks.together(_CALL, open_own)
        ranks.together(_CALL, lambda: _match(state, groups, share, sees_all=sees_all))
        is_in_cut = ranks.all(_CALL, lambda: _is_in_cut(state, share))
        # A step would begin another history under the identity that the store gets now.
        state.lifecycle.broken = f"restoring {url} failed half way"
        ranks.together(_CALL, lambda: share.reserve(store.served))
        ranks.together(_CALL, fetch)
        if is_in_cut:
            checkpoint = load_parameters(state, groups, share, began_s)
            opened.clear()  # the arrival closes it
            return checkpoint
        ranks.together(_CALL, lambda: share.fetch_state(ranks.progress))
        complete(state, share, _CALL)
    finally:
        for one in opened:
            one.close()
    return None


@contextmanager
def giving_signs(ranks: Ranks) -> Iterator[None]:
    """Give signs of progress during a block that waits for the tier.

    A server may accept a request, and not answer. The tier has time limits of its own, and their
    error says what is wrong. Without signs the other ranks would take this one for lost before.
    """
    has_ended = threading.Event()

    def give() -> None:
        """Give signs until the block has ended."""
        while not has_ended.wait(_SIGN_S):
            ranks.progress()

    thread = threading.Thread(target=give, name="offload-ranks-signs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _match(state: TrainingState, groups: Groups, share: Download, *, sees_all: bool) -> None:
    """Check, before anything is fetched, that a checkpoint fits the model of this rank.

    If it was divided in another way than the model is now, the restore that follows checks the
    rest: only there all parts are seen.
    """
    own, cuts, table = share.own_manifest, state.ranks.cuts or {}, state.table
    match_class(share.url, own, groups, state.rule)
    shapes = {name: cut.shape for name, cut in cuts.items()}
    if state.ranks.cuts is None and table.model is not None:
        named = names_of(table.model, None)
        shapes = {named(name): (*one.shape,) for name, one in table.model.named_parameters()}
    for tensor in own.layout.model:
        shape = shapes.get(tensor.name, tensor.shape)
        if shape != tensor.shape:
            raise MismatchError(
                f"{share.url}: {tensor.name!r} has the shape {list(tensor.shape)}, and the model "
                f"has {list(shape)}: build the model as it was when the checkpoint was made"
            )
    if share.is_recut:
        return  # the ranks are on one host, where the restore sees all parts
    if _is_in_cut(state, share):
        match_checkpoint(
            share.url, own, groups, table.model, state.rule, table.state_format, table.shards
        )
    elif not sees_all:
        raise MismatchError(
            f"{share.url}: the state of this rank's owner is not divided as the model of this "
            "rank is, and the ranks are on several hosts. Go on in the sharding that the "
            "checkpoint was made in, or bring it to one host with `offload pull` first"
        )


def _is_in_cut(state: TrainingState, share: Download) -> bool:
    """Return whether this rank's share is divided as the model of this rank is now."""
    cuts = state.ranks.cuts or {}
    boxes = [(spec.name, spec.box) for spec in share.own_manifest.layout.parameters]
    return not share.is_recut and all(name in cuts and cuts[name].box == box for name, box in boxes)


def _common_tier(said: Sequence[Any]) -> str:
    """Return the tier of all ranks; empty if they have none, or if a store has checkpoints."""
    urls = [url for url, _ in said]
    for rank, url in enumerate(urls):
        if url != urls[0]:
            raise RanksError(
                f"{_CALL}: rank 0 has the tier {urls[0]!r} and rank {rank} has {url!r}: give the "
                "same Options(tier=...) to all ranks"
            )
    return str(urls[0]) if all(is_empty for _, is_empty in said) else ""


def load_parameters(
    state: TrainingState, groups: Groups, share: Download, began_s: float
) -> Checkpoint:
    """Load the parameters of a checkpoint, whose state begins to arrive then. Collective.

    The model of `share` has been fetched. From now on `state` closes the share, unless an error is
    raised; after a `DamagedError` some parameters may have been overwritten.
    """
    ranks, store, table, own = state.ranks, state.store, state.table, share.own_manifest
    # Only the writer has the folder of the checkpoint.
    folder = next((one for one in ranks.everywhere(_CALL, lambda: share.folder) if one), "")
    with ranks.as_checkpoint(folder, share.manifest, own, share.slot) as found:
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
    checkpoint.path = store.sealing.path_of(own.step)
    _parameters_restored(state, share.url, began_s)
    return checkpoint


def complete(state: TrainingState, share: Download, call: str) -> None:
    """Make the shares of all ranks, which have been fetched, a checkpoint. Collective."""
    ranks = state.ranks
    ranks.together(call, share.seal_parts)
    said = ranks.everywhere(call, lambda: [asdict(one) for one in share.tell_references()])
    references = [OwnerReference(**one) for own in said for one in own]
    references.sort(key=lambda one: one.owner)
    ranks.together(call, lambda: share.publish(references))
    share.published()
    state.store.refresh(warn_of_refused=False)
    log_event(
        f"{share.url}: complete in {state.store.directory}; rank {ranks.rank} has fetched "
        f"{size(share.bytes_fetched)}, and {size(share.bytes_kept)} were here"
    )
    state.store.journal.tell()


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
        compute = state.placement.choose(groups, manifest.layout, trainables)
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
    checkpoint.path = found.path
    _parameters_restored(state, url, started)
    return checkpoint


def _parameters_restored(state: TrainingState, url: str, began_s: float) -> None:
    """Record that training can go on from parameters whose state is arriving."""
    lifecycle, meter, store = state.lifecycle, state.meter, state.store
    lifecycle.decided, lifecycle.broken = True, ""
    lifecycle.steps_settled = lifecycle.steps_in_seal = meter.steps
    meter.restore_s = time.perf_counter() - began_s
    log_event(
        f"{url}: restored the parameters of step {state.num_steps} in "
        f"{duration(meter.restore_s)}; the state is arriving in {store.directory}"
    )
    store.journal.tell()


def take_arrived(state: TrainingState, call: str) -> StoredCheckpoint:
    """Wait until the state of all ranks has arrived; return the checkpoint that it is. Collective.

    The state is broken until `resume` has made that checkpoint the present one.
    """
    arriving, ranks = state.arriving, state.ranks
    if arriving is None:
        raise RuntimeError("no state is arriving")
    with state.meter.timed("wait_seal_s"):
        arriving.wait()  # an interrupt leaves `arriving` set
    state.arriving = None
    state.lifecycle.broken = f"the state of {arriving.share.url} did not arrive"
    try:
        ranks.together(call, arriving.require)
        complete(state, arriving.share, call)
    except DamagedError as error:
        note_damage(state, arriving.share.url, error)
        raise
    finally:
        arriving.close()
    found = state.store.newest
    if found is None:
        raise RuntimeError("a checkpoint has been published, and the store has none")
    state.lifecycle.broken = f"restoring {found.path} failed half way"
    return found
