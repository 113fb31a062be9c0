"""An owner's share of a copy: the table of its part, its shard file of the model, and its state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gds import Backend, Buffer
from offload.format.manifest import Manifest
from offload.tiers.checking import Fetcher, check_model, check_state, check_whole, nothing
from offload.tiers.contents import StateObject, state_objects, table_name
from offload.tiers.model_objects import ModelObject
from offload.tiers.ranks.owner_source import OwnerSource
from offload.tiers.sending import Sending, Transfer
from offload.tiers.services.objects import Objects
from offload.tiers.source import whole_digest


@dataclass(frozen=True, slots=True)
class ShareSent:
    """What an owner's share of a copy consists of, for the marker."""

    sizes: dict[str, int]
    """Size in bytes of each object, by name."""

    digests: dict[str, str]
    """Digest of each object that no table has digests for, by name."""

    bytes_sent: int
    """Size in bytes of the objects that were sent; the others had been sent before."""


class OwnerShare:
    """The objects of one owner besides the first.

    Args:
        source: Part of the owner.
        object_bytes: Size in bytes up to which whole chunks are put together to one object.
    """

    def __init__(self, source: OwnerSource, object_bytes: int) -> None:
        self._source = source
        self._table = table_name(source.owner)
        self.state: list[StateObject] = state_objects(source.table, object_bytes)
        """Objects of the owner's state."""
        shard = source.model
        self.sizes = {
            self._table: len(source.document),
            **({} if shard is None else {shard.name: shard.nbytes}),
            **{one.name: one.nbytes for one in self.state},
        }
        """Size in bytes of each object, by name."""
        self.digests = {self._table: whole_digest(source.document)}
        """Digest of each object that no table has digests for, by name."""

    @property
    def most_bytes(self) -> int:
        """Size in bytes of the largest object of state."""
        return max((one.nbytes for one in self.state), default=0)

    def transfers(
        self, objects: Objects, folder: str, fetcher: Fetcher, sending: Sending
    ) -> Iterator[Transfer]:
        """Yield what is to be sent: the table, then the shard file of the model, then the state.

        Args:
            objects: Objects of the tier.
            folder: Folder of the copy.
            fetcher: Reads objects of the copy back.
            sending: Sends what is yielded.
        """

        def send_table(_: Buffer) -> None:
            """Send the table of this owner."""
            objects.put(f"{folder}/{self._table}", self._source.document)

        def send_model(one: ModelObject, buffer: Buffer) -> None:
            """Send this owner's part of the model."""
            blocks = sending.while_going_on(self._source.model_blocks(one, buffer))
            objects.put_stream(f"{folder}/{one.name}", blocks, one.nbytes)

        def send(one: StateObject, buffer: Buffer) -> None:
            """Send an object of state."""
            objects.put(f"{folder}/{one.name}", self._source.read_object(one, buffer))

        yield Transfer(
            self._table,
            self.sizes[self._table],
            send_table,
            partial(check_whole, fetcher, self.sizes, self.digests, nothing),
        )
        shard = self._source.model
        if shard is not None:
            yield Transfer(
                shard.name,
                shard.nbytes,
                partial(send_model, shard),
                partial(check_model, fetcher, shard, nothing),
            )
        for one in self.state:
            yield Transfer(
                one.name,
                one.nbytes,
                partial(send, one),
                partial(check_state, fetcher, one, nothing),
            )


def send_share(
    share: OwnerShare,
    objects: Objects,
    folder: str,
    manifest: Manifest,
    sending: Sending,
    backend: Backend,
) -> ShareSent:
    """Send the share of an owner that another process writes the marker for.

    Objects that the tier has already are compared and not sent again, so no record is needed.
    """
    below = f"{folder}/{next(iter(share.sizes)).partition('/')[0]}"
    objects.drop_unfinished(below)
    listed = objects.sizes_below(below)
    present = {name.removeprefix(f"{folder}/"): nbytes for name, nbytes in listed.items()}
    fetcher = Fetcher(objects, folder, manifest)
    transfers = share.transfers(objects, folder, fetcher, sending)
    sending.run(transfers, present, backend, share.most_bytes)
    return ShareSent(share.sizes, share.digests, sum(sending.sent.values()))


class Others(Protocol):
    """The other ranks of an upload, each of which sends the part that it serves."""

    @property
    def bytes_sent(self) -> int:
        """Size in bytes of the objects that they have sent in this upload."""
        ...

    def begin(self, writer: str, object_bytes: int) -> None:
        """Tell all ranks to send their parts, under the name that the upload has in the tier."""
        ...

    def finish(self) -> list[ShareSent]:
        """Wait until all ranks have sent and checked their parts; return what they are.

        Raises:
            UploadStoppedError: The upload was told to end.
            RecycledError: A rank's part was recycled.
            TierError: A rank has failed, or does not answer.
        """
        ...

    def stop(self) -> bool:
        """Tell all ranks to end; return whether all have ended. Never raises."""
        ...


class NoOthers:
    """One process, which sends everything."""

    bytes_sent = 0

    def begin(self, writer: str, object_bytes: int) -> None:
        """Do nothing."""

    def finish(self) -> list[ShareSent]:
        """Return nothing."""
        return []

    def stop(self) -> bool:
        """Return True: nobody else sends anything."""
        return True
