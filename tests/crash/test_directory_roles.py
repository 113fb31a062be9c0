"""What a directory is known by, and how directories that do not fit together are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from gds import MemoryBackend, PosixBackend
from offload.errors import StoreError
from tests.crash.crash_backend import CrashBackend
from tests.crash.fault_backend import FaultBackend
from tests.crash.test_drives import (
    BOTH,
    ONE,
    TWO,
    assert_goes_on,
    damage_invalid,
    manifest_of,
    optimizer_in,
    part_of,
    parts_in,
    store_of_two,
)
from tests.stores.files import contents, everything, overwrite, read, remove_tree, write
from tests.stores.training import Model, train

X, Y, Z = "/x/run", "/y/run", "/z/run"


def store_of_three(num_steps: int = 1) -> MemoryBackend:
    """Return files with checkpoints in three directories, made by a process that has ended."""
    backend, model = MemoryBackend(), Model()
    with optimizer_in(backend, model, [X, Y, Z]) as optimizer:
        train(model, optimizer, *range(1, num_steps + 1))
    return backend.reopened()


def copied(source: MemoryBackend, path: str, target: MemoryBackend, new: str) -> None:
    """Copy a directory of files from one backend to another."""
    target.make_dir(new)
    for name, data in contents(source, path).items():
        write(target, f"{new}/{name}", data)


def refused(backend: MemoryBackend, *directories: str, fresh: bool = False) -> StoreError:
    """Return the error of the constructor, having checked that it has changed nothing."""
    before = everything(backend)
    with pytest.raises(StoreError) as caught:
        optimizer_in(backend, Model(), directories, fresh=fresh)
    assert everything(backend) == before
    return caught.value


@pytest.mark.parametrize("left", ["step-00000001", ".slot-7", "store.json"])
def test_a_first_directory_is_known_by_any_name_that_only_it_has(left: str) -> None:
    made = store_of_two(keep=1)
    backend = MemoryBackend(directories=["/new", ONE])
    if left == "store.json":
        write(backend, f"{ONE}/{left}", read(made, f"{ONE}/{left}"))
    else:
        copied(made, f"{ONE}/step-00000001", backend, f"{ONE}/{left}")
    error = refused(backend, "/new", ONE)
    assert "is the first directory of a store, but was given as number 2" in str(error)
    assert error.filename == ONE


def test_parts_in_the_first_directory_do_not_hide_the_store() -> None:
    """Somebody has copied them there, or an earlier version has let two stores share a drive."""
    backend = store_of_two()
    copied(backend, f"{TWO}/{part_of(backend, 1)}", backend, f"{ONE}/part-7")
    assert_goes_on(backend, 2)


class TestTheThird:
    """Each further directory is looked at, not only the first of them."""

    def test_that_is_the_first_directory_of_another_store(self) -> None:
        backend = store_of_three()
        with optimizer_in(backend, model := Model(), ["/other"]) as optimizer:
            train(model, optimizer, 1)
        error = refused(backend, X, Y, "/other", fresh=True)
        assert "is the first directory of a store, but was given as number 3" in str(error)

    def test_that_is_a_directory_of_another_store(self) -> None:
        backend, other = store_of_three(), store_of_three()
        backend.make_dir("/other")
        (part,) = parts_in(other, Z)
        copied(other, f"{Z}/{part}", backend, f"/other/{part}")
        error = refused(backend, X, Y, "/other")
        store = _store_of(other)
        assert f"is number 3 of the store {store}, but was given as number 3" in str(error)
        assert error.filename == "/other"

    def test_that_is_empty(self) -> None:
        backend = store_of_three()
        backend.make_dir("/empty")
        error = refused(backend, X, Y, "/empty")
        assert f"this directory is empty, and the checkpoints of the store in {X}" in str(error)
        assert error.filename == "/empty"


def _store_of(backend: MemoryBackend) -> str:
    text = read(backend, f"{X}/store.json").decode()
    return text.partition('"store_id": "')[2][:32]


def test_a_part_behind_one_that_is_not_sealed_says_whose_the_directory_is() -> None:
    backend = store_of_two(keep=2)
    first, _ = sorted(parts_in(backend))
    damage_invalid(backend, f"{TWO}/{first}")
    backend.make_dir("/new")
    store = manifest_of(backend, 2)["store_id"]
    assert f"is number 2 of the store {store}, but was" in str(refused(backend, "/new", TWO))


def test_the_right_order_is_not_said_of_a_store_of_which_a_directory_is_missing() -> None:
    error = refused(store_of_three(), Z, X)
    assert "pass the directories of that store in their order" in str(error)


def test_the_right_order_is_that_of_the_store_in_the_first_directory() -> None:
    """Earlier versions let stores share drives: the others have their parts in another order."""
    for _ in range(4):  # identities are drawn, and looked at in any order
        backend = store_of_three()
        for number in range(11, 17):
            other = MemoryBackend()
            with optimizer_in(other, model := Model(), [X, Z, Y]) as optimizer:
                train(model, optimizer, 1)
            for directory in (Y, Z):
                (part,) = parts_in(other, directory)
                copied(other, f"{directory}/{part}", backend, f"{directory}/part-{number}")
        assert f"pass directory={[X, Y, Z]!r}" in str(refused(backend, X, Z, Y))


def test_a_directory_that_only_has_a_lock_is_called_one_of_a_store() -> None:
    backend = MemoryBackend(directories=[ONE])
    backend.lock(f"{ONE}/LOCK", create=True).release()
    error = refused(backend, ONE, "/missing")
    assert f"this directory does not exist, and {ONE} is a directory of a store" in str(error)


def test_a_store_goes_on_after_the_power_went_before_its_first_commit() -> None:
    """Its part is sealed, and nothing but ``store.json`` says that it is the store's own."""
    backend = FaultBackend(MemoryBackend())
    optimizer = optimizer_in(backend, model := Model())
    train(model, optimizer, 1, seal=False)
    backend.fail_if(lambda kind, _: kind == "rename")
    with pytest.raises(Exception, match="injected failure of rename"):
        optimizer.checkpoint().result()
    after = backend.inner.reopened()
    assert not [name for name in after.list_dir(ONE) if name.startswith("step-")]
    with optimizer_in(after, model := Model()) as optimizer:
        assert optimizer.restore() is None
        train(model, optimizer, 1)
    assert_goes_on(after, 1)


def test_parts_are_not_refused_while_it_is_unknown_whose_the_checkpoints_are() -> None:
    backend = store_of_two(keep=1)
    backend.remove(f"{ONE}/store.json")
    manifest = f"{ONE}/step-00000001/manifest.json"
    good = read(backend, manifest)
    overwrite(backend, manifest, b"\0" * 100, 40)
    with pytest.warns(RuntimeWarning, match="sealed for another store, and left alone"):
        optimizer_in(backend, Model()).close()
    overwrite(backend, manifest, good)
    assert_goes_on(backend, 1)


def test_a_file_that_is_named_like_a_part_is_no_part() -> None:
    backend = store_of_two()
    write(backend, f"{TWO}/part-77", b"mine")
    assert_goes_on(backend, 2)
    assert read(backend, f"{TWO}/part-77") == b"mine"
    backend.make_dir("/notes")
    write(backend, "/notes/part-1", b"mine")
    assert "holds other files: 'part-1'" in str(refused(backend, "/new", "/notes"))


def test_a_store_whose_checkpoints_differ_in_their_drives_is_refused_untouched() -> None:
    """Somebody has put a checkpoint of another store beside the present one."""
    backend, other = store_of_two(keep=1), MemoryBackend()
    with optimizer_in(other, model := Model(), [ONE]) as optimizer:
        train(model, optimizer, 1, 2)
    copied(other, f"{ONE}/step-00000002", backend, f"{ONE}/step-00000002")
    remove_tree(backend, TWO)
    backend.make_dir(TWO)
    error = refused(backend, ONE, TWO, fresh=True)
    assert "step 2 of this store is spread over 1 directories" in str(error)


def test_a_renamed_checkpoint_of_several_drives_costs_a_store_of_one_only_itself() -> None:
    backend, other = MemoryBackend(), store_of_two(keep=1)
    with optimizer_in(backend, model := Model(), [ONE]) as optimizer:
        train(model, optimizer, 1, 2)
    copied(other, f"{ONE}/step-00000001", backend, f"{ONE}/step-00000009")
    with (
        pytest.warns(RuntimeWarning, match="its manifest is of step 1, expected 9"),
        optimizer_in(backend, Model(), [ONE]) as optimizer,
    ):
        assert optimizer.restore().step == 2


def test_a_refusal_changes_and_syncs_nothing() -> None:
    backend = CrashBackend()
    with optimizer_in(backend, model := Model()) as optimizer:
        train(model, optimizer, 1)
    before = len(backend.log)
    with pytest.raises(StoreError, match="but was given as number 1"):
        optimizer_in(backend, Model(), BOTH[::-1])
    assert [str(operation) for operation in backend.log[before:]] == []


def test_a_file_in_the_place_of_a_directory_is_called_what_it_is(tmp_path: Path) -> None:
    path = f"{tmp_path}/run"
    backend = PosixBackend(direct=False)
    backend.create(path, 0).close()
    with pytest.raises(StoreError, match="looking for a store: Not a directory"):
        optimizer_in(backend, Model(), [path])
    with pytest.raises(StoreError, match="making the store's directory: Not a directory"):
        optimizer_in(backend, Model(), [f"{path}/below"])
    backend.close()
