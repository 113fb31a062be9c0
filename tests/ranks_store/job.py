"""A job of two ranks without torch: owner 0 on one node, owner 1 on another, values from a formula.

What is stored is a function of step, owner, array and place, so a test knows every byte that a
checkpoint of a step must have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from gds import Backend, File, PosixBackend
from offload.checkpoint.owner_parts import usable_parts
from offload.format import Layout, ModelTensor, ParameterSpec
from offload.format.boxes import Box, Cut
from offload.format.model_shard import ModelShard
from offload.format.shares import owners
from offload.format.shares.owners import ModelBox, parameter_boxes
from offload.format.train_state import encode
from offload.retention import LastK
from offload.store import Slot, Store, StoredCheckpoint
from offload.store.owner_store import OwnerStore
from offload.store.sealing import Composition, Prepared, compose
from offload.store.shared import SharedStore
from offload.store.slots.slot import OwnerSlot

ONE, TWO = "/one/run", "/two/run"
"""The store's directory on the node of owner 0, and on that of owner 1."""

ARRAYS = ("master", "exp_avg")
SHAPES = {"embed": (90, 20), "norm": (300,), "head": (40, 30)}
MODEL = tuple(ModelTensor(name, "BF16", shape) for name, shape in SHAPES.items())


def rows(name: str, start: int, stop: int) -> ParameterSpec:
    """Return rows of a parameter."""
    shape = SHAPES[name]
    box = Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))
    return ParameterSpec(name, "BF16", box.sizes, 0, ARRAYS, Cut(shape, box))


LAYOUTS = (
    Layout((rows("embed", 0, 50), ParameterSpec("norm", "BF16", (300,), 0, ARRAYS)), MODEL, 1024),
    Layout((rows("embed", 50, 90), rows("head", 0, 40)), MODEL, 1024),
)
"""Layout of each owner."""

SCALARS = tuple(((("step", "f32", 1.0),),) * len(layout.parameters) for layout in LAYOUTS)
WHOLE = [(t.name, Box.whole(t.shape)) for t in MODEL]


def values(step: int, owner: int, array: str, chunk: int, nbytes: int) -> bytes:
    """Return the bytes that a chunk has after a step."""
    seed = xxhash.xxh3_64_intdigest(f"{step}/{owner}/{array}/{chunk}".encode())
    return np.random.default_rng(seed).bytes(nbytes)


def model_bytes(step: int) -> bytes:
    """Return the data of the model file after a step."""
    return np.random.default_rng(step).bytes(sum(t.nbytes for t in MODEL))


def write_state(slot: Slot | OwnerSlot, owner: int, step: int) -> None:
    """Write every chunk as it is after a step, as the streamer would."""
    layout = slot.layout
    for chunk in range(layout.num_chunks):
        for name in layout.array_names:
            offset, nbytes = layout.byte_range(name, chunk)
            data = values(step, owner, name, chunk, nbytes)
            slot.array(name, chunk).write_bytes(data, offset)
            slot.digests[name][chunk] = slot.context.digest(name, chunk, memoryview(data))


def write_model(slot: Slot, step: int) -> list[ModelBox]:
    """Write the model file as it is after a step, and return what goes into the manifest."""
    data, header = model_bytes(step), slot.layout.model_header
    slot.model.write_bytes(data, header.data_start)
    found = []
    for name, box in WHOLE:
        entry = header.entries[name]
        found.append(with_digests(slot, name, box, data[entry.start : entry.stop]))
    return found


def with_digests(slot: Slot | OwnerSlot, name: str, box: Box, data: bytes) -> ModelBox:
    """Return a box of the model with the digest of each piece of its bytes."""
    one, size = ModelBox(name, box, ()), owners.MODEL_BLOCK_BYTES
    pieces = enumerate(memoryview(data)[at : at + size] for at in range(0, len(data), size))
    digests = tuple(slot.context.digest(one.digest_array, *piece) for piece in pieces)
    return replace(one, digests=digests)


def shard_bytes(step: int, owner: int, name: str, nbytes: int) -> bytes:
    """Return the bytes that a box of an owner's shard file has after a step."""
    return values(step, owner, f"model of {name}", 0, nbytes)


def write_shard(slot: Slot | OwnerSlot, owner: int, step: int) -> list[ModelBox]:
    """Write an owner's shard file as it is after a step, and return what its table holds."""
    header, found = slot.layout.model_file_header, []
    assert slot.layout.shard is not None
    for name, box in slot.layout.shard.boxes:
        entry = header.entries[name]
        data = shard_bytes(step, owner, name, entry.nbytes)
        slot.model.write_bytes(data, header.data_start + entry.start)
        found.append(with_digests(slot, name, box, data))
    return found


def wrong_boxes(slot: Slot | OwnerSlot, owner: int, step: int) -> list[str]:
    """Return the boxes of a sealed shard file that are not as they were after a step."""
    header = slot.layout.model_file_header
    assert slot.layout.shard is not None
    return [
        f"{slot.model.path}: {name}"
        for name, _ in slot.layout.shard.boxes
        for entry in [header.entries[name]]
        if slot.model.read_bytes(header.data_start + entry.start, entry.nbytes)
        != shard_bytes(step, owner, name, entry.nbytes)
    ]


def wrong_chunks(slot: Slot | OwnerSlot, owner: int, step: int) -> list[str]:
    """Return the chunks of a sealed slot that are not as they were after a step."""
    layout, wrong = slot.layout, []
    for chunk in range(layout.num_chunks):
        for name in layout.array_names:
            offset, nbytes = layout.byte_range(name, chunk)
            expected = values(step, owner, name, chunk, nbytes)
            file: File = slot.array(name, chunk)
            digest = slot.context.digest(name, chunk, memoryview(expected))
            if file.read_bytes(offset, nbytes) != expected or slot.digests[name][chunk] != digest:
                wrong.append(f"{file.path}: chunk {chunk}")
    return wrong


@dataclass
class InFlight:
    """A seal whose parts are durable, before the decision."""

    step: int
    slots: tuple[Slot, OwnerSlot]
    prepared: Prepared


class Job:
    """Two ranks that train together, from the opening of the store to the end of the job.

    Args:
        backends: Backend of each rank's node; one backend twice if they share a host.
        keep: Number of checkpoints to keep.
        directories: The store's directory on each rank's node.
        sharded: Whether each owner has a shard file of the model, in place of a common file.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        *,
        keep: int = 1,
        directories: Sequence[str] = (ONE, TWO),
        sharded: bool = False,
    ) -> None:
        self.sharded = sharded
        self.layouts: Sequence[Layout] = LAYOUTS
        if sharded:
            self.layouts = [
                replace(layout, shard=ModelShard(owner, tuple(parameter_boxes(layout))))
                for owner, layout in enumerate(LAYOUTS)
            ]
        self.backends = backends
        self.directories = directories
        first, second = backends
        seen = {1: self._look(second, directories[1])}
        self.store = Store(
            first,
            directories[0],
            keep=LastK(keep),
            train_state_bytes=8192,
            allow_volatile=True,
            shared=SharedStore({1: directories[1]}, seen),
        )
        try:
            self.owner = OwnerStore(
                second, directories[1], 1, store_id=self.store.store_id, allow_volatile=True
            )
        except BaseException:
            self.store.close()
            raise
        self.source: OwnerSlot | None = None
        """Part of the newest checkpoint, as the steps of rank 1 would read it."""

    @staticmethod
    def _look(backend: Backend, directory: str) -> dict[str, str]:
        """Return what rank 1 says that it sees, before anything is locked."""
        every = usable_parts(backend, directory).values()  # of one store, or of none
        return next(iter(every), {}).get(1, {})

    @property
    def newest(self) -> int:
        """Step of the newest checkpoint; 0 if there is none."""
        return 0 if self.store.newest is None else self.store.newest.manifest.step

    def wrong(self) -> list[str]:
        """Return everything of the newest checkpoint that is not as it was sealed."""
        newest = self.store.newest
        if newest is None:
            return []
        step, manifest = newest.manifest.step, newest.manifest
        slot = self.store.slot_of(newest)
        wrong = wrong_chunks(slot, 0, step)
        (reference,) = manifest.owners
        part = self.owner.open(reference, manifest)
        wrong += wrong_chunks(part, 1, step)
        if self.sharded:
            wrong += [*wrong_boxes(slot, 0, step), *wrong_boxes(part, 1, step)]
        else:
            data = model_bytes(step)
            if slot.model.read_bytes(slot.layout.model_header.data_start, len(data)) != data:
                wrong.append(slot.model.path)
        self.owner.release(part)
        return wrong

    def grant(self) -> tuple[Slot, OwnerSlot]:
        """Return what the next steps write: rank 0's slot, and the part that rank 1 made ready."""
        slot = self.store.acquire(self.layouts[0], 1)
        written = parameter_boxes(self.layouts[1]) if self.sharded else ()
        part = self.owner.ready(
            self.layouts[1], slot.context.generation, self.store.named_parts(), written=written
        )
        return slot, part

    def write(self, slots: tuple[Slot, OwnerSlot], step: int) -> None:
        """Write the state of a step, both ranks at once."""
        for owner, slot in enumerate(slots):
            write_state(slot, owner, step)

    def prepare(self, slots: tuple[Slot, OwnerSlot], step: int) -> InFlight:
        """Seal up to the decision: everything is durable, and nothing is a checkpoint yet."""
        slot, part = slots
        composition = self.compose(slot, step)
        self.store.sealing.begin(composition.manifest)
        boxes, others = self.write_models(slots, step)
        reference = self.owner.prepare(part, SCALARS[1], others)
        prepared = self.store.sealing.prepare(
            slot, composition, (), owners=[reference], model_boxes=boxes
        )
        return InFlight(step, slots, prepared)

    def write_models(
        self, slots: tuple[Slot, OwnerSlot], step: int
    ) -> tuple[list[ModelBox], list[ModelBox]]:
        """Write the model of a step; return what each owner has written of it."""
        if not self.sharded:
            return write_model(slots[0], step), []
        return write_shard(slots[0], 0, step), write_shard(slots[1], 1, step)

    def compose(self, slot: Slot, step: int) -> Composition:
        """Describe the checkpoint of a step."""
        return compose(
            slot,
            encode({"step": step}),
            step=step,
            torch_version="2.13.0",
            optimizer="torch.optim.adamw.AdamW",
            groups=[{"lr": 0.1}],
            scalars=SCALARS[0],
            order=None,
            owners={1: self.directories[1]},
            model_boxes=parameter_boxes(self.layouts[0]) if self.sharded else WHOLE,
        )

    def publish(self, seal: InFlight) -> StoredCheckpoint:
        """Rename, and tell rank 1 so."""
        checkpoint = self.store.sealing.publish(seal.prepared)
        self.store.sealing.end()
        self.owner.published(seal.slots[1])
        if self.source is not None:
            self.owner.release(self.source)
        self.source = seal.slots[1]
        return checkpoint

    def abort(self, seal: InFlight) -> None:
        """Decide before the rename that there is no checkpoint, and tell rank 1 so."""
        seal.prepared.close()
        self.store.sealing.end()
        self.owner.aborted(seal.slots[1])

    def seal(self, step: int) -> StoredCheckpoint:
        """Take a step and seal it."""
        slots = self.grant()
        self.write(slots, step)
        return self.publish(self.prepare(slots, step))

    def close(self) -> None:
        """End both ranks."""
        self.owner.close()
        self.store.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def part_paths(backend: Backend, directory: str = TWO) -> Iterator[str]:
    """Yield the paths of the parts of owner 1."""
    for name in sorted(backend.list_dir(f"{directory}/owner-1")):
        if name.startswith("part-"):
            yield f"{directory}/owner-1/{name}"


def made(one: Path, two: Path, *, sharded: bool = False, last: int = 2) -> Path:
    """Seal steps 1 to `last`; return the store's first directory."""
    directories = (str(one), str(two))
    with (
        PosixBackend() as backend,
        Job([backend] * 2, keep=2, directories=directories, sharded=sharded) as job,
    ):
        for step in range(1, last + 1):
            job.seal(step)
    return one
