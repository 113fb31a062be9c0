"""Models of which little is trained: what of ``model.safetensors`` is written, read and cloned."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gds import MemoryBackend
from offload import AdamW
from offload.errors import SealError
from offload.format.names import QUARANTINE_NAME
from offload.store import state_store
from tests.stores import frozen_model
from tests.stores.frozen_model import (
    BLOCK,
    LEAF,
    STORE,
    Process,
    Recorded,
    Reference,
    leaves,
    make_units_small,
    options,
)

NUM_LEAVES = 2 + 2 * 12 + 4
"""Trained vector and statistics share two, two frozen parameters have 12 each, the table 4."""

ALL = list(range(NUM_LEAVES))
CHANGING = [0, 1]
UNCHANGED = ALL[2:]
CLONED = list(range(2 * BLOCK // LEAF, NUM_LEAVES - 1))
"""Not the block that is trained, nor the one behind it; nor the last leaf, which is cut short."""

NOT_CLONED = [n for n in ALL if n not in CLONED]
BESIDE = [n for n in UNCHANGED if n not in CLONED]
NUM_SLOTS = 3


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    make_units_small(monkeypatch)


@pytest.fixture(params=[False, True], ids=["", "clones"])
def clones(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def backend(clones: bool) -> Recorded:
    return Recorded(MemoryBackend(clones=clones))


@pytest.fixture
def plain() -> Recorded:
    return Recorded(MemoryBackend())


def sealed(run: Process, num: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Step and seal; returns which leaves were written, read back and cloned each time."""
    found = [run.step_and_seal() for _ in range(num)]
    return [(leaves(m, "write"), leaves(m, "again"), leaves(m, "clone")) for m in found]


FIRST = (ALL, [], [])
LATER = (CHANGING, [], [])
READ_BACK = (CHANGING, UNCHANGED, [])


@pytest.mark.parametrize("keep", [1, 2, 6])
def test_each_slot_is_written_once_and_then_only_what_changes(backend, clones, keep):
    """If files share space, a new slot takes over what is frozen. What is known of a slot outlives
    its open files."""
    run = Process(backend, keep=keep)
    next_slots = (NOT_CLONED, [], CLONED) if clones else FIRST
    assert sealed(run, 1) == [FIRST]
    assert sealed(run, keep) == [next_slots] * keep
    for _ in range(keep + 2):
        moves = run.step_and_seal()
        assert leaves(moves, "write") == CHANGING
        assert len(moves) == 1, "neighbours are one request, and nothing is read"
    run.close()


def test_a_frozen_tensor_that_is_edited_is_found_by_its_digest(backend, clones):
    run = Process(backend)
    sealed(run, NUM_SLOTS)
    run.edit("more", 10_000, 7.0)  # through no gradient, and under no_grad
    edited = (run.model.trained.nbytes + 12 + run.model.base.nbytes + 2 * 10_000) // LEAF
    assert sealed(run, 1) == [([*CHANGING, edited], [], [])]
    others = (CHANGING, [], [edited]) if clones else ([*CHANGING, edited], [], [])
    assert sealed(run, NUM_SLOTS) == [others] * (NUM_SLOTS - 1) + [LATER]
    run.close()


def test_a_model_file_that_somebody_has_put_there_is_not_taken_for_the_one_that_was(plain):
    run = Process(plain, keep=6)
    sealed(run, 7)
    path = f"{STORE}/step-00000002/model.safetensors"
    file = plain.inner.open(path)
    data = bytearray(file.read_bytes(0, file.size_bytes))
    file.close()
    data[-1] ^= 1
    plain.inner.remove(path)
    file = plain.inner.create(path, len(data))
    file.write_bytes(bytes(data), 0)
    file.close()
    moves = run.step_and_seal() + run.step_and_seal()
    assert leaves(moves, "again") == UNCHANGED
    assert leaves(moves, "write").count(NUM_LEAVES - 1) == 1
    run.close()


def test_after_a_seal_whose_write_has_failed_everything_is_written_and_nothing_is_asked(plain):
    run = Process(plain)
    sealed(run, NUM_SLOTS + 1)
    run.step()
    plain.fail_writes = True
    with pytest.raises(SealError, match="injected failure of write"):
        run.optimizer.checkpoint().result()
    plain.fail_writes = False
    with pytest.raises(SealError):
        run.optimizer.checkpoint()
    plain.taken()
    checkpoint = run.seal()
    moves = plain.taken()
    assert (leaves(moves, "write"), leaves(moves, "again")) == (ALL, [])
    run.check(checkpoint)
    run.close()


def test_a_longer_header_moves_what_is_frozen_and_it_is_not_cloned_from_where_it_was():
    """The bytes of the data are the same at the same places, and those of the file are not."""
    frozen = torch.nn.Parameter(torch.randn(6 * BLOCK // 4), requires_grad=False)
    added = [torch.nn.Parameter(torch.zeros(1).bfloat16()) for _ in range(60)]
    trained = torch.nn.Parameter(torch.ones(8).bfloat16())
    backend = Recorded(MemoryBackend(clones=True))
    optimizer = AdamW([frozen, trained], directory=STORE, options=options(backend))
    starts = set()
    for number in range(4):
        if number == 2:
            optimizer.add_param_group({"params": added})
        trained.grad = torch.ones_like(trained)
        optimizer.step()
        checkpoint = optimizer.checkpoint().result()
        assert checkpoint.verify().problems == ()
        starts.add(checkpoint.manifest.layout.model_header.data_start)
    assert len(starts) == 2
    optimizer.close()


def next_process(backend: Recorded, reference: Reference | None = None, **changes: Any) -> Process:
    """Let an earlier process seal and end in the middle; returns the one that comes after it."""
    places = {key: value for key, value in changes.items() if key == "directory"}
    run = Process(backend, **places)
    sealed(run, NUM_SLOTS + 1)
    run.step()
    run.close()
    if reference is None:
        reference = Reference()
        for step in range(1, NUM_SLOTS + 2):
            reference.step(step)
    assert isinstance(backend.inner, MemoryBackend)
    return Process(Recorded(backend.inner.reopened()), reference, **changes)


def flip(backend: Recorded, path: str, leaf: int) -> None:
    """Flip a bit in a leaf of a model file."""
    file = backend.inner.open(f"{path}/model.safetensors", writable=True)
    offset = 8 + int.from_bytes(file.read_bytes(0, 8), "little") + leaf * LEAF + 100
    file.write_bytes(bytes([file.read_bytes(offset, 1)[0] ^ 4]), offset)
    file.close()


@pytest.mark.parametrize("directory", [STORE, [STORE, "/other/run"]], ids=["", "drives"])
def test_after_a_resume_what_is_frozen_is_read_once_for_each_slot_and_not_written(plain, directory):
    """The drive is asked, and not the page cache, which may hold what the drive has not taken."""
    run = next_process(plain, directory=directory)
    moves = run.step_and_seal()
    assert (leaves(moves, "write"), leaves(moves, "again")) == (CHANGING, UNCHANGED)
    assert not leaves(moves, "read")
    # The third slot is the one that was restored, and is known since then.
    assert sealed(run, NUM_SLOTS + 2) == [READ_BACK] + [LATER] * (NUM_SLOTS + 1)
    run.close()


def test_after_a_resume_where_files_share_space_it_is_taken_from_what_was_restored():
    run = next_process(Recorded(MemoryBackend(clones=True)))
    expected = [(CHANGING, BESIDE, CLONED)] * 2 + [LATER] * (NUM_SLOTS + 1)
    assert sealed(run, NUM_SLOTS + 3) == expected
    run.close()


def test_a_restore_that_loads_the_state_only_makes_nothing_known(plain):
    """Then what the live model holds is compared with what is on the drive."""
    run = Process(plain)
    sealed(run, NUM_SLOTS)
    reference_to = run.optimizer.state_dict()
    values = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.close()
    again = Process(Recorded(plain.inner.reopened()), run.reference, restore=False)
    again.model.load_state_dict(values)
    again.optimizer.load_state_dict(reference_to)
    again.step_number = NUM_SLOTS
    assert sealed(again, NUM_SLOTS + 1) == [READ_BACK] * NUM_SLOTS + [LATER]
    again.close()


def test_a_frozen_tensor_that_was_edited_before_the_first_seal_is_written(backend):
    run = next_process(backend)
    run.edit("base", 20_000, 7.0)
    edited = (run.model.trained.nbytes + 12 + 2 * 20_000) // LEAF
    for written, _, cloned in sealed(run, NUM_SLOTS):
        assert edited in written + cloned
        assert set(written) <= {*CHANGING, edited}
    assert sealed(run, 1) == [LATER]
    run.close()


@pytest.mark.parametrize("leaf", [2, NUM_LEAVES - 1])
def test_a_bit_that_has_flipped_in_a_slot_is_mended(plain, leaf):
    run = next_process(plain)
    (free,) = [name for name in run.backend.inner.list_dir(STORE) if "slot" in name]
    flip(run.backend, f"{STORE}/{free}", leaf)
    assert sealed(run, 2) == [([*CHANGING, leaf], UNCHANGED, []), READ_BACK]
    run.close()


def test_what_cannot_be_read_back_is_written(plain):
    run = next_process(plain)
    run.step()
    run.backend.fail_reads = True
    run.backend.taken()
    checkpoint = run.seal()
    moves = run.backend.taken()
    run.backend.fail_reads = False
    assert leaves(moves, "write") == ALL
    run.check(checkpoint)
    assert sealed(run, 1) == [READ_BACK], "another slot is asked again"
    run.close()


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("refused", READ_BACK),
        # as after any write that has failed, nothing is asked
        ("fail", ([*CHANGING, *CLONED, NUM_LEAVES - 1], None, [])),
    ],
)
def test_what_cannot_be_cloned_is_read_back_or_written(how, found):
    run = next_process(Recorded(MemoryBackend(clones=True)))
    run.backend.clones = how
    ((written, again, cloned),) = sealed(run, 1)
    assert (written, again if found[1] else None, cloned) == found
    run.close()


def test_nothing_is_cloned_from_a_checkpoint_that_a_reader_has_found_damaged():
    run = next_process(Recorded(MemoryBackend(clones=True)))
    newest = f"{STORE}/step-{run.step_number:08d}"
    flip(run.backend, newest, 12)
    run.backend.inner.create(f"{newest}/{QUARANTINE_NAME}", 10).close()
    ((_, again, cloned),) = sealed(run, 1)
    assert (again, cloned) == (UNCHANGED, [])
    run.close()


def test_starting_over_reads_the_slots_of_the_old_history(plain):
    run = next_process(plain, Reference(), fresh=True)
    found = sealed(run, NUM_SLOTS + 3)
    assert found.count(READ_BACK) == NUM_SLOTS
    assert found.count(LATER) == 3
    run.close()


def warned(make: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    files = {w.filename for w in caught}
    assert files <= {frozen_model.__file__, __file__}, "where the call is"
    return [str(w.message) for w in caught]


def test_a_warning_names_the_space_of_what_is_frozen_once_and_its_advice_helps(monkeypatch):
    """And where checkpoints share it. Small models are not worth a word."""

    def train(backend: Recorded, **changes: Any) -> None:
        run = Process(backend, **changes)
        for _ in range(2):
            run.step()
            run.seal()
        run.close()

    assert warned(lambda: train(Recorded(MemoryBackend()))) == []
    monkeypatch.setattr(state_store, "_LEAST_BYTES", 100_000)
    backend = Recorded(MemoryBackend())
    frozen = (2 * 12 * LEAF + 4 * LEAF + 12) / 1024
    (message,) = warned(lambda: train(backend, keep=4))
    assert f"holds {frozen:.1f} KiB of frozen parameters and buffers" in message
    assert f"beside {1500 * 4 / 1024:.1f} KiB that are trained" in message
    assert f"keeps 5 slots: {5 * frozen:.1f} KiB" in message
    assert "construct without model=" in message
    again = Recorded(backend.inner.reopened())
    assert warned(lambda: train(again)) == [], "the space is taken by then"
    assert warned(lambda: train(Recorded(MemoryBackend()), model=None)) == [], "as it advises"
    (message,) = warned(lambda: train(Recorded(MemoryBackend(clones=True))))
    assert f"{frozen:.1f} KiB in all, and not {3 * frozen:.1f} KiB" in message
    monkeypatch.setattr(state_store, "_RATIO", 100)
    assert warned(lambda: train(Recorded(MemoryBackend()))) == [], "much is trained"
