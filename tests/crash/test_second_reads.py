"""One read that returns something else than what is stored condemns nothing.

The bit flips on the way, in memory or on a cable; the drive has what was written. Whatever is read
wrong once is read again, by another way and into other memory, before anybody calls it damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from gds import Backend, MemoryBackend
from offload import (
    CheckpointReader,
    list_checkpoints,
    load_parameters,
    open_checkpoint,
    read_state,
)
from offload.errors import DamagedError, UnreliableReadError
from tests.crash.damaging import BOTH, NEWEST, STATE, STORE, store_with
from tests.crash.fault_backend import FaultBackend
from tests.crash.flipping import FlippingBackend, Way
from tests.stores.small import make_optimizer
from tests.stores.small import train as train_small
from tests.stores.training import (
    Model,
    Reference,
    differences,
    optimizer_for,
    options,
    same_bits,
    take_step,
    train,
)

FILES = (
    "manifest.json",
    "part.json",
    *(f"{name}.safetensors" for name in ("model", "train_state", *STATE)),
)
"""Of a checkpoint on two drives."""

LOOKED_AT_FIRST = ("manifest.json", "train_state.safetensors")
"""Their first bytes are read apart, and hold nothing but the beginning of the text."""


@pytest.fixture
def backend() -> FlippingBackend:
    """Hold checkpoints of steps 1 and 2, on two drives."""
    inner = MemoryBackend()
    store_with(inner, BOTH)
    return FlippingBackend(inner)


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "offload"):
        yield lambda: [r.getMessage() for r in caplog.records if "one read" in r.getMessage()]


def is_marked(backend: Backend) -> bool:
    return any(
        "damaged.txt" in backend.list_dir(f"{STORE}/{name}")
        for name in backend.list_dir(STORE)
        if name.startswith("step-")
    )


def goes_on(backend: Backend | None, directories: list[str], **changes: object) -> None:
    """Restore step 2, and take one more, to the bit."""
    model = Model()
    with optimizer_for(model, directories, options(backend, **changes)) as optimizer:
        checkpoint = optimizer.restore()
        assert checkpoint is not None
        assert checkpoint.step == 2
        assert checkpoint.train_state == {"step": 2}
        train(model, optimizer, 3)
    assert same_bits(dict(model.state_dict()), Reference().after(3).model)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "read_bytes") for name in FILES),
        *((f"{name}.safetensors", "read") for name in ("model", *STATE)),
    ],
)
def test_training_goes_on_from_what_was_read_right_the_second_time(
    name: str, way: Way, backend: FlippingBackend, warnings_logged: Callable[[], list[str]]
) -> None:
    """Text and headers are read one way, and content another."""
    backend.flips, backend.left, backend.ways = f"step-00000002/{name}", 1, (way,)
    if name == "part.json" or name.startswith(tuple(STATE)):
        backend.flips = f"/{name}"  # some chunks are on the other drive
    if name in LOOKED_AT_FIRST:
        backend.left = 2
    num_wrong = backend.left
    goes_on(backend, BOTH)
    assert backend.num_flipped.total() == num_wrong
    assert backend.ways_again == {"other"}
    assert not is_marked(backend)
    (message,) = warnings_logged()
    assert name in message
    assert "one read returned other data" in message
    assert "memory" in message


@pytest.mark.parametrize("name", FILES)
def test_readers_are_not_misled(
    name: str, backend: FlippingBackend, warnings_logged: Callable[[], list[str]]
) -> None:
    def flip_one() -> None:
        backend.flips, backend.left = f"/{name}", 1 + (name in LOOKED_AT_FIRST)

    flip_one()
    assert all(info.valid for info in list_checkpoints(STORE, backend=backend))
    flip_one()
    with open_checkpoint(NEWEST, backend=backend) as opened:
        flip_one()
        assert opened.verify().problems == ()
        assert opened.train_state == {"step": 2}
        flip_one()
        assert read_state(opened, "first.weight").keys() == {*STATE}
    flip_one()
    model = Model(history=3)
    assert load_parameters(model, STORE, backend=backend) == 2
    assert same_bits(dict(model.state_dict()), Reference().after(2).model)
    assert backend.num_flipped.total()
    assert warnings_logged()


@pytest.mark.parametrize("name", ["model", "train_state", *STATE])
def test_what_is_wrong_twice_is_damaged(name: str, backend: FlippingBackend) -> None:
    with open_checkpoint(NEWEST, backend=backend) as opened:
        backend.flips, backend.ways = f"/{name}.safetensors", ("read", "read_again", "read_bytes")
        problems = opened.verify().problems
    assert problems
    assert all(f"{name}.safetensors" in problem for problem in problems)
    assert backend.num_flipped["read_again"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("is_damaged", [False, True], ids=["once", "twice"])
def test_what_was_right_and_is_read_wrong_later_is_not_taken(
    is_damaged: bool, warnings_logged: Callable[[], list[str]]
) -> None:
    """A tied tensor is loaded under both of its names, and is too large to stay in memory."""
    model, big = torch.nn.Linear(2, 2), torch.nn.Embedding(18 << 10, 1 << 10).bfloat16()
    model.embedding = model.head = big.requires_grad_(False)
    backend = FlippingBackend(MemoryBackend())
    with make_optimizer(model, backend, params=[model.weight, model.bias]) as optimizer:
        train_small(optimizer, 1)
    backend.flips, backend.right_first, backend.left = "/model.safetensors", 40, 1 + is_damaged
    backend.ways = ("read", "read_again")[: backend.left]
    names = ("embedding.weight", "head.weight")
    loaded = {name: torch.zeros_like(big.weight) for name in names}
    reader = CheckpointReader("/run", backend=backend)
    if is_damaged:
        with pytest.raises(CheckpointException, match=r"model\.safetensors: bytes .* are damaged"):
            dcp.load({"model": loaded}, storage_reader=reader, no_dist=True)
    else:
        dcp.load({"model": loaded}, storage_reader=reader, no_dist=True)
        assert all(torch.equal(tensor, big.weight) for tensor in loaded.values())
        assert len(warnings_logged()) == 1
    assert backend.num_flipped["read"] == 1
    reader.close()


def test_what_cannot_be_read_again_is_no_verdict() -> None:
    """The error of the second read is raised, and nothing is marked."""
    inner = MemoryBackend()
    store_with(inner)
    faulty = FaultBackend(inner)
    backend = FlippingBackend(faulty)
    optimizer = optimizer_for(Model(), STORE, options(backend))
    backend.flips, backend.left = f"{NEWEST}/model.safetensors", 1
    faulty.fail("read", 2, forever=False)
    with pytest.raises(OSError, match="injected failure of read") as error:
        optimizer.restore()
    assert not isinstance(error.value, DamagedError)
    assert not is_marked(backend)
    assert optimizer.restore().step == 2
    optimizer.close()
    faulty.close()


@pytest.mark.parametrize("overlap", [None, "forward"])
def test_memory_that_does_not_hold_what_was_read_is_no_damage(
    overlap: str | None, backend: FlippingBackend
) -> None:
    """The second read is right, into other memory; into the ring it is wrong every time."""
    model = Model()
    optimizer = optimizer_for(model, BOTH, options(backend, overlap=overlap))
    optimizer.restore()
    backend.flips = f"{NEWEST}/exp_avg.safetensors"
    backend.ways, backend.spared = ("read", "read_again"), 2
    with pytest.raises(UnreliableReadError, match="only one read was right"):  # noqa: PT012
        take_step(model, optimizer, 3)
        optimizer.synchronize()  # a step beside the model may fail only here
    assert backend.num_flipped["read_again"] == 1
    assert not is_marked(backend)
    backend.flips = ""
    assert optimizer.restore().step == 2
    train(model, optimizer, 3)
    assert same_bits(dict(model.state_dict()), Reference().after(3).model)
    optimizer.close()


def test_state_in_training_that_is_read_wrong_once_goes_on(
    warnings_logged: Callable[[], list[str]],
) -> None:
    backend = FlippingBackend(MemoryBackend())
    model = Model()
    with optimizer_for(model, STORE, options(backend, verify="always")) as optimizer:
        for step in (1, 2, 3, 4):
            take_step(model, optimizer, step)
            if step == 2:
                backend.flips, backend.left = "/master.safetensors", 2
        sealed = optimizer.checkpoint({"step": 4}).result()
        assert differences(sealed, backend, Reference().after(4)) == []
    assert backend.num_flipped.total() == 2
    assert len(warnings_logged()) == 2
