"""A store on two drives: parts missing, moved, swapped, shared or full, and who may touch them."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gds import Backend, MemoryBackend, WrapperBackend
from offload import AdamW, DriveTuning, list_checkpoints, load_parameters, open_checkpoint
from offload.errors import (
    CheckpointError,
    SlotFullError,
    StoreError,
    StoreFullError,
    StoreLockedError,
)
from tests.crash.crash_backend import CrashBackend
from tests.crash.fault_backend import FaultBackend
from tests.stores.files import contents, everything, overwrite, read, remove_tree, write
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


def copied(source: Backend, path: str, target: Backend, new: str) -> None:
    """Copy a directory of files, from one backend to another or within one."""
    target.make_dir(new)
    for name, data in contents(source, path).items():
        write(target, f"{new}/{name}", data)


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


def damage_stale(backend: Backend, part: str) -> None:
    """Put what another checkpoint has in its place."""
    for name, data in contents(backend, f"{TWO}/{part_of(backend, 1)}").items():
        overwrite(backend, f"{part}/{name}", data)


def damage_invalid(backend: Backend, part: str) -> None:
    overwrite(backend, f"{part}/part.json", b'{"format": 1, "invalid": "x"}'.ljust(4095) + b"\n")


def damage_edited(backend: Backend, part: str) -> None:
    text = read(backend, f"{part}/part.json")
    overwrite(backend, f"{part}/part.json", text.replace(b'"drive": 1', b'"drive": 2'))


DAMAGES: dict[str, tuple[Callable[[Backend, str], None], str]] = {
    "deleted": (remove_tree, "is missing"),
    "of another generation": (damage_stale, "is not the part that was sealed with it"),
    "not sealed": (damage_invalid, "not sealed"),
    "garbage": (lambda b, p: overwrite(b, f"{p}/part.json", b"\xff" * 64), "not a part's file"),
    "edited": (damage_edited, "does not match its digest"),
    "without a file": (
        lambda b, p: b.remove(f"{p}/exp_avg.safetensors"),
        "exp_avg.safetensors: missing",
    ),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_checkpoint_with_a_damaged_part_is_passed_over_with_the_reason(
    damage: Callable[[Backend, str], None], reason: str
) -> None:
    """Its parameters can still be loaded: no part has any of them."""
    backend, model = store_of_two(keep=3), Model(history=5)
    damage(backend, f"{TWO}/{part_of(backend, 3)}")
    assert load_parameters(model, ONE, backend=backend) == 3
    assert same_bits(dict(model.state_dict()), Reference().after(3).model)
    assert [i.valid for i in list_checkpoints(ONE, backend=backend)] == [True, True, False]
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(f"{ONE}/step-00000003", backend=backend)
    with pytest.warns(RuntimeWarning, match=f"not using.*step-00000003.*{reason}"):
        assert_goes_on(backend, 2)
    assert len(parts_in(backend)) <= 4, "the refused one, two that are kept, and the next"


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
        with pytest.raises(CheckpointError, match=f"{TWO} has no parts") as caught:
            open_checkpoint(f"{ONE}/step-00000002", backend=backend)
        assert "directory=[...]" in str(caught.value)
        assert "parts=[...]" in str(caught.value)
        backend.make_dir("/none")
        assert load_parameters(Model(), ONE, parts=["/none", "/b/run"], backend=backend) == 2
        with open_checkpoint(ONE, parts=["/b/run"], backend=backend) as newest:
            assert newest.step == 2
            assert newest.verify().ok
        assert [i.valid for i in list_checkpoints(ONE, backend=backend)] == [False, False]
        infos = list_checkpoints(ONE, parts=["/b/run"], backend=backend)
        assert [info.valid for info in infos] == [True, True]
        with pytest.raises(CheckpointError, match="2 directories were given"):
            open_checkpoint(f"{ONE}/step-00000002", parts=["/b/run", "/c"], backend=backend)


class TestDirectories:
    @pytest.mark.parametrize(
        ("given", "fresh"),
        [([ONE], False), ([ONE, TWO, "/third"], True)],
        ids=["fewer, to resume", "more, to begin anew"],
    )
    def test_another_number_is_refused(self, given: list[str], fresh: bool) -> None:
        backend = store_of_two()
        with pytest.raises(StoreError, match="spread over 2 directories") as caught:
            optimizer_in(backend, Model(), given, fresh=fresh)
        assert f"pass directory={BOTH!r}" in str(caught.value)
        assert f"{len(given)} were given" in str(caught.value)
        assert_goes_on(backend, 2)

    def test_further_ones_in_another_order_are_refused_with_the_right_one(self) -> None:
        backend, model, right = MemoryBackend(), Model(), [*BOTH, "/third"]
        with optimizer_in(backend, model, right) as optimizer:
            train(model, optimizer, 1, 2)
        before = everything(backend)
        with pytest.raises(StoreError, match=r"is number 3 of this store.*given as number 2") as e:
            optimizer_in(backend, Model(), [ONE, "/third", TWO])
        assert f"pass directory={right!r}" in str(e.value)
        assert everything(backend) == before
        assert_goes_on(backend, 2, right)

    def test_what_makes_no_sense_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path)
        for given in ([tmp_path, tmp_path / "link"], [tmp_path / "a", f"{tmp_path}/b/../a"]):
            with pytest.raises(ValueError, match="names the same directory twice"):
                optimizer_for(Model(), given, options())
        with pytest.raises(ValueError, match="at least one"):
            optimizer_for(Model(), [], options())
        tuning = DriveTuning(shares=(1, 2, 3))
        with pytest.raises(ValueError, match="got 3 for 2"):
            optimizer_for(Model(), BOTH, options(MemoryBackend(), drives=tuning))

    def test_one_is_locked_whatever_its_number(self) -> None:
        backend = MemoryBackend(directories=[ONE, "/third"])
        for others in (["/other", TWO], [TWO, "/third"]):
            with optimizer_in(backend, Model(), others):
                with pytest.raises(StoreLockedError, match=TWO):
                    optimizer_in(backend, Model())
                backend.lock(f"{ONE}/LOCK").release()  # given back when the second was refused


class _Room(WrapperBackend):
    """As much space in each directory as the test says."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.free: dict[str, int] = {}

    def free_bytes(self, directory: str) -> int:
        return self.free.get(directory, super().free_bytes(directory))


class TestFull:
    @pytest.mark.parametrize("directory", BOTH)
    def test_found_at_construction(self, directory: str) -> None:
        backend = _Room(MemoryBackend())
        backend.free[directory] = 20_000
        with pytest.raises(StoreFullError, match="keeping 2 checkpoints needs 3 more") as caught:
            optimizer_in(backend, Model(), keep=2)
        assert caught.value.filename == directory
        assert slots_in(backend) == parts_in(backend) == []

    @pytest.mark.parametrize(
        ("first", "second", "named"),
        [(1 << 30, 9, [TWO]), (0, 1 << 30, [ONE]), (1, 2, BOTH)],
    )
    def test_the_error_of_a_step_names_the_directories_that_are_full(
        self, first: int, second: int, named: list[str]
    ) -> None:
        backend, model = _Room(FaultBackend(MemoryBackend())), Model()
        with optimizer_in(backend, model) as optimizer:
            backend.free = {ONE: first, TWO: second}
            backend.inner.fail_if(lambda kind, _: kind == "create", errno.EDQUOT)
            backward(model, 1)
            with pytest.raises(SlotFullError, match=r"(?i)quota") as full:
                optimizer.step()
            assert (full.value.errno, full.value.filename) == (errno.EDQUOT, named[0])
            assert str(full.value).count(" free)") == len(named)
            optimizer.step()


class TestOrder:
    """What `docs/evidence.md` says about the order of writes, on the log of a run."""

    @pytest.fixture
    def log(self) -> list[str]:
        backend, model = CrashBackend(), Model()
        with optimizer_in(backend, model, keep=1) as optimizer:
            train(model, optimizer, 1, 2, 3)
        return [str(op) for op in backend.log]

    def test_parts_are_sealed_before_the_rename(self, log: list[str]) -> None:
        commit = next(n for n, op in enumerate(log) if "to /first/run/step-00000001" in op)
        own = [n for n, op in enumerate(log[:commit]) if "part-1/part.json" in op]
        data = [n for n, op in enumerate(log[:commit]) if TWO in op and ".safetensors" in op]
        assert log[own[-1]].startswith("sync ")
        assert log[own[-2]].startswith("write ")
        assert max(data) < own[-2], "written, then synced, before the part says that it is whole"
        assert f"sync_dir {TWO}/part-1" in log[own[-1] : commit]
        assert f"sync_dir {TWO}" in log[own[-1] : commit]

    def test_withdrawn_in_the_first_directory_first(self, log: list[str]) -> None:
        withdrawn = next(
            n for n, op in enumerate(log) if op.startswith("rename /first/run/step-00000001 to")
        )
        slot, later = log[withdrawn].split()[-1], log[withdrawn + 1 :]
        assert later[0] == f"sync_dir {ONE}"
        assert later[1].startswith(f"write {slot}/manifest.json")
        assert later[2] == f"sync {slot}/manifest.json"
        assert later[3].startswith(f"write {TWO}/part-1/part.json")
        assert later[4] == f"sync {TWO}/part-1/part.json"
        before = [op for op in log[:withdrawn] if "part-1" in op]
        assert before[-1] == f"sync_dir {TWO}/part-1", "sealed, and not touched until then"
        assert any(op.startswith(f"write {TWO}/part-1/exp_avg") for op in later[5:])

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
