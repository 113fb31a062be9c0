"""Stores of very many owners with a row each, made without ranks, and used by one process."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch

from gds import Backend, File, MemoryBackend, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload import AdamW, DriveTuning, Options, open_checkpoint, read_state
from offload.format import Layout, ModelTensor, ParameterSpec
from offload.format.boxes import Box, Cut
from offload.format.shares.owners import MAX_OWNERS, ModelBox
from offload.format.train_state import encode
from offload.retention import LastK
from offload.store import Slot, Store
from offload.store.owner_store import OwnerStore
from offload.store.sealing import compose
from offload.store.shared import SharedStore
from offload.store.slots.slot import OwnerSlot

RUN = "/run"
NAME, WIDTH = "weight", 3
ARRAYS = ("master", "exp_avg", "exp_avg_sq")
SCALARS = ((("step", "f32", 1.0),),)
HYPER: dict[str, Any] = {"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def value_of(array: str, owner: int) -> torch.Tensor:
    """Return the row of an owner in an array: small whole numbers, which bf16 has exactly."""
    return torch.full((WIDTH,), float(owner % 251 + ARRAYS.index(array)))


def seal_with(backend: Backend, directory: str, num: int) -> None:
    """Seal step 1 of a store with so many owners."""
    model = (ModelTensor(NAME, "BF16", (num, WIDTH)),)
    layouts = [
        Layout(
            (ParameterSpec(NAME, "BF16", box.sizes, 0, ARRAYS, Cut((num, WIDTH), box)),),
            model,
            1024,
        )
        for box in (Box((row, 0), (1, WIDTH)) for row in range(num))
    ]
    store = Store(
        backend,
        directory,
        keep=LastK(1),
        train_state_bytes=8192,
        allow_volatile=True,
        shared=SharedStore(dict.fromkeys(range(1, num), directory), {}),
    )
    with closing(store):
        slot = store.acquire(layouts[0], 1)
        references = []
        for owner in range(1, num):
            part = OwnerStore(
                backend, directory, owner, store_id=store.store_id, allow_volatile=True
            )
            with closing(part):
                made = part.ready(layouts[owner], slot.context.generation, store.named_parts())
                write(made, owner)
                references.append(part.prepare(made, SCALARS, ()))
                part.published(made)
        write(slot, 0)
        whole = torch.stack([value_of("master", owner) for owner in range(num)]).bfloat16()
        data = whole.view(torch.uint8).numpy().tobytes()
        slot.model.write_bytes(data, slot.layout.model_header.data_start)
        box = ModelBox(NAME, Box.whole((num, WIDTH)), ())
        digest = slot.context.digest(box.digest_array, 0, memoryview(data))
        composition = compose(
            slot,
            encode(None),
            step=1,
            torch_version=torch.__version__,
            optimizer="torch.optim.adamw.AdamW",
            groups=[torch.optim.AdamW([torch.zeros(1)], **HYPER).defaults],
            scalars=SCALARS,
            order=None,
            owners=dict.fromkeys(range(1, num), directory),
            model_boxes=[(NAME, box.box)],
        )
        store.sealing.begin(composition.manifest)
        prepared = store.sealing.prepare(
            slot,
            composition,
            (),
            owners=references,
            model_boxes=[ModelBox(NAME, box.box, (digest,))],
        )
        store.sealing.publish(prepared)
        store.sealing.end()


def write(slot: Slot | OwnerSlot, owner: int) -> None:
    """Write the row of an owner."""
    for name in ARRAYS:
        offset, nbytes = slot.layout.byte_range(name, 0)
        data = value_of(name, owner).view(torch.uint8).numpy().tobytes()
        assert len(data) == nbytes
        slot.array(name, 0).write_bytes(data, offset)
        slot.digests[name][0] = slot.context.digest(name, 0, memoryview(data))


class Counting(WrapperBackend):
    """Counts the files that are open, which each process may have a limited number of."""

    num_open = most_open = 0

    def wrap_file(self, file: File) -> File:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        return _Counted(file, self)


class _Counted(WrapperFile):
    def __init__(self, inner: File, backend: Counting) -> None:
        super().__init__(inner)
        self._backend: Counting | None = backend

    def close(self) -> None:
        if self._backend is not None:
            self._backend.num_open -= 1
            self._backend = None
        super().close()


def use_by_one_process(num: int) -> None:
    """Verify, read, restore and train on the state of so many owners, and compare its bits."""
    backend = MemoryBackend()
    seal_with(backend, RUN, num)
    expected = {name: torch.stack([value_of(name, row) for row in range(num)]) for name in ARRAYS}
    counting = Counting(backend)
    with open_checkpoint(RUN, backend=counting) as opened:
        assert len(opened.owners) == num - 1
        report = opened.verify()
        assert 0 < counting.most_open < 20
        assert report.ok
        assert report.bytes_checked == num * WIDTH * (2 + 4 * len(ARRAYS))
        found = read_state(opened, NAME)
        for name, values in expected.items():
            assert found[name].equal(values), name
    assert counting.num_open == 0
    model = torch.nn.Linear(WIDTH, num, bias=False).bfloat16()
    masters = torch.nn.Parameter(expected["master"].clone())
    plain = torch.optim.AdamW([masters], **HYPER)
    moments = {name: expected[name].clone() for name in ARRAYS[1:]}
    plain.state[masters] = {"step": torch.tensor(1.0), **moments}
    options = Options(
        backend=backend, allow_volatile=True, drives=DriveTuning(calibrate=False), chunk_bytes=4096
    )
    with AdamW(
        model.parameters(), model=model, directory=RUN, keep=1, options=options, **HYPER
    ) as optimizer:
        optimizer.restore()
        assert model.weight.equal(expected["master"].bfloat16())
        gradient = torch.linspace(-1, 1, num * WIDTH).reshape(num, WIDTH).bfloat16()
        model.weight.grad, masters.grad = gradient, gradient.float()
        optimizer.step()
        plain.step()
        assert optimizer.checkpoint().result().verify().ok
        assert model.weight.equal(masters.bfloat16())
    with open_checkpoint(RUN, backend=backend) as opened:
        assert not opened.owners
        found = read_state(opened, NAME)
        assert found["master"].equal(masters)
        for name in moments:
            assert found[name].equal(plain.state[masters][name]), name


def test_one_process_uses_the_state_of_many_owners() -> None:
    use_by_one_process(64)


def test_one_process_uses_the_state_of_as_many_owners_as_are_allowed() -> None:
    use_by_one_process(MAX_OWNERS)
