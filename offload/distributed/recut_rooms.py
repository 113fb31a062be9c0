"""Room on the drives of all ranks for the first slot of another cut, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from offload.distributed.agreement.messages import Json
from offload.distributed.node import drive_of
from offload.distributed.rank_opening import Opened
from offload.store.claims import NamedParts
from offload.store.space import available_bytes, require_available


@dataclass(frozen=True, slots=True)
class Room:
    """What one rank needs of a drive, and what it finds there."""

    drive: str
    """Text that is the same for two ranks that write to one drive."""

    place: str
    """Text that is the same for two ranks that write into one directory."""

    directory: str
    """Path of the directory."""

    needed_bytes: int
    """Bytes that the rank is going to write."""

    free_bytes: int
    """Free space of the drive."""

    spare_bytes: int
    """Bytes in the directory that nobody needs any more."""


def require_rooms(opened: Opened, needed_bytes: int) -> None:
    """Check that all ranks' drives have room for the first slot of another cut. Collective."""

    def make(_: object) -> Json:
        """Tell all ranks, on the writer, which parts have to stay."""
        return opened.writer.lasting_parts().to_json()

    def ready(lasting: Json) -> Json:
        """Examine the drive of this rank."""
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
