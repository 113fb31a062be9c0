"""A store on two drives: parts missing, moved, swapped, shared or full, and who may touch them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from gds import Backend, MemoryBackend, PosixBackend, WrapperBackend
from gds.contract import Capabilities
from offload import AdamW, DriveTuning, Options, list_checkpoints, load_parameters, open_checkpoint
from offload.cli import main
from offload.errors import (
    CheckpointError,
    SealError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    VolatileStoreError,
)
from offload.stream.drives import Drives
from tests.crash.crash_backend import CrashBackend
from tests.crash.fault_backend import FaultBackend
from tests.stores.files import contents, everything, overwrite, read, remove_tree
from tests.stores.training import (
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
    same_bits,
    train,
)

ONE, TWO = "/first/run", "/second/run"
BOTH = [ONE, TWO]


def optimizer_in(
    backend: Backend, model: Model, directories: Sequence[str] = BOTH, **changes: object
) -> AdamW:
    return optimizer_for(model, directories, options(backend), **changes)


def store_of_two(keep: int = 2, backend: Backend | None = None) -> MemoryBackend:
    """Return files with checkpoints of steps 1, 2, ..., made by a process that has ended."""
    backend, model = backend or MemoryBackend(), Model()
    with optimizer_in(backend, model, keep=keep) as optimizer:
        train(model, optimizer, *range(1, keep + 1))
    return backend.reopened()


def part_of(backend: Backend, step: int) -> str:
    return manifest_of(backend, step)["parts"][0]["name"]


def manifest_of(backend: Backend, step: int) -> dict:
    return json.loads(read(backend, f"{ONE}/step-{step:08d}/manifest.json"))["body"]


def parts_in(backend: Backend, directory: str = TWO) -> list[str]:
    return [name for name in backend.list_dir(directory) if name != "LOCK"]


def slots_in(backend: Backend) -> list[str]:
    return [n for n in backend.list_dir(ONE) if n not in ("LOCK", "store.json")]


def assert_goes_on(backend: Backend, found: int, directories: Sequence[str] = BOTH) -> None:
    """A new process finds that step, and ends with the bits of an uninterrupted run."""
    model = Model(history=5)  # other values, so that what is not restored shows
    with optimizer_in(backend, model, directories) as optimizer:
        checkpoint = optimizer.restore()
        assert checkpoint is not None
        assert checkpoint.step == found
        train(model, optimizer, found + 1, found + 2)
    expected = Reference().after(found + 2)
    assert same_bits(dict(model.state_dict()), expected.model)
    parts = None if list(directories) == BOTH else directories[1:]
    with open_checkpoint(directories[0], parts=parts, backend=backend) as newest:
        assert differences(newest, backend, expected) == []


def damage_delete(backend: Backend, part: str) -> None:
    remove_tree(backend, part)


def damage_stale(backend: Backend, part: str) -> None:
    """Put what another checkpoint has in its place."""
    for name, data in contents(backend, f"{TWO}/{part_of(backend, 1)}").items():
        overwrite(backend, f"{part}/{name}", data)


def damage_invalid(backend: Backend, part: str) -> None:
    overwrite(backend, f"{part}/part.json", b'{"format": 1, "invalid": "x"}'.ljust(4095) + b"\n")


def damage_garbage(backend: Backend, part: str) -> None:
    overwrite(backend, f"{part}/part.json", b"\xff" * 64)


def damage_edited(backend: Backend, part: str) -> None:
    text = read(backend, f"{part}/part.json")
    overwrite(backend, f"{part}/part.json", text.replace(b'"drive": 1', b'"drive": 2'))


def damage_missing_file(backend: Backend, part: str) -> None:
    backend.remove(f"{part}/exp_avg.safetensors")


def damage_missing_part_json(backend: Backend, part: str) -> None:
    backend.remove(f"{part}/part.json")


def damage_header(backend: Backend, part: str) -> None:
    text = read(backend, f"{part}/exp_avg.safetensors")[:4096]
    overwrite(backend, f"{part}/exp_avg.safetensors", text.replace(b'"F32"', b'"I32"'))


DAMAGES: dict[str, tuple[Callable[[Backend, str], None], str]] = {
    "deleted": (damage_delete, "is missing"),
    "of another generation": (damage_stale, "is not the part that was sealed with it"),
    "not sealed": (damage_invalid, "not sealed"),
    "garbage": (damage_garbage, "not a part's file"),
    "edited": (damage_edited, "does not match its digest"),
    "without a file": (damage_missing_file, "exp_avg.safetensors: missing"),
    "without part.json": (damage_missing_part_json, "part.json: nothing, expected"),
    "another header": (damage_header, "lists other tensors"),
}


@pytest.mark.parametrize("name", DAMAGES)
class TestDamage:
    def test_is_passed_over_with_the_reason(self, name: str) -> None:
        backend = store_of_two(keep=3)
        damage, reason = DAMAGES[name]
        damage(backend, f"{TWO}/{part_of(backend, 3)}")
        with pytest.warns(RuntimeWarning, match=f"not using.*step-00000003.*{reason}"):
            assert_goes_on(backend, 2)
        assert len(parts_in(backend)) <= 4, "the refused one, two that are kept, and the next"

    def test_parameters_can_still_be_loaded(self, name: str) -> None:
        backend = store_of_two(keep=3)
        DAMAGES[name][0](backend, f"{TWO}/{part_of(backend, 3)}")
        model = Model(history=5)
        assert load_parameters(model, ONE, backend=backend) == 3
        assert same_bits(dict(model.state_dict()), Reference().after(3).model)
        infos = list_checkpoints(ONE, backend=backend)
        assert [info.valid for info in infos][-1] is False
        with pytest.raises(CheckpointError, match=DAMAGES[name][1]):
            open_checkpoint(f"{ONE}/step-00000003", backend=backend)


def test_a_missing_part_says_how_to_pass_it() -> None:
    backend = store_of_two()
    backend.rename(TWO, "/second/moved")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(f"{ONE}/step-00000002", backend=backend)
    assert f"{TWO} has no parts" in str(caught.value)
    assert "directory=[...]" in str(caught.value)
    assert "parts=[...]" in str(caught.value)


class TestMoved:
    def test_the_run_goes_on_where_it_is_told(self) -> None:
        backend = store_of_two()
        backend.rename("/first", "/a")
        backend.rename("/second", "/b")
        assert_goes_on(backend, 2, ["/a/run", "/b/run"])
        assert backend.stat("/second") is None, "nothing is made where it was"
        with open_checkpoint("/a/run", backend=backend) as newest:
            assert newest.parts[0].startswith("/b/run/part-")
            assert newest.verify().ok

    def test_readers_are_told_as_well(self) -> None:
        backend = store_of_two()
        backend.rename("/second", "/b")
        with open_checkpoint(ONE, parts=["/b/run"], backend=backend) as newest:
            assert newest.step == 2
            assert newest.verify().ok
        assert [i.valid for i in list_checkpoints(ONE, backend=backend)] == [False, False]
        infos = list_checkpoints(ONE, parts=["/b/run"], backend=backend)
        assert [info.valid for info in infos] == [True, True]
        with pytest.raises(CheckpointError, match="2 directories were given"):
            open_checkpoint(f"{ONE}/step-00000002", parts=["/b/run", "/c"], backend=backend)

    def test_a_copy_is_not_mixed_with_the_original(self) -> None:
        """Whoever names a copy of the second directory writes to that, and only to that."""
        backend = store_of_two()
        for path in ("/copy", *(f"/copy/{part}" for part in parts_in(backend))):
            backend.make_dir(path)
        for part in parts_in(backend):
            for name, data in contents(backend, f"{TWO}/{part}").items():
                file = backend.create(f"/copy/{part}/{name}", len(data))
                file.write_bytes(data, 0)
                file.close()
        before = {part: contents(backend, f"{TWO}/{part}") for part in parts_in(backend)}
        assert_goes_on(backend, 2, [ONE, "/copy"])
        assert before == {part: contents(backend, f"{TWO}/{part}") for part in parts_in(backend)}

    def test_directories_in_another_order_are_noticed(self) -> None:
        backend, model = MemoryBackend(), Model()
        with optimizer_in(backend, model, [ONE, "/x", "/y"]) as optimizer:
            train(model, optimizer, 1)
        backend = backend.reopened()
        before = everything(backend)
        for fresh in (False, True):
            refused = pytest.raises(StoreError, match="is number 3 of this store, but was given as")
            with refused as error:
                optimizer_in(backend, Model(), [ONE, "/y", "/x"], fresh=fresh)
            assert f"number 2: pass directory={[ONE, '/x', '/y']!r}" in str(error.value)
        assert everything(backend) == before
        assert_goes_on(backend, 1, [ONE, "/x", "/y"])


class TestDirectories:
    @pytest.mark.parametrize("given", [[ONE], [ONE, TWO, "/third"]], ids=["fewer", "more"])
    @pytest.mark.parametrize("fresh", [False, True], ids=["resume", "fresh"])
    def test_another_number_is_refused(self, given: list[str], fresh: bool) -> None:
        backend = store_of_two()
        with pytest.raises(StoreError, match="spread over 2 directories") as caught:
            optimizer_in(backend, Model(), given, fresh=fresh)
        assert f"pass directory={BOTH!r}" in str(caught.value)
        assert f"{len(given)} were given" in str(caught.value)
        assert_goes_on(backend, 2)

    def test_a_store_with_one_directory_gets_no_second(self) -> None:
        backend, model = MemoryBackend(), Model()
        with optimizer_in(backend, model, [ONE]) as optimizer:
            train(model, optimizer, 1)
        assert backend.list_dir(ONE) == [".slot-1", "LOCK", "step-00000001"] or (
            backend.list_dir(ONE) == ["LOCK", "step-00000001"]
        )
        with pytest.raises(StoreError, match="spread over 1 directories"):
            optimizer_in(backend, Model(), BOTH)

    def test_the_same_directory_twice_is_refused(self, tmp_path: Path) -> None:
        os.symlink(tmp_path, tmp_path / "link")
        for given in ([tmp_path, tmp_path / "link"], [tmp_path / "a", f"{tmp_path}/b/../a"]):
            with pytest.raises(ValueError, match="names the same directory twice"):
                optimizer_for(Model(), given, options())

    def test_no_directory_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            optimizer_for(Model(), [], options())

    def test_shares_are_one_for_each(self) -> None:
        with pytest.raises(ValueError, match="got 3 for 2"):
            optimizer_for(
                Model(), BOTH, options(MemoryBackend(), drives=DriveTuning(shares=(1, 2, 3)))
            )

    def test_volatile_ones_are_refused_by_name(self) -> None:
        class Mixed(WrapperBackend):
            def capabilities(self, directory: str) -> Capabilities:
                found = super().capabilities(directory)
                return dataclasses.replace(found, volatile=directory.startswith("/second"))

        backend = Mixed(MemoryBackend(directories=["/second"]))
        with pytest.raises(VolatileStoreError, match=TWO):
            optimizer_for(Model(), BOTH, options(backend, allow_volatile=False))
        assert everything(backend) == {"/second": None}, "nothing was made, the first neither"

    def test_each_has_threads_of_its_own(self) -> None:
        drives = Drives(["/a", "/b", "/c"], Options(), None)
        assert len(set(drives.backends)) == 3
        assert all(isinstance(backend, PosixBackend) for backend in drives.backends)
        drives.close()
        given = MemoryBackend()
        assert Drives(["/a", "/b"], Options(backend=given), None).backends == [given, given]


class TestSharedDirectory:
    def test_while_the_other_store_is_open(self) -> None:
        backend = MemoryBackend(directories=[ONE])
        with optimizer_in(backend, Model(), ["/other", TWO]):
            with pytest.raises(StoreLockedError, match=TWO):
                optimizer_in(backend, Model())
            backend.lock(f"{ONE}/LOCK").release()  # given back when the second was refused
        backend.make_dir("/third")
        with optimizer_in(backend, Model(), [TWO, "/third"]):  # noqa: SIM117
            with pytest.raises(StoreLockedError, match=TWO):
                optimizer_in(backend, Model())

    @pytest.mark.parametrize("fresh", [False, True], ids=["resume", "fresh"])
    def test_a_directory_with_parts_of_another_store_is_refused(self, fresh: bool) -> None:
        backend = store_of_two()
        backend.make_dir("/other")
        before = everything(backend)
        store = manifest_of(backend, 2)["store_id"]
        with pytest.raises(StoreError, match=f"is number 2 of the store {store}, but was") as error:
            optimizer_in(backend, Model(), ["/other", TWO], fresh=fresh)
        assert error.value.filename == TWO
        assert "If that store is gone, remove its part-<k>" in str(error.value)
        assert everything(backend) == before
        assert_goes_on(backend, 2)

    def test_parts_of_another_store_are_never_touched(self) -> None:
        """As earlier versions let two stores have them in one directory."""
        backend = store_of_two()
        own = {part: contents(backend, f"{TWO}/{part}") for part in parts_in(backend)}
        backend.rename(TWO, "/second/aside")
        model = Model()
        with optimizer_in(backend, model, ["/other", TWO]) as optimizer:
            train(model, optimizer, 1, 2)
        for number, (_, files) in enumerate(own.items(), 101):
            backend.make_dir(f"{TWO}/part-{number}")
            for name, data in files.items():
                file = backend.create(f"{TWO}/part-{number}/{name}", len(data))
                file.write_bytes(data, 0)
                file.close()
        foreign = [f"{TWO}/part-{number}" for number in range(101, 101 + len(own))]
        before = {path: contents(backend, path) for path in foreign}
        with pytest.warns(RuntimeWarning, match="sealed for another store") as caught:
            optimizer = optimizer_in(backend, model, ["/other", TWO])
        assert all(path in str(caught[0].message) for path in foreign[:2])
        optimizer.restore()
        train(model, optimizer, 3, 4, 5)
        optimizer.close()
        assert {path: contents(backend, path) for path in foreign} == before


class _Room(WrapperBackend):
    """As much space in each directory as the test says."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.free: dict[str, int] = {}

    def free_bytes(self, directory: str) -> int:
        return self.free.get(directory, super().free_bytes(directory))


class TestFull:
    @pytest.mark.parametrize("directory", BOTH)
    def test_found_at_construction(self, directory: str) -> None:
        backend = _Room()
        backend.free[directory] = 20_000
        with pytest.raises(StoreFullError, match="keeping 2 checkpoints needs 3 more") as caught:
            optimizer_in(backend, Model(), keep=2)
        assert caught.value.filename == directory
        assert slots_in(backend) == parts_in(backend) == []

    def test_parts_that_are_there_count(self) -> None:
        backend = _Room()
        store_of_two(backend=backend.inner)
        backend.inner = backend.inner.reopened()
        assert len(parts_in(backend)) == 2
        backend.free[TWO] = 0
        with optimizer_in(backend, Model(), keep=1) as optimizer:
            assert optimizer.restore().step == 2
        with pytest.raises(StoreFullError, match="needs 1 more"):
            optimizer_in(backend, Model(), keep=2)

    @pytest.mark.parametrize("where", [ONE, TWO], ids=["first", "second"])
    @pytest.mark.parametrize("nth", [1, 2, 3, 4])
    def test_nothing_half_made_is_left(self, where: str, nth: int) -> None:
        """The first slot, and a later one: what fails leaves nothing, and may be tried again."""
        backend, model = FaultBackend(MemoryBackend()), Model()
        with optimizer_in(backend, model) as optimizer:
            for made in range(2):
                count = 0

                def chosen(kind: str, path: str) -> bool:
                    nonlocal count
                    inside = path.startswith((f"{where}/.slot-", f"{where}/part-"))
                    count += kind == "create" and inside
                    return count == nth and kind == "create"

                before = slots_in(backend), parts_in(backend)
                backend.fail_if(chosen)
                backward(model, made + 1)
                with pytest.raises(OSError, match="the slot that the next step"):
                    optimizer.step()
                assert (slots_in(backend), parts_in(backend)) == before
                optimizer.step()
                optimizer.checkpoint({"step": made + 1}).result()
            assert len(slots_in(backend)) == len(parts_in(backend)) <= 3
        assert backend.num_failed == 2
        assert same_bits(dict(model.state_dict()), Reference().after(2).model)


class TestOrder:
    """What `docs/guarantees.md` says about the order of effects, on the log of a run."""

    @staticmethod
    def log() -> list[str]:
        backend, model = CrashBackend(), Model()
        with optimizer_in(backend, model, keep=1) as optimizer:
            train(model, optimizer, 1, 2, 3)
        return [str(op) for op in backend.log]

    def test_parts_are_sealed_before_the_rename(self) -> None:
        log = self.log()
        commit = next(n for n, op in enumerate(log) if "to /first/run/step-00000001" in op)
        own = [n for n, op in enumerate(log[:commit]) if "part-1/part.json" in op]
        data = [
            n for n, op in enumerate(log[:commit]) if TWO in op and ".safetensors" in op
        ]  # written, then synced
        assert log[own[-1]].startswith("sync ")
        assert log[own[-2]].startswith("write ")
        assert max(data) < own[-2]
        assert f"sync_dir {TWO}/part-1" in log[own[-1] : commit]
        assert f"sync_dir {TWO}" in log[own[-1] : commit]

    def test_withdrawn_in_the_first_directory_first(self) -> None:
        log = self.log()
        withdrawn = next(
            n for n, op in enumerate(log) if op.startswith("rename /first/run/step-00000001 to")
        )
        slot = log[withdrawn].split()[-1]
        later = log[withdrawn + 1 :]
        assert later[0] == f"sync_dir {ONE}"
        assert later[1].startswith(f"write {slot}/manifest.json")
        assert later[2] == f"sync {slot}/manifest.json"
        assert later[3].startswith(f"write {TWO}/part-1/part.json")
        assert later[4] == f"sync {TWO}/part-1/part.json"
        before = [op for op in log[:withdrawn] if "part-1" in op]
        assert before[-1] == f"sync_dir {TWO}/part-1", "sealed, and not touched until then"
        assert any(op.startswith(f"write {TWO}/part-1/exp_avg") for op in later[5:])

    def test_the_store_is_named_before_a_part_is_written(self) -> None:
        log = self.log()
        named = log.index(f"sync {ONE}/store.json")
        assert log[named + 1] == f"sync_dir {ONE}"
        assert not any("part-" in op for op in log[:named])

    def test_a_free_part_is_invalidated_before_it_is_written(self) -> None:
        backend, model = CrashBackend(), Model()
        with optimizer_in(backend, model, keep=2) as optimizer:
            train(model, optimizer, 1, 2)
        remove_tree(backend, f"{ONE}/step-00000001")
        free = f"{TWO}/part-1"
        before = len(backend.log)
        with optimizer_in(backend, model, keep=2) as optimizer:
            optimizer.restore()
            train(model, optimizer, 3)
        log = [str(op) for op in backend.log[before:] if op.path.startswith(free)]
        assert log[0].startswith(f"write {free}/part.json")
        assert log[1] == f"sync {free}/part.json"
        assert any(op.startswith(f"write {free}/exp_avg") for op in log)

    def test_a_name_that_was_found_is_made_durable(self) -> None:
        """The process that wrote it may have been killed before it could sync it."""
        backend = CrashBackend()
        with optimizer_in(backend, model := Model()) as optimizer:
            train(model, optimizer, 1, seal=False)
        written = [str(op) for op in backend.log].index(f"write {ONE}/store.json 512 bytes at 0")
        backend = CrashBackend.resumed(backend.log[: written + 1])
        with optimizer_in(backend, model := Model()) as optimizer:
            train(model, optimizer, 1)
        log = [str(op) for op in backend.log[written + 1 :]]
        part = next(n for n, op in enumerate(log) if "part-" in op)
        assert f"sync {ONE}/store.json" in log[:part]
        assert f"remove {ONE}/store.json" not in log


def test_after_a_failed_sync_no_part_is_reused() -> None:
    backend = FaultBackend(store_of_two())
    backend.make_dir(f"{TWO}/part-9")  # left over, as by a process that was killed
    model = Model()
    with optimizer_in(backend, model) as optimizer:
        optimizer.restore()
        train(model, optimizer, 3, seal=False)
        backend.make_dir(f"{TWO}/part-8")
        backend.fail_if(lambda kind, path: kind == "sync" and path.endswith("part.json"))
        with pytest.raises(SealError):
            optimizer.checkpoint().result()
        assert backend.num_failed == 1
        with pytest.warns(RuntimeWarning, match="sealing step 3 failed"):
            optimizer.restore()
        with pytest.warns(RuntimeWarning, match="reuses no slot any more"):
            train(model, optimizer, 3)
        assert contents(backend, f"{TWO}/part-8") == {}
    backend.new_process()
    assert backend.violations == []
    backend.close()
    with open_checkpoint(ONE, backend=backend.inner) as newest:
        assert differences(newest, backend.inner, Reference().after(3)) == []


class TestUnreadableManifest:
    def test_no_sealed_part_is_rewritten_as_long_as_it_is_there(self) -> None:
        backend = store_of_two(keep=3)
        part = f"{TWO}/{part_of(backend, 3)}"
        manifest = f"{ONE}/step-00000003/manifest.json"
        good, before = read(backend, manifest), contents(backend, part)
        overwrite(backend, manifest, b"\0" * 100, 40)
        model = Model()
        with optimizer_in(backend, model, keep=2) as optimizer:
            with pytest.warns(RuntimeWarning, match=r"not using.*step-00000003"):
                assert optimizer.restore().step == 2
            # not step 3, which would take the name of the damaged one
            train(model, optimizer, 3, seal=False)
            train(model, optimizer, 4, 5, 6, 7)
        assert contents(backend, part) == before
        overwrite(backend, manifest, good)
        with open_checkpoint(f"{ONE}/step-00000003", backend=backend) as repaired:
            assert repaired.verify().ok

    def test_it_is_free_when_the_directory_has_gone(self) -> None:
        backend = store_of_two(keep=2)
        remove_tree(backend, f"{ONE}/step-00000002")
        assert_goes_on(backend, 1)
        assert len(parts_in(backend)) == len(slots_in(backend)) <= 3

    def test_the_part_of_a_refused_checkpoint_is_kept(self) -> None:
        backend = store_of_two(keep=3)
        part = f"{TWO}/{part_of(backend, 3)}"
        before = contents(backend, part)
        backend.rename(f"{ONE}/step-00000003/model.safetensors", f"{ONE}/elsewhere")
        model = Model()
        with optimizer_in(backend, model, keep=2) as optimizer:
            with pytest.warns(RuntimeWarning, match=r"model\.safetensors: missing"):
                optimizer.restore()
            train(model, optimizer, 3, seal=False)
            train(model, optimizer, 4, 5, 6, 7)
        assert contents(backend, part) == before
        backend.rename(f"{ONE}/elsewhere", f"{ONE}/step-00000003/model.safetensors")
        with open_checkpoint(f"{ONE}/step-00000003", backend=backend) as repaired:
            assert repaired.verify().ok

    def test_its_part_is_free_when_its_name_is_taken(self) -> None:
        backend = store_of_two(keep=2)
        overwrite(backend, f"{ONE}/step-00000002/manifest.json", b"\0" * 100, 40)
        with pytest.warns(RuntimeWarning, match="not using"):
            assert_goes_on(backend, 1)
        assert len(parts_in(backend)) == len(slots_in(backend)) == 3


class TestByHand:
    def test_the_part_of_an_expired_checkpoint_is_removed_in_mid_run(self) -> None:
        backend, model = MemoryBackend(), Model()
        with optimizer_in(backend, model, keep=2) as optimizer:
            train(model, optimizer, 1, 2)
            remove_tree(backend, f"{TWO}/{part_of(backend, 1)}")
            with pytest.warns(RuntimeWarning, match="a part of its state is missing"):
                train(model, optimizer, 3, 4, 5)
        with open_checkpoint(ONE, backend=backend) as newest:
            assert differences(newest, backend, Reference().after(5)) == []
        assert len(parts_in(backend)) == 3

    def test_the_part_of_a_free_slot_is_removed_in_mid_run(self) -> None:
        """The slot is of no use without it, and its name in the first directory says nothing."""
        backend, model = MemoryBackend(), Model()
        with optimizer_in(backend, model, keep=1) as optimizer:
            train(model, optimizer, 1, 2)
            (free,) = set(parts_in(backend)) - {part_of(backend, 2)}
            remove_tree(backend, f"{TWO}/{free}")
            train(model, optimizer, 3, 4)
        with open_checkpoint(ONE, backend=backend) as newest:
            assert differences(newest, backend, Reference().after(4)) == []
        assert len(parts_in(backend)) == len(slots_in(backend)) == 2

    def test_free_parts_are_reused_and_superfluous_ones_removed(self) -> None:
        backend, model = store_of_two(keep=3), Model()
        with optimizer_in(backend, model, keep=3) as optimizer:
            optimizer.restore()
            train(model, optimizer, 4, seal=False)  # a working slot, left as by a kill
        backend = backend.reopened()
        assert len(parts_in(backend)) == 4
        model = Model()
        with optimizer_in(backend, model, keep=1) as optimizer:
            optimizer.restore()
            train(model, optimizer, 4, 5)
        assert len(parts_in(backend)) == len(slots_in(backend)) == 2
        assert_goes_on(backend.reopened(), 5)


def test_starting_over_keeps_the_old_parts_until_the_new_ones_are_durable() -> None:
    backend = store_of_two()
    model = Model()
    old = f"{TWO}/{part_of(backend, 2)}"
    before = contents(backend, old)
    with optimizer_in(backend, model, fresh=True) as optimizer:
        train(model, optimizer, 1, 2, 3, seal=False)
        assert contents(backend, old) == before
        optimizer.checkpoint({"step": 3}).result()
    assert [info.step for info in list_checkpoints(ONE, backend=backend)] == [3]
    assert len(parts_in(backend)) <= 3


def test_on_the_local_file_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    model = Model()
    with optimizer_for(model, directories, options(drives=DriveTuning(shares=(1, 2)))) as optimizer:
        train(model, optimizer, 1, 2)
        stats = optimizer.stats()
        layout = optimizer._engine.store.newest.manifest.layout
        assert stats.bytes_written >= 2 * layout.state_bytes
    sizes = {
        d.name: sum(f.stat().st_size for f in d.rglob("exp_avg.safetensors")) for d in directories
    }
    assert sizes["two"] > sizes["one"]
    model = Model(history=5)
    with optimizer_for(model, directories, options()) as optimizer:
        assert optimizer.restore().step == 2
        train(model, optimizer, 3)
    assert same_bits(dict(model.state_dict()), Reference().after(3).model)
    (tmp_path / "two").rename(tmp_path / "moved")
    for arguments, status in (
        (["verify", str(tmp_path / "one")], 1),
        (["verify", str(tmp_path / "one"), "--part", str(tmp_path / "moved")], 0),
        (["show", str(tmp_path / "one"), "--part", str(tmp_path / "moved"), "--json"], 0),
        (["ls", str(tmp_path / "one"), "--part", str(tmp_path / "moved"), "--json"], 0),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["offload", *arguments])
            with pytest.raises(SystemExit) as ended:
                main()
        assert (ended.value.code or 0) == status, arguments
        shown = capsys.readouterr().out
    assert all(info["valid"] for info in json.loads(shown))
    assert torch.get_num_threads() == 1
