"""How a rank gets a slot to write the next generation into: when all ranks have one."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NoReturn

from offload.distributed.agreement.peers import Json
from offload.distributed.agreement.seal import NO_SEAL, Offer
from offload.distributed.node import drive_of
from offload.distributed.rank_checkpoints import RankCheckpoints
from offload.distributed.rank_opening import Opened
from offload.distributed.rank_sealing import RankSealing
from offload.distributed.share_copy import SharedFile
from offload.errors import RanksError
from offload.format.digests import Content
from offload.format.layout import Layout
from offload.format.shares.model_shares import ModelShare
from offload.model.buffer_watch import BufferWatch, differ, in_words, say
from offload.store.claims import NamedParts
from offload.store.owner_store import OwnerStore, remove_parts_of_former_owners
from offload.store.slots.slot import SlotState
from offload.store.space import available_bytes, require_available
from offload.store.state_store import StateSlot

_UNKNOWN: Final = -1
"""Number in an offer that stands for a checkpoint whose manifest cannot be read."""

_LOST: Final = (
    "this rank's part of the last seal could not be made durable, so its state is lost: call "
    "restore() on every rank, which goes on from the newest checkpoint in another part, or restart "
    "the job"
)
"""What a rank says that cannot go on in the slot of an aborted seal."""


class RankGranting:
    """The grants of slots, on one rank. After an aborted seal all ranks go on in its slots."""

    def __init__(
        self,
        opened: Opened,
        checkpoints: RankCheckpoints,
        sealing: RankSealing,
        share_of: Callable[[Layout], ModelShare],
        watch: BufferWatch,
    ) -> None:
        self._watch = watch
        self._opened = opened
        self._checkpoints = checkpoints
        self._sealing = sealing
        self._share_of = share_of
        self._granted: StateSlot | None = None
        """Slot of this rank in the grant that is in progress."""

    def acquire(
        self, layout: Layout, num_groups: int, call: str, *, is_new: bool = False
    ) -> StateSlot:
        """Return a slot to write the next generation into, when all ranks have one. Collective."""
        if is_new:
            self._sealing.last_aborted = None
        aborted = self._sealing.last_aborted

        def offer() -> Offer:
            """Choose the slots of all ranks, on the writer."""
            return self._again() or self._new_slot(layout, num_groups)

        def ready(found: Offer, held: frozenset[str]) -> Json:
            """Get the slot of this rank ready, if it is not the writer."""
            part = self._opened.part
            if part is not None:
                self._granted = self._ready(part, found, held, layout)
            return self._watch.note()

        self._granted = None
        try:
            granted = self._opened.agreement.grant(offer, ready, call)
            self._compare_buffers(granted.notes, call)
        except BaseException:
            slot, self._granted = self._granted, None
            if slot is not None and (aborted is None or slot is not aborted.slot):
                self.release(slot)
            raise
        slot, self._granted = self._granted, None
        if slot is None:
            raise RanksError("this rank was granted no slot: restart the job")
        if granted.offer.is_in_place:
            self._sealing.warn_of_aborted(granted.offer.in_place_of, granted.offer.reason)
        self._sealing.last_aborted = None
        content = Content(granted.offer.content, granted.offer.readable)
        self._sealing.granted(slot, SharedFile(granted.offer.slot, content))
        return slot

    def _compare_buffers(self, notes: Mapping[int, Json], call: str) -> None:
        """Warn on the writer, once, of buffers that differ between ranks. Collective."""
        if not differ(notes.values()):
            return  # on all ranks: they have the same notes
        agreement = self._opened.agreement
        words = in_words(dict(enumerate(agreement.everywhere(call, self._watch.digests))))
        self._watch.stop()
        is_said = words and agreement.peers.is_leader
        agreement.together(call, say(words) if is_said else lambda: None)

    def refuse(self, error: Exception, call: str) -> None:
        """Take part in `acquire` of all ranks with an error of this one. Collective."""

        def fail(*_: object) -> NoReturn:
            raise error

        self._opened.agreement.grant(fail, fail, call)

    def release(self, slot: Any) -> None:
        """Take back a slot that was acquired and will not be sealed."""
        last = self._sealing.last_aborted
        if last is not None and last.slot is slot:
            self._sealing.last_aborted = None
        if self._opened.store is not None:
            self._opened.store.release(slot)
        elif self._opened.part is not None and self._checkpoints.checkpoint_of(slot) is None:
            self._opened.part.release(slot)

    def _again(self) -> Offer | None:
        """Return the writer's offer of the slots of an aborted seal; None if a new one is due."""
        last, store = self._sealing.last_aborted, self._opened.writer
        if last is None:
            return None
        if store.poisoned:
            raise RanksError(f"{self._opened.agreement.peers.name(0)}: {_LOST}")
        if last.slot.state is not SlotState.WORKING or not last.slot.is_surely_in_place():
            return None
        self._granted = last.slot
        return _offer(last.slot, in_place_of=last.number, reason=last.reason)

    def _new_slot(self, layout: Layout, num_groups: int) -> Offer:
        """Return the writer's offer of new slots, with all parts that checkpoints name."""
        opened, store = self._opened, self._opened.writer
        for directory in opened.directories:
            remove_parts_of_former_owners(
                store.backend,
                directory,
                store.store_id,
                store.named_parts(),
                {*opened.plan.homes},
            )
        own = store.acquire(layout, num_groups)
        self._granted = own
        named = store.named_parts()
        pairs = [(owner, name) for owner, names in named.names.items() for name in names]
        pairs += [(_UNKNOWN, path) for path in named.unknown]
        return _offer(own, named=tuple(pairs))

    def _ready(
        self, part: OwnerStore, found: Offer, held: frozenset[str], layout: Layout
    ) -> StateSlot:
        """Return the slot of a rank that is not the writer."""
        if found.in_place_of != NO_SEAL:
            self._sealing.wait_ended()  # it takes back its part after it has read the decision
            last = self._sealing.last_aborted
            if last is None or last.slot.state is not SlotState.WORKING:
                raise RanksError(_LOST)
            return last.slot
        self._checkpoints.release_older(part)
        named = _named_in(found)
        if not self._opened.is_near:  # what former owners have left here, the writer does not see
            for directory in self._opened.further:
                remove_parts_of_former_owners(
                    part.backend, directory, part.store_id, named, {*self._opened.plan.homes}
                )
        names = named.of(part.owner) | held
        self._checkpoints.forget_recycled(names)
        return part.ready(
            layout,
            found.generation,
            NamedParts({part.owner: names}, named.unknown),
            written=[(entry.name, entry.box) for entry in self._share_of(layout).entries],
        )


def _named_in(offer: Offer) -> NamedParts:
    """Return the parts that an offer names, by owner."""
    names: dict[int, frozenset[str]] = defaultdict(frozenset)
    for owner, name in offer.named:
        names[owner] |= {name}
    unknown = sorted(names.pop(_UNKNOWN, ()))
    return NamedParts(names, tuple(unknown))


def _offer(slot: StateSlot, **fields: Any) -> Offer:
    """Return the offer of a slot of the writer."""
    content = slot.model_leaves.content
    return Offer(
        slot=os.path.basename(slot.path),
        generation=slot.context.generation,
        content=content.name,
        readable=content.readable,
        **fields,
    )


@dataclass(frozen=True, slots=True)
class Room:
    """What one rank needs of a drive, and what it finds there."""

    drive: str
    """Text that is the same for two ranks that write to one drive."""

    place: str
    """Text that is the same for two ranks that write into one directory."""

    directory: str
    needed_bytes: int
    free_bytes: int
    spare_bytes: int
    """Bytes in the directory that nobody needs any more."""


def require_rooms(opened: Opened, needed_bytes: int) -> None:
    """Check that all ranks' drives have room for the first slot of another cut. Collective."""

    def make(_: object) -> Json:
        """Tell all ranks, on the writer, which parts have to stay."""
        return opened.writer.lasting_parts().to_json()

    def ready(lasting: Json) -> Json:
        return asdict(_room(opened, needed_bytes, NamedParts.from_json(lasting)))

    notes = opened.agreement.agree("restore()", make, ready).notes
    lacking = first_lacking([Room(**notes[rank]) for rank in sorted(notes)])
    if lacking is not None:
        require_available(*lacking)


def first_lacking(rooms: Sequence[Room]) -> tuple[str, int, int] | None:
    """Return the first drive without room; None if all have room. Pure."""
    on_drive: dict[str, list[Room]] = {}
    for room in rooms:
        on_drive.setdefault(room.drive, []).append(room)
    for ranks in on_drive.values():
        spare: dict[str, int] = {}  # ranks that share a directory find the same there
        for room in ranks:
            spare[room.place] = max(spare.get(room.place, 0), room.spare_bytes)
        needed = sum(room.needed_bytes for room in ranks)
        available = min(room.free_bytes for room in ranks) + sum(spare.values())
        if needed > available:
            return ranks[0].directory, needed, available
    return None


def _room(opened: Opened, needed_bytes: int, lasting: NamedParts) -> Room:
    backend, home = opened.backend, opened.home
    drive, place = drive_of(backend, home)
    free = backend.free_bytes(home)
    if opened.store is not None:
        available = opened.store.available_bytes()
    elif opened.is_near and place == opened.place:
        available = free  # what nobody needs there is counted by the writer
    else:
        # After a download from a tier, the store has another identity than when it was opened.
        store_id = opened.plan.store_id if opened.part is None else opened.part.store_id
        available = available_bytes(backend, home, store_id, lasting, ())
    return Room(drive, place, home, needed_bytes, free, max(available - free, 0))
