"""Parts on further drives: which are kept, written anew or removed, whatever has gone wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gds import Backend, MemoryBackend
from offload import list_checkpoints, open_checkpoint
from offload.store import prune
from tests.crash.fault_backend import FaultBackend
from tests.crash.test_drives import (
    BOTH,
    ONE,
    TWO,
    assert_goes_on,
    copied,
    optimizer_in,
    part_of,
    parts_in,
    slots_in,
    store_of_two,
)
from tests.stores.files import contents, overwrite, remove_tree, write
from tests.stores.training import (
    Model,
    Reference,
    differences,
    train,
)

THREE = [*BOTH, "/third/run"]


def assert_newest(backend: Backend, step: int) -> None:
    with open_checkpoint(ONE, backend=backend) as newest:
        assert newest.step == step
        assert differences(newest, backend, Reference().after(step)) == []


def store_of_three(keep: int) -> MemoryBackend:
    """Return files with checkpoints of steps 1, 2, ... on three drives."""
    backend, model = MemoryBackend(), Model()
    with optimizer_in(backend, model, THREE, keep=keep) as optimizer:
        train(model, optimizer, *range(1, keep + 1))
    return backend.reopened()


def zero_manifest(backend: Backend) -> None:
    overwrite(backend, f"{ONE}/step-00000003/manifest.json", b"\0" * 100, 40)


def remove_model(backend: Backend) -> None:
    backend.remove(f"{ONE}/step-00000003/model.safetensors")


class TestOfRefusedCheckpoints:
    @pytest.mark.parametrize("damage", [zero_manifest, remove_model])
    def test_none_is_rewritten_as_long_as_the_checkpoint_is_there(
        self, damage: Callable[[Backend], None]
    ) -> None:
        """Also if its manifest, which would name its part, cannot be read."""
        backend = store_of_two(keep=3)
        part = f"{TWO}/{part_of(backend, 3)}"
        of_part, of_slot = contents(backend, part), contents(backend, f"{ONE}/step-00000003")
        damage(backend)
        model = Model()
        with optimizer_in(backend, model, keep=2) as optimizer:
            with pytest.warns(RuntimeWarning, match=r"not using.*step-00000003"):
                assert optimizer.restore().step == 2
            # not step 3, which would take the name of the damaged one
            train(model, optimizer, 3, seal=False)
            train(model, optimizer, 4, 5, 6, 7)
        assert contents(backend, part) == of_part
        for name, data in of_slot.items():
            write(backend, f"{ONE}/step-00000003/{name}", data)
        with open_checkpoint(f"{ONE}/step-00000003", backend=backend) as repaired:
            assert repaired.verify().ok

    @pytest.mark.parametrize("how", ["removed", "replaced by the next of its step"])
    def test_one_is_free_when_the_name_of_the_checkpoint_is(self, how: str) -> None:
        backend = store_of_two(keep=2)
        if how == "removed":
            remove_tree(backend, f"{ONE}/step-00000002")
            assert_goes_on(backend, 1)
        else:
            overwrite(backend, f"{ONE}/step-00000002/manifest.json", b"\0" * 100, 40)
            with pytest.warns(RuntimeWarning, match="not using"):
                assert_goes_on(backend, 1)
        assert len(parts_in(backend)) == len(slots_in(backend)) == 3


class TestByHand:
    def test_that_of_an_expired_checkpoint_is_removed_in_mid_run(self) -> None:
        backend, model = MemoryBackend(), Model()
        with optimizer_in(backend, model, keep=2) as optimizer:
            train(model, optimizer, 1, 2)
            remove_tree(backend, f"{TWO}/{part_of(backend, 1)}")
            with pytest.warns(RuntimeWarning, match="a part of its state is missing"):
                train(model, optimizer, 3, 4, 5)
        assert_newest(backend, 5)
        assert len(parts_in(backend)) == 3

    def test_that_of_a_free_slot_is_removed_in_mid_run(self) -> None:
        """The slot is of no use without it, and its name in the first directory says nothing."""
        backend, model = MemoryBackend(), Model()
        with optimizer_in(backend, model, keep=1) as optimizer:
            train(model, optimizer, 1, 2)
            (free,) = set(parts_in(backend)) - {part_of(backend, 2)}
            remove_tree(backend, f"{TWO}/{free}")
            train(model, optimizer, 3, 4)
        assert_newest(backend, 4)
        assert len(parts_in(backend)) == len(slots_in(backend)) == 2

    @pytest.mark.parametrize("drive", [1, 2])
    @pytest.mark.parametrize("fresh", [False, True], ids=["resumed", "given up"])
    def test_those_of_checkpoints_of_an_earlier_process_are_removed(
        self, fresh: bool, drive: int
    ) -> None:
        backend = store_of_three(3)
        model = Model()
        with optimizer_in(backend, model, THREE, keep=1, fresh=fresh) as optimizer:
            optimizer.restore()
            gone = 3 if fresh else 1
            with open_checkpoint(f"{ONE}/step-0000000{gone}", backend=backend) as found:
                remove_tree(backend, found.parts[drive - 1])
            if fresh:
                train(model, optimizer, 1, 2)
                assert backend.stat(f"{ONE}/step-00000003") is None
            else:
                with pytest.warns(RuntimeWarning, match="not using .*/step-00000001 any more"):
                    train(model, optimizer, 4, 5)
        assert_newest(backend, 2 if fresh else 5)


class TestNumbers:
    def test_one_that_is_kept_on_one_drive_is_used_on_no_other(self) -> None:
        first, second, third = THREE
        kept = f"{third}/part-7/not-ours"
        backend, model = MemoryBackend(directories=[first, f"{second}/part-7", kept]), Model()
        for directory in (second, third):  # so they are of a store, whatever else is in them
            backend.create(f"{directory}/LOCK", 0).close()
        with optimizer_in(backend, model, THREE) as optimizer:
            train(model, optimizer, 1, 2)
        assert_newest(backend, 2)
        assert backend.list_dir(f"{third}/part-7") == ["not-ours"]

    def test_the_one_with_the_most_parts_is_used_and_the_lowest_are_kept(self) -> None:
        """Directories of parts that are left over, with a checkpoint or without."""
        left = [f"{directory}/part-{n}" for directory in THREE[1:] for n in (33, 5, 17)]
        backend, model = MemoryBackend(directories=[ONE, *left, f"{THREE[1]}/part-2"]), Model()
        for directory in THREE[1:]:
            backend.create(f"{directory}/LOCK", 0).close()
        with optimizer_in(backend, model, THREE, keep=1) as optimizer:
            train(model, optimizer, 1)
            with open_checkpoint(ONE, backend=backend) as found:
                assert found.parts == [f"{directory}/part-5" for directory in THREE[1:]]
            for directory in THREE[1:]:
                assert len(parts_in(backend, directory)) == 2
            train(model, optimizer, 2)
        assert_newest(backend, 2)


def test_a_part_of_another_store_is_not_taken_while_it_cannot_be_read() -> None:
    """As earlier versions let two stores have parts in one directory."""
    inner, other, model = store_of_two(), MemoryBackend(), Model()
    with optimizer_in(other, model, ["/elsewhere", TWO]) as optimizer:
        train(model, optimizer, 1)
    (part,) = parts_in(other)[:1]
    copied(other, f"{TWO}/{part}", inner, f"{TWO}/part-50")
    foreign = contents(inner, f"{TWO}/part-50")
    backend, model, looked = FaultBackend(inner), Model(), []

    def chosen(kind: str, path: str) -> bool:
        if kind == "open" and path == f"{TWO}/part-50/part.json":
            looked.append(path)
            return True
        return False

    with pytest.warns(RuntimeWarning, match="sealed for another store"):
        optimizer = optimizer_in(backend, model, keep=9)
    with optimizer:
        optimizer.restore()
        for step in range(3, 7):
            backend.fail_if(chosen)
            train(model, optimizer, step)
    assert len(looked) > 1
    assert contents(inner, f"{TWO}/part-50") == foreign
    assert_newest(inner, 6)
    backend.close()


class TestHalfWithdrawn:
    """A process has died in a withdrawal: the slot has its manifest, the part is as sealed."""

    @pytest.fixture
    def backend(self) -> MemoryBackend:
        backend = store_of_two(keep=3)
        for step in (1, 2):
            backend.rename(f"{ONE}/step-0000000{step}", f"{ONE}/.slot-{90 + step}")
        return backend

    def test_parts_belong_to_no_checkpoint_and_are_pruned(self, backend: MemoryBackend) -> None:
        kept = part_of(backend, 3)
        would = prune(ONE, parts=[TWO], dry_run=True, backend=backend)
        assert {f"{ONE}/.slot-91", f"{ONE}/.slot-92"} < {one.path for one in would.leftovers}
        assert len([one for one in would.leftovers if one.path.startswith(TWO)]) == 2
        report = prune(ONE, parts=[TWO], backend=backend)
        assert (report.unnamed, parts_in(backend)) == ((), [kept])


def test_starting_over_keeps_the_old_parts_until_the_new_ones_are_durable() -> None:
    backend, model = store_of_two(), Model()
    old = f"{TWO}/{part_of(backend, 2)}"
    before = contents(backend, old)
    with optimizer_in(backend, model, fresh=True) as optimizer:
        train(model, optimizer, 1, 2, 3, seal=False)
        assert contents(backend, old) == before
        optimizer.checkpoint({"step": 3}).result()
    assert [info.step for info in list_checkpoints(ONE, backend=backend)] == [3]
    assert len(parts_in(backend)) <= 3
