"""Models of which little is trained: what of ``model.safetensors`` is written, read and cloned."""

from __future__ import annotations

import warnings

import pytest
import torch

from gds import MemoryBackend
from offload import AdamW
from offload.errors import SealError
from offload.format.names import QUARANTINE_NAME
from offload.model.model_file import ModelImage
from offload.store import frozen_space
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

CHANGING = [0, 1]
UNCHANGED = list(range(2, NUM_LEAVES))
CLONED = list(range(2 * BLOCK // LEAF, NUM_LEAVES - 1))
"""Not the block that is trained, nor the one behind it; nor the last leaf, which is cut short."""

NOT_CLONED = [n for n in range(NUM_LEAVES) if n not in CLONED]
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


@pytest.fixture
def cloning() -> Recorded:
    return Recorded(MemoryBackend(clones=True))


def trained_before(backend: Recorded, *, num_seals: int = NUM_SLOTS + 1, **changes) -> Reference:
    """Let an earlier process seal, and end in the middle; returns plain torch at its last seal."""
    run = Process(backend, **changes)
    for _ in range(num_seals):
        run.step_and_seal()
    run.step()
    run.close()
    reference = Reference()
    for step in range(1, num_seals + 1):
        reference.step(step)
    return reference


def everything_is_written_anew(run: Process) -> None:
    """Seal a step again, after a seal that has failed: nothing of the slot is believed."""
    with pytest.raises(SealError):
        run.optimizer.checkpoint()
    run.backend.taken()
    checkpoint = run.seal()
    moves = run.backend.taken()
    assert leaves(moves, "write") == list(range(NUM_LEAVES))
    assert not leaves(moves, "again")
    run.check(checkpoint)
    run.close()


class TestInOneProcess:
    def test_each_slot_is_written_once_and_then_only_the_leaves_that_change(self, plain):
        run = Process(plain)
        for _ in range(NUM_SLOTS):
            moves = run.step_and_seal()
            assert leaves(moves, "write") == list(range(NUM_LEAVES))
            assert not leaves(moves, "again")
        for _ in range(5):
            moves = run.step_and_seal()
            assert leaves(moves, "write") == CHANGING
            assert len(moves) == 1, "neighbours are one request, and nothing is read"
        run.close()

    def test_where_files_share_space_a_new_slot_takes_over_what_is_frozen(self, cloning):
        run = Process(cloning)
        assert leaves(run.step_and_seal(), "write") == list(range(NUM_LEAVES))
        for _ in range(NUM_SLOTS - 1):
            moves = run.step_and_seal()
            assert leaves(moves, "clone") == CLONED
            assert leaves(moves, "write") == NOT_CLONED
            assert not leaves(moves, "again")
        for _ in range(5):
            moves = run.step_and_seal()
            assert leaves(moves, "write") == CHANGING
            assert len(moves) == 1
        run.close()

    def test_a_frozen_tensor_that_is_edited_is_found_by_its_digest(self, backend, clones):
        run = Process(backend)
        for _ in range(NUM_SLOTS):
            run.step_and_seal()
        run.edit("more", 10_000, 7.0)  # through no gradient, and under no_grad
        offset = run.model.trained.nbytes + 12 + run.model.base.nbytes + 2 * 10_000
        edited = offset // LEAF
        moves = run.step_and_seal()
        assert leaves(moves, "write") == [*CHANGING, edited]
        for _ in range(NUM_SLOTS - 1):
            moves = run.step_and_seal()
            assert leaves(moves, "clone") == [edited] * clones
            assert leaves(moves, "write") == [*CHANGING, *[edited] * (not clones)]
        assert leaves(run.step_and_seal(), "write") == CHANGING
        run.close()

    @pytest.mark.parametrize("keep", [1, 6])
    def test_what_is_known_of_a_slot_outlives_its_open_files(self, backend, keep):
        run = Process(backend, keep=keep)
        for _ in range(keep + 1):
            run.step_and_seal()
        for _ in range(keep + 2):
            moves = run.step_and_seal()
            assert leaves(moves, "write") == CHANGING
            assert not leaves(moves, "again")
        run.close()

    @pytest.mark.parametrize("when", ["before", "while it is withdrawn"])
    def test_a_model_file_that_somebody_has_put_there_is_not_taken_for_the_one_that_was(
        self, plain, monkeypatch, when
    ):
        run = Process(plain, keep=6)
        for _ in range(7):
            run.step_and_seal()
        checkpoint, lock = f"{STORE}/step-00000002", plain.lock

        def put_there():
            path = f"{checkpoint}/model.safetensors"
            file = plain.inner.open(path)
            data = bytearray(file.read_bytes(0, file.size_bytes))
            file.close()
            data[-1] ^= 1
            plain.inner.remove(path)
            file = plain.inner.create(path, len(data))
            file.write_bytes(bytes(data), 0)
            file.close()

        def put_there_and_locked(path, **kwargs):
            if path == checkpoint:
                monkeypatch.setattr(plain, "lock", lock)
                put_there()
            return lock(path, **kwargs)

        if when == "before":
            put_there()
        else:
            monkeypatch.setattr(plain, "lock", put_there_and_locked)
        moves = run.step_and_seal() + run.step_and_seal()
        assert leaves(moves, "again") == UNCHANGED
        assert leaves(moves, "write").count(NUM_LEAVES - 1) == 1
        run.close()

    def test_after_a_write_that_failed_everything_is_written_and_nothing_is_asked(self, plain):
        run = Process(plain)
        for _ in range(NUM_SLOTS + 1):
            run.step_and_seal()
        run.step()
        plain.fail_writes = True
        with pytest.raises(SealError, match="injected failure of write"):
            run.optimizer.checkpoint().result()
        plain.fail_writes = False
        everything_is_written_anew(run)

    def test_after_a_seal_that_an_edit_has_stopped_everything_is_written(self, plain, monkeypatch):
        run = Process(plain)
        for _ in range(NUM_SLOTS + 1):
            run.step_and_seal()
        run.step()
        gather = ModelImage.gather

        def edited_meanwhile(image, start, stop, out, **settings):
            gather(image, start, stop, out, **settings)
            with torch.no_grad():
                run.model.base.add_(0)  # counts as a change, and is none

        monkeypatch.setattr(ModelImage, "gather", edited_meanwhile)
        with pytest.raises(SealError, match="'base' was changed in place"):
            run.optimizer.checkpoint().result()
        monkeypatch.undo()
        make_units_small(monkeypatch)
        everything_is_written_anew(run)

    def test_added_parameters_are_a_new_layout_whose_slots_are_new(self, backend):
        run = Process(backend)
        for _ in range(NUM_SLOTS):
            run.step_and_seal()
        run.model.base.requires_grad_(True)
        run.optimizer.add_param_group({"params": [run.model.base], "lr": 0.0, "weight_decay": 0.0})
        run.model.base.grad = torch.zeros_like(run.model.base)
        for _ in range(NUM_SLOTS):
            moves = run.step_and_seal()
            assert not leaves(moves, "again")
        assert len(leaves(moves, "write")) + len(leaves(moves, "clone")) == NUM_LEAVES
        run.close()

    def test_a_longer_header_moves_what_is_frozen_and_it_is_not_cloned_from_where_it_was(
        self, cloning
    ):
        """The bytes of the data are the same at the same places, and those of the file are not."""
        frozen = torch.nn.Parameter(torch.randn(6 * BLOCK // 4), requires_grad=False)
        added = [torch.nn.Parameter(torch.zeros(1).bfloat16()) for _ in range(60)]
        trained = torch.nn.Parameter(torch.ones(8).bfloat16())
        optimizer = AdamW([frozen, trained], directory=STORE, options=options(cloning))
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


def next_process(backend: Recorded, reference: Reference, **changes) -> Process:
    assert isinstance(backend.inner, MemoryBackend)
    return Process(Recorded(backend.inner.reopened()), reference, **changes)


def flip(backend: Recorded, path: str, leaf: int) -> None:
    """Flip a bit in a leaf of a model file."""
    file = backend.inner.open(f"{path}/model.safetensors", writable=True)
    offset = 8 + int.from_bytes(file.read_bytes(0, 8), "little") + leaf * LEAF + 100
    file.write_bytes(bytes([file.read_bytes(offset, 1)[0] ^ 4]), offset)
    file.close()


def slots(backend: Recorded) -> list[str]:
    return [f"{STORE}/{name}" for name in backend.inner.list_dir(STORE) if name != "LOCK"]


class TestAfterAResume:
    def test_what_is_frozen_is_read_once_for_each_slot_and_not_written(self, plain):
        run = next_process(plain, trained_before(plain))
        found = [run.step_and_seal() for _ in range(NUM_SLOTS + 3)]
        assert [leaves(moves, "write") for moves in found] == [CHANGING] * len(found)
        # The third slot is the one that was restored, and is known since then.
        assert [leaves(moves, "again") for moves in found[:2]] == [UNCHANGED] * 2
        assert not any(leaves(moves, "again") for moves in found[2:])
        run.close()

    def test_on_several_drives_it_is_the_same(self, plain):
        places = {"directory": [STORE, "/other/run"]}
        run = next_process(plain, trained_before(plain, **places), **places)
        found = [run.step_and_seal() for _ in range(NUM_SLOTS + 1)]
        assert [leaves(moves, "write") for moves in found] == [CHANGING] * len(found)
        assert [leaves(moves, "again") for moves in found] == [UNCHANGED] * 2 + [[]] * 2
        run.close()

    def test_the_drive_is_asked_and_not_the_page_cache(self, plain):
        """A cache may hold what the drive has failed to take from an earlier process."""
        run = next_process(plain, trained_before(plain))
        moves = run.step_and_seal()
        assert leaves(moves, "again") == UNCHANGED
        assert not leaves(moves, "read")
        run.close()

    def test_where_files_share_space_it_is_taken_from_what_was_restored(self, cloning):
        run = next_process(cloning, trained_before(cloning))
        found = [run.step_and_seal() for _ in range(NUM_SLOTS + 3)]
        assert [leaves(moves, "write") for moves in found] == [CHANGING] * len(found)
        beside = [n for n in UNCHANGED if n not in CLONED]
        assert [leaves(moves, "clone") for moves in found[:2]] == [CLONED] * 2
        assert [leaves(moves, "again") for moves in found[:2]] == [beside] * 2
        assert not any(leaves(moves, "again") + leaves(moves, "clone") for moves in found[2:])
        run.close()

    def test_a_restore_that_loads_the_state_only_makes_nothing_known(self, plain):
        """Then what the live model holds is compared with what is on the drive."""
        run = Process(plain)
        for _ in range(NUM_SLOTS):
            run.step_and_seal()
        reference_to = run.optimizer.state_dict()
        values = {name: value.clone() for name, value in run.model.state_dict().items()}
        run.close()
        again = Process(Recorded(plain.inner.reopened()), run.reference, restore=False)
        again.model.load_state_dict(values)
        again.optimizer.load_state_dict(reference_to)
        again.step_number = NUM_SLOTS
        found = [again.step_and_seal() for _ in range(NUM_SLOTS + 1)]
        assert [leaves(moves, "write") for moves in found] == [CHANGING] * len(found)
        assert [leaves(moves, "again") for moves in found] == [UNCHANGED] * NUM_SLOTS + [[]]
        again.close()

    def test_a_frozen_tensor_that_was_edited_before_the_first_seal_is_written(self, backend):
        run = next_process(backend, trained_before(backend))
        run.edit("base", 20_000, 7.0)
        edited = (run.model.trained.nbytes + 12 + 2 * 20_000) // LEAF
        for _ in range(NUM_SLOTS):
            moves = run.step_and_seal()
            assert edited in leaves(moves, "write") + leaves(moves, "clone")
            assert set(leaves(moves, "write")) <= {*CHANGING, edited}
        assert leaves(run.step_and_seal(), "write") == CHANGING
        run.close()

    @pytest.mark.parametrize("leaf", [2, 9, NUM_LEAVES - 1])
    def test_a_bit_that_has_flipped_in_a_slot_is_mended(self, plain, leaf):
        reference = trained_before(plain)
        free = [path for path in slots(plain) if "slot" in path]
        assert len(free) == 1
        flip(plain, free[0], leaf)
        run = next_process(plain, reference)
        assert leaves(run.step_and_seal(), "write") == [*CHANGING, leaf]
        assert leaves(run.step_and_seal(), "write") == CHANGING
        run.close()

    def test_what_cannot_be_read_back_is_written(self, plain):
        run = next_process(plain, trained_before(plain))
        run.step()
        run.backend.fail_reads = True
        run.backend.taken()
        checkpoint = run.seal()
        moves = run.backend.taken()
        run.backend.fail_reads = False
        assert leaves(moves, "write") == list(range(NUM_LEAVES))
        run.check(checkpoint)
        assert leaves(run.step_and_seal(), "again") == UNCHANGED, "another slot is asked again"
        run.close()

    @pytest.mark.parametrize("how", ["refused", "fail"])
    def test_what_cannot_be_cloned_is_read_back_or_written(self, cloning, how):
        run = next_process(cloning, trained_before(cloning))
        run.backend.clones = how
        moves = run.step_and_seal()
        assert not leaves(moves, "clone")
        if how == "refused":
            assert leaves(moves, "write") == CHANGING
            assert leaves(moves, "again") == UNCHANGED
        else:  # as after any write that has failed, nothing is asked
            assert leaves(moves, "write") == [*CHANGING, *CLONED, NUM_LEAVES - 1]
        run.close()

    @pytest.mark.parametrize("keep", [None, 9], ids=["expiring", "nothing-expires"])
    def test_nothing_is_cloned_from_a_checkpoint_that_a_reader_has_found_damaged(
        self, cloning, keep
    ):
        reference = trained_before(cloning)
        run = next_process(cloning, reference, **({"keep": keep} if keep else {}))
        newest = f"{STORE}/step-{run.step_number:08d}"
        flip(run.backend, newest, 12)
        mark = run.backend.inner.create(f"{newest}/{QUARANTINE_NAME}", 10)
        mark.close()
        moves = run.step_and_seal()
        assert not leaves(moves, "clone")
        assert leaves(moves, "again") == UNCHANGED
        run.close()

    def test_damage_that_a_reader_has_found_is_not_in_the_next_checkpoint_of_that_slot(
        self, plain, monkeypatch
    ):
        """It marks the checkpoint at the moment at which that is withdrawn."""
        run = Process(plain, keep=3)
        for _ in range(4):
            run.step_and_seal()
        damaged = f"{STORE}/step-00000002"
        flip(plain, damaged, 12)
        lock = plain.lock

        def marked_and_locked(path, **kwargs):
            if path == damaged:
                plain.inner.create(f"{damaged}/{QUARANTINE_NAME}", 10).close()
                monkeypatch.setattr(plain, "lock", lock)
            return lock(path, **kwargs)

        monkeypatch.setattr(plain, "lock", marked_and_locked)
        found = [run.step_and_seal() for _ in range(4)]
        assert [leaves(moves, "write") for moves in found].count([*CHANGING, 12]) == 1
        assert [leaves(moves, "again") for moves in found].count(UNCHANGED) == 1
        run.close()

    def test_starting_over_reads_the_slots_of_the_old_history(self, plain):
        trained_before(plain)
        reference = Reference()
        run = next_process(plain, reference, fresh=True)
        found = [run.step_and_seal() for _ in range(NUM_SLOTS + 3)]
        assert [leaves(moves, "write") for moves in found] == [CHANGING] * len(found)
        assert [leaves(moves, "again") for moves in found].count(UNCHANGED) == NUM_SLOTS
        run.close()


class TestTheWarning:
    """Of checkpoints that hold little that is trained."""

    @pytest.fixture
    def low_floor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(frozen_space, "_LEAST_BYTES", 100_000)

    def sealed(self, backend: Recorded, num_seals: int = 1, **changes) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = Process(backend, **changes)
            for _ in range(num_seals):
                run.step()
                run.seal()
            run.close()
        assert all(w.filename == frozen_model.__file__ for w in caught), "where the call is"
        return [str(w.message) for w in caught]

    def test_it_names_the_space_once_at_the_first_checkpoint(self, plain, low_floor):
        frozen = 2 * 12 * LEAF + 4 * LEAF + 12
        (message,) = self.sealed(plain, 3, keep=4)
        assert message == (
            f"{STORE}: each checkpoint holds {frozen / 1024:.1f} KiB of frozen parameters and "
            f"buffers beside {1500 * 4 / 1024:.1f} KiB that are trained, and the store keeps 5 "
            f"slots: {5 * frozen / 1024:.1f} KiB. To keep only what is trained, construct without "
            "model=, give the optimizer only the parameters that are trained, and use another "
            "directory"
        )
        assert self.sealed(Recorded(plain.inner.reopened())) == [], "the space is taken by then"

    def test_it_says_where_checkpoints_share_it(self, cloning, low_floor):
        frozen = 2 * 12 * LEAF + 4 * LEAF + 12
        (message,) = self.sealed(cloning)
        assert (
            f"slots: {frozen / 1024:.1f} KiB in all, and not {3 * frozen / 1024:.1f} KiB, as this "
            "file system lets checkpoints share" in message
        )

    def test_what_it_advises_helps(self, plain, low_floor):
        assert self.sealed(plain, model=None) == []

    def test_small_models_are_not_worth_a_word(self, plain):
        assert self.sealed(plain) == []

    @pytest.mark.parametrize(("num_frozen", "num_warnings"), [(10_239, 0), (10_240, 1)])
    def test_ten_times_what_is_trained_is(self, plain, monkeypatch, num_frozen, num_warnings):
        monkeypatch.setattr(frozen_space, "_LEAST_BYTES", 1)
        model = torch.nn.Module()
        model.trained = torch.nn.Parameter(torch.ones(1024))
        model.frozen = torch.nn.Parameter(torch.ones(num_frozen), requires_grad=False)
        model.trained.grad = torch.ones(1024)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with AdamW(
                [model.trained], directory=STORE, model=model, options=options(plain)
            ) as optimizer:
                optimizer.step()
                optimizer.checkpoint()
        assert len(caught) == num_warnings, [str(one.message) for one in caught]

    def test_nor_is_a_model_of_which_much_is_trained(self, plain, low_floor, monkeypatch):
        monkeypatch.setattr(frozen_space, "_RATIO", 100)
        assert self.sealed(plain) == []
