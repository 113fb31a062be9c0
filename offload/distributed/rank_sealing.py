"""Seals of several ranks: each makes its part durable and reports it, and the writer decides."""

from __future__ import annotations

import base64
import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any
from weakref import WeakKeyDictionary

from offload.distributed.agreement.peers import Json
from offload.distributed.agreement.reports import Report, require_same_scalars, scalar_runs
from offload.distributed.rank_opening import Opened
from offload.distributed.share_copy import KnownShares, ShareCopy, SharedFile
from offload.errors import InDoubtError, OffloadError, SealError, reason_of
from offload.format import document
from offload.format.layout import Layout
from offload.format.manifest import Manifest, encode_group
from offload.format.names import checkpoint_name
from offload.format.shares.model_shares import ModelShare
from offload.format.shares.owners import OwnerReference
from offload.format.train_state import (
    EncodedState,
    join_ranks,
    pack_encoded,
    packed_bytes,
    unpack_encoded,
)
from offload.store.opening import StoredCheckpoint
from offload.store.owner_store import OwnerStore
from offload.store.sealing import Composition, Prepared, pack_train_state
from offload.store.slots.slot import OwnerSlot
from offload.store.state_store import StateSlot


@dataclass(frozen=True, slots=True)
class Aborted:
    """A seal that was aborted, so that its slot may be written again."""

    number: int
    slot: StateSlot
    reason: str


class RankSealing:
    """Seals of a store of several ranks, on one of them; see `offload.store.sealing.Sealing`."""

    def __init__(
        self,
        opened: Opened,
        share_of: Callable[[Layout], ModelShare],
        published: Callable[[str, OwnerSlot, Manifest, OwnerReference], StoredCheckpoint],
    ) -> None:
        self._agreement = opened.agreement
        self._directory = opened.directory
        self._owners = opened.owners
        self._share_of = share_of
        self._published = published
        self._store = opened.store
        self._part = opened.part
        self._number: int | None = None
        """Number of the seal in flight that this rank has not reported yet."""
        self._has_met = False
        """Whether this rank has said in the seal in flight that it has written its blocks."""
        self._position = (0, 0)
        """Step and generation of the seal in flight."""
        self._train_state = EncodedState("null")
        self._slot: StateSlot | None = None
        """Slot of this rank in the seal in flight."""
        self.copy: ShareCopy | None = None
        """Copy of this rank's share of the model in the seal in flight."""
        self.known = KnownShares()
        """What this rank knows of the model files of slots."""
        self._shared: MutableMapping[StateSlot, SharedFile] = WeakKeyDictionary()
        """Model file of each slot that was granted. A seal may fail when the next slot has been
        granted already, or none could be, so what is known belongs to a slot."""
        self._last: StateSlot | None = None
        """Slot of this rank that was granted last."""
        self.last_aborted: Aborted | None = None
        """The last seal, if it was aborted and no slot has been granted since."""
        self._has_ended = threading.Event()
        """Whether what became of the last seal has been noted here, also of its slot."""
        self._has_ended.set()
        self._warned_of: int | None = None
        """Number of the last seal that was warned of."""

    def granted(self, slot: StateSlot, shared: SharedFile) -> None:
        """Record the model file of a slot for which all ranks are ready."""
        self._shared[slot] = shared
        self._last = slot

    def shared_of(self, slot: StateSlot) -> SharedFile:
        """Return the model file of a slot; its content has no name after a failed seal."""
        return self._shared.get(slot, SharedFile())

    def path_of(self, step: int) -> str:
        """Return the path that the checkpoint of a step has."""
        return f"{self._directory}/{checkpoint_name(step)}"

    def begin(self, manifest: Manifest) -> None:
        """Announce a seal. Collective; never waits."""
        self._begin(manifest.step, manifest.generation)
        if self._store is not None:
            self._store.sealing.begin(manifest)

    def begin_failed(self, slot: StateSlot | None, step: int) -> None:
        """Announce a seal that has failed on this rank already; `abandon` must follow.

        Collective; never waits.
        """
        copy, self.copy = self.copy, None
        if copy is not None:
            copy.close()
        if slot is None:
            self.known = KnownShares()
            # The other ranks still write the model file of the writer's slot, whose sync may fail.
            if self._last is not None:
                self._last.model_leaves.forget(readable=False)
        self._slot = slot
        generation = 0 if slot is None else slot.context.generation
        self._begin(step, generation, is_placed=slot is not None)

    def _begin(self, step: int, generation: int, *, is_placed: bool = True) -> None:
        part = self._slot.name if isinstance(self._slot, OwnerSlot) else ""
        self._number = self._agreement.begin_seal(part, is_placed=is_placed)
        self._has_ended.clear()
        self._has_met = False
        self.last_aborted = None  # its slot belongs to this seal now, and may become a checkpoint
        self._position = step, generation

    def end(self) -> None:
        """Announce that the seal has ended on this rank."""
        copy, self.copy = self.copy, None
        if copy is not None:
            copy.close()
        if self._store is not None:
            self._store.sealing.end()
        self._has_ended.set()

    def wait_ended(self) -> None:
        """Wait until the last seal has ended on this rank, of which the decision is known."""
        self._has_ended.wait()

    def compose(self, slot: Any, train_state: EncodedState, **content: Any) -> Composition:
        """Describe this rank's part of a checkpoint; see `offload.store.sealing.compose`."""
        self._train_state = train_state
        self._slot = slot
        if self._store is not None:
            share = self._share_of(slot.layout)
            return self._store.sealing.compose(
                slot,
                train_state,
                owners=self._owners,
                model_boxes=[(entry.name, entry.box) for entry in share.entries],
                **content,
            )
        order = content.get("order")
        manifest = Manifest(
            store_id=slot.context.store_id,
            generation=slot.context.generation,
            step=content["step"],
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            torch_version=content["torch_version"],
            optimizer=content["optimizer"],
            groups=tuple(content["groups"]),
            layout=slot.layout,
            scalars=tuple(content["scalars"]),
            digests={},
            model_digests=(),
            metrics=content.get("metrics") or {},
            order=None if order is None else tuple(map(tuple, order)),
            update_code=content.get("update_code", ""),
        )
        return Composition(manifest, b"")

    def seal(
        self, slot: Any, composition: Composition, model_digests: Sequence[str]
    ) -> StoredCheckpoint:
        """Make the slots of all ranks one checkpoint; durable on return, on every rank."""
        del model_digests  # the copy has them
        number, copy, manifest = self._number, self.copy, composition.manifest
        if number is None or copy is None:
            raise RuntimeError("no seal has begun")
        self._has_met = True
        self._agreement.barrier(number)
        boxes = copy.finish()
        report = Report(
            step=manifest.step,
            generation=manifest.generation,
            hyper_digest=_digest_of_groups(manifest),
            model_digest=_digest_of_model(manifest),
            replicas=copy.replicas,
        )
        if self._part is not None:
            return self._seal_part(self._part, slot, report, boxes, manifest)
        store = self._store
        if store is None:
            raise RuntimeError("this rank has neither the store nor a part of it")
        store.sealing.sync(slot)  # while the other ranks do the same
        done: list[Prepared] = []
        stored: list[StoredCheckpoint] = []

        def complete(reports: Mapping[int, Report]) -> None:
            """Write the manifest with the parts of all ranks, and make it durable."""
            peers = self._agreement.peers
            states = [self._train_state] * peers.size
            references = []
            scalars = {peers.rank: scalar_runs(manifest)}
            for rank in peers.others:
                reference, state, scalars[rank] = reports[rank].extra
                references.append(OwnerReference(**reference))
                states[rank] = from_message(state)
            require_same_scalars(scalars, [tensor.name for tensor in manifest.layout.model])
            references.sort(key=lambda reference: reference.owner)
            size = slot.train_state.size_bytes
            packed = pack_train_state(join_ranks(states), manifest, size)
            done.append(
                store.sealing.prepare(
                    slot,
                    composition._replace(train_state=packed),
                    (),
                    owners=references,
                    model_boxes=boxes,
                )
            )

        def rename() -> None:
            stored.append(store.sealing.publish(done[0]))

        self._number = None
        self._agreement.report(number, report)
        try:
            self._agreement.commit(number, complete, rename)
        except InDoubtError:
            raise
        except SealError as error:
            self._note_aborted(number, slot, error)
            raise
        finally:
            for prepared in done:
                prepared.close()
        return stored[0]

    def _seal_part(
        self,
        part: OwnerStore,
        slot: OwnerSlot,
        report: Report,
        boxes: Any,
        manifest: Manifest,
    ) -> StoredCheckpoint:
        number = self._number
        if number is None:
            raise RuntimeError("no seal has begun")
        reference = part.prepare(slot, manifest.scalars, boxes)
        extra = [asdict(reference), to_message(self._train_state), scalar_runs(manifest)]
        self._number = None
        self._agreement.report(
            number,
            replace(report, part=slot.name, table_digest=reference.digest, extra=extra),
        )
        try:
            self._agreement.await_decision(number)
        except InDoubtError:
            part.abandon(slot)
            raise
        except SealError as error:
            part.aborted(slot)
            self._note_aborted(number, slot, error)
            raise
        part.published(slot)
        return self._published(self.path_of(manifest.step), slot, manifest, reference)

    def abandon(self, error: BaseException) -> None:
        """Report that this rank's part of the seal has failed. Never raises."""
        try:
            self._abandon(error)
        finally:
            self._has_ended.set()

    def _abandon(self, error: BaseException) -> None:
        number, self._number = self._number, None
        if number is None:
            return  # the outcome is known already, or no seal has begun
        step, generation = self._position
        report = Report(step=step, generation=generation, error=reason_of(error))
        try:
            if not self._has_met:
                self._agreement.barrier(number)  # the other ranks wait for this one
            self._agreement.report(number, report)
            if self._store is None:
                self._agreement.await_decision(number)
            else:
                self._agreement.commit(number, _refuse, _refuse)
        except InDoubtError:
            return
        except SealError as aborted:
            if self._slot is not None:
                self._note_aborted(number, self._slot, aborted)
        except OffloadError:
            return

    def _note_aborted(self, number: int, slot: StateSlot, error: SealError) -> None:
        """Record that a seal was aborted; what its model file holds is unknown from now on."""
        slot.model_leaves.forget(readable=False)
        self._shared[slot] = SharedFile(self.shared_of(slot).folder)
        self.last_aborted = Aborted(number, slot, str(error))

    def warn_of_aborted(self, number: int, reason: str) -> None:
        """Warn that a seal failed, and that training goes on in its slot; once for each seal.

        If warnings are errors, no rank has a slot then, and the next call is granted it again.
        """
        if number != self._warned_of:
            self._warned_of = number
            warnings.warn(reason, RuntimeWarning, stacklevel=6)


def to_message(state: EncodedState) -> Json:
    """Return a train state as JSON."""
    size_bytes = packed_bytes(state, {})
    data = pack_encoded(state, capacity_bytes=size_bytes, header={})
    return base64.b64encode(data).decode("ascii")


def from_message(value: Json) -> EncodedState:
    """Return the train state of a message."""
    return unpack_encoded(base64.b64decode(value), "a rank's train state")[0]


def _digest_of_groups(manifest: Manifest) -> str:
    return document.digest_of(
        {str(i): encode_group(i, group) for i, group in enumerate(manifest.groups)}
    )


def _digest_of_model(manifest: Manifest) -> str:
    header = manifest.layout.model_header.encoded
    return hashlib.blake2b(header, digest_size=16).hexdigest()


def _refuse(*_: object) -> None:
    raise SealError("this rank's own part has failed")
