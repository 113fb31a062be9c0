"""Parts on further drives: which are free, taken, left over or not its own, and what they say."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest

from gds import Backend, MemoryBackend, StorageError
from offload.errors import CheckpointError
from offload.format import document
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.manifest import Manifest
from offload.format.names import SHARD_FOLDER
from offload.format.part_file import PartReference, SealedPart, content_digest, decode_part
from offload.format.shares.owners import OwnerReference
from offload.retention.policy import LastK
from offload.store.poison import Poison
from offload.store.slots.part import open_part
from offload.store.slots.part_pool import PartPool
from offload.store.store import Store
from tests.crash.fault_backend import FaultBackend
from tests.stores.files import everything, remove_tree, write
from tests.stores.training import Model, optimizer_for, options, train

FIRST = "/run"
DRIVES = ["/second", "/third", "/fourth"]
STORE_ID, ANOTHER_ID = "0123456789abcdef" * 2, "f" * 32
ARRAYS = ("master", "exp_avg")
PARAMETER = ParameterSpec("a", "BF16", (90, 100), 0, ARRAYS)
MODEL = (ModelTensor("a", "BF16", (90, 100)),)
GONE = f"{FIRST}/step-00000001"
"""Path of a checkpoint that cannot be used."""


def layout_on(num_drives: int) -> Layout:
    return Layout((PARAMETER,), MODEL, 1024, shares=(1,) * num_drives)


def memory() -> MemoryBackend:
    return MemoryBackend(directories=[FIRST, *DRIVES])


def pool_on(
    backend: Backend,
    num_further: int,
    manifests: Iterable[Manifest] = (),
    claims: Mapping[str, frozenset[int] | None] | None = None,
) -> tuple[PartPool, Layout, Poison]:
    """Return the parts of a store with some further drives, the layout of its slots, its poison."""
    poison = Poison(FIRST)
    drives = [(backend, directory) for directory in DRIVES[:num_further]]
    pool = PartPool(drives, STORE_ID, manifests, claims or {}, poison)
    return pool, layout_on(num_further + 1), poison


def left_over(
    backend: Backend, numbers: Iterable[int], directories: Sequence[str] = DRIVES[:1]
) -> None:
    """Make parts that are not sealed, and that nobody uses."""
    for directory in directories:
        for number in numbers:
            backend.make_dir(f"{directory}/part-{number}")


def seal(backend: Backend, path: str, store_id: str = STORE_ID, generation: int = 7) -> SealedPart:
    """Make a part that says of itself that it is sealed."""
    sealed = SealedPart(store_id, generation, 1, "0" * 32)
    if backend.stat(path) is None:
        backend.make_dir(path)
    write(backend, f"{path}/part.json", sealed.encode())
    return sealed


def manifest_of(*numbers: int, owner: int = 0, digest: str = "a" * 32) -> Manifest:
    """Return the manifest of a checkpoint with a part of each number, or with one of an owner."""
    references = [OwnerReference(owner, FIRST, f"part-{owner}", 7, "b" * 32)] if owner else []
    return Manifest(
        store_id=STORE_ID,
        generation=7,
        step=1,
        created="2026-01-01T00:00:00+00:00",
        torch_version="2.13.0",
        optimizer="torch.optim.adamw.AdamW",
        groups=({"lr": 0.1},),
        layout=layout_on(len(numbers) + 1),
        scalars=(None,),
        digests={},
        model_digests=(),
        parts=tuple(
            PartReference(directory, f"part-{number}", 7, digest)
            for directory, number in zip(DRIVES, numbers, strict=False)
        ),
        owners=tuple(references),
    )


def parts_in(backend: Backend, *directories: str) -> list[list[str]]:
    return [backend.list_dir(directory) for directory in directories or DRIVES]


class TestTaking:
    def test_a_slot_of_several_ranks_has_none(self) -> None:
        backend = memory()
        pool, _, _ = pool_on(backend, 2)
        assert pool.take(layout_on(1)) == ()
        assert parts_in(backend) == [[], [], []]

    def test_the_number_with_the_most_parts_is_reused(self) -> None:
        backend = memory()
        left_over(backend, [1, 2], DRIVES[:1])
        left_over(backend, [2], DRIVES[1:2])
        pool, layout, _ = pool_on(backend, 2)
        assert [part.name for part in pool.take(layout)] == ["part-2", "part-2"]
        assert parts_in(backend, *DRIVES[:2]) == [["part-1", "part-2"], ["part-2"]]

    def test_nothing_is_reused_after_a_failure(self) -> None:
        backend = memory()
        left_over(backend, [1])
        pool, layout, poison = pool_on(backend, 1)
        with pytest.raises(OSError, match="no"), poison.fatal("a sync failed"):
            raise OSError("no")
        assert [part.name for part in pool.take(layout)] == ["part-2"]

    def test_all_that_were_made_are_removed_if_one_cannot_be_made(self) -> None:
        backend = FaultBackend(memory())
        pool, layout, _ = pool_on(backend, 3)
        backend.fail_if(lambda what, path: what == "create" and path.startswith(DRIVES[2]))
        with pytest.raises(StorageError) as failed:
            pool.take(layout)
        assert failed.value.errno == errno.ENOSPC
        assert parts_in(backend) == [[], [], []]

    def test_one_that_was_there_stays_if_another_one_cannot_be_made(self) -> None:
        backend = FaultBackend(memory())
        pool, layout, _ = pool_on(backend, 2)
        pool.put_back(pool.take(layout))
        remove_tree(backend, f"{DRIVES[1]}/part-1")
        before = everything(backend)
        backend.fail_if(lambda what, path: what == "create" and path.startswith(DRIVES[1]))
        with pytest.raises(StorageError):
            pool.take(layout)
        assert everything(backend) == before

    @pytest.mark.parametrize("used", ["by a checkpoint", "by a checkpoint that is refused"])
    def test_a_number_in_use_is_not_taken_although_its_parts_are_missing(self, used: str) -> None:
        is_refused = used.endswith("refused")
        pool, layout, _ = pool_on(
            memory(),
            1,
            [] if is_refused else [manifest_of(1)],
            {GONE: frozenset({1})} if is_refused else None,
        )
        assert [part.name for part in pool.take(layout)] == ["part-2"]

    def test_what_is_no_part_is_left_alone(self) -> None:
        """A directory of another name, and a file that is named like a part."""
        backend = memory()
        backend.make_dir(f"{DRIVES[0]}/owner-1")
        write(backend, f"{DRIVES[0]}/part-1", b"notes")
        before = everything(backend)
        pool, layout, _ = pool_on(backend, 1)
        assert pool.num_free(1) == 0
        assert [part.name for part in pool.take(layout)] == ["part-2"]
        after = everything(backend)
        assert before.items() <= after.items()

    def test_a_directory_that_is_named_as_in_other_slots_is_removed_with_its_part(self) -> None:
        """Slots with a shard of the model have a directory of this name. Parts have none."""
        backend = memory()
        left_over(backend, [1])
        backend.make_dir(f"{DRIVES[0]}/part-1/{SHARD_FOLDER}")
        pool, layout, poison = pool_on(backend, 1)
        assert [part.name for part in pool.take(layout)] == ["part-1"]
        assert SHARD_FOLDER not in backend.list_dir(f"{DRIVES[0]}/part-1")
        assert not poison

    def test_removed_parts_are_gone_from_all_drives_and_their_number_is_free(self) -> None:
        backend = memory()
        pool, layout, _ = pool_on(backend, 2)
        pool.remove(pool.take(layout))
        assert parts_in(backend) == [[], [], []]
        assert [part.name for part in pool.take(layout)] == ["part-1", "part-1"]

    def test_parts_of_all_drives_are_opened(self) -> None:
        backend = memory()
        pool, layout, _ = pool_on(backend, 3)
        pool.put_back(pool.take(layout))
        opened = pool.open(replace(manifest_of(1, 1, 1), layout=layout), writable=False)
        assert [part.path for part in opened] == [f"{d}/part-1" for d in DRIVES]


class TestOfRanks:
    def test_a_checkpoint_of_several_ranks_has_no_parts_here(self) -> None:
        """What one process had on further drives before is not the state of any owner."""
        backend = memory()
        left_over(backend, [1])
        pool, _, _ = pool_on(backend, 1)
        manifest = manifest_of(owner=1)
        assert pool.open(manifest, writable=False) == ()
        assert pool.all_exist(manifest)
        assert pool.ids(manifest) == {}


class TestUnusable:
    def test_what_it_named_before_and_names_now_is_kept_until_it_has_gone(self) -> None:
        backend = memory()
        left_over(backend, [1, 2, 3])
        pool, _, _ = pool_on(backend, 1, [manifest_of(1)])
        assert pool.num_free(1) == 2
        pool.claim(GONE, manifest_of(1), manifest_of(2))
        assert pool.num_free(1) == 1
        pool.release_claim(GONE)
        assert pool.num_free(1) == 3

    @pytest.mark.parametrize("is_replaced", [False, True])
    def test_parts_of_other_owners_are_kept_as_well(self, is_replaced: bool) -> None:
        pool, _, _ = pool_on(memory(), 0)
        found = manifest_of(owner=2) if is_replaced else None
        pool.claim(GONE, manifest_of(owner=1), found)
        named = pool.owners.named([])
        assert named.names == {
            1: {"part-1"},
            **({2: {"part-2"}} if is_replaced else {}),
        }
        pool.release_claim(GONE)
        assert pool.owners.named([]).names == {}


class TestTrimming:
    def test_the_lowest_numbers_stay_on_every_drive(self) -> None:
        """And no more of them than there will be slots, with those that are in use."""
        backend = memory()
        left_over(backend, [33, 5, 2, 17], DRIVES[:2])
        pool, layout, _ = pool_on(backend, 2)
        assert pool.take(layout)[0].name == "part-2"
        pool.trim(2)
        assert parts_in(backend, *DRIVES[:2]) == [["part-2", "part-5"]] * 2
        pool.trim(0)
        assert parts_in(backend, *DRIVES[:2]) == [["part-2"]] * 2

    @pytest.mark.parametrize("what", ["trim", "remove_leftovers"])
    def test_nothing_is_removed_after_a_failure(self, what: str) -> None:
        backend = memory()
        left_over(backend, [1, 2])
        pool, _, poison = pool_on(backend, 1)
        with pytest.raises(OSError, match="no"), poison.fatal("a sync failed"):
            raise OSError("no")
        pool.trim(0) if what == "trim" else pool.remove_leftovers()
        assert parts_in(backend, DRIVES[0]) == [["part-1", "part-2"]]

    def test_all_leftovers_are_removed(self) -> None:
        backend = memory()
        left_over(backend, [1, 2], DRIVES[:2])
        pool, _, _ = pool_on(backend, 2)
        pool.remove_leftovers()
        assert parts_in(backend) == [[], [], []]


class TestLeftovers:
    def test_they_are_found_on_all_drives_in_order(self) -> None:
        backend = memory()
        left_over(backend, [33, 2], DRIVES[:2])
        seal(backend, f"{DRIVES[1]}/part-40")
        seal(backend, f"{DRIVES[1]}/part-9")
        pool, _, _ = pool_on(backend, 2)
        found = pool.leftovers()
        assert [path for _, path in found.removable] == [
            f"{directory}/part-{number}" for directory in DRIVES[:2] for number in (2, 33)
        ]
        assert found.unnamed == [f"{DRIVES[1]}/part-9", f"{DRIVES[1]}/part-40"]
        assert found.generations == dict.fromkeys(found.unnamed, 7)

    def test_what_is_being_written_is_none(self) -> None:
        backend = memory()
        pool, layout, _ = pool_on(backend, 1)
        pool.take(layout)
        assert pool.leftovers().removable == []
        pool.remove_leftovers()
        assert parts_in(backend, DRIVES[0]) == [["part-1"]]

    def test_parts_of_another_store_are_none(self) -> None:
        backend = memory()
        path = f"{DRIVES[0]}/part-1"
        seal(backend, path, ANOTHER_ID)
        pool, _, _ = pool_on(backend, 1)
        found = pool.leftovers()
        assert (found.removable, found.unnamed, found.generations) == ([], [], {})
        assert pool.foreign() == [path]
        assert pool.num_free(1) == 0

    def test_they_are_its_own_once_it_has_taken_that_store_over(self) -> None:
        backend = memory()
        path = f"{DRIVES[0]}/part-1"
        seal(backend, path, ANOTHER_ID)
        pool, _, _ = pool_on(backend, 1)
        pool.take_over(ANOTHER_ID)
        assert pool.foreign() == []
        assert pool.num_free(1) == 1
        assert pool.leftovers().unnamed == [path]

    def test_parts_of_all_withdrawals_that_were_cut_off_are_removed(self) -> None:
        """The names of the slots were durable, and nothing had been overwritten."""
        backend, model = MemoryBackend(), Model()
        directories = [FIRST, *DRIVES[:2]]
        with optimizer_for(model, directories, options(backend), keep=3) as optimizer:
            train(model, optimizer, 1, 2, 3)
        backend = backend.reopened()
        for step in (1, 2):
            backend.rename(f"{FIRST}/step-{step:08d}", f"{FIRST}/.slot-{90 + step}")
        store = Store(
            backend,
            FIRST,
            [(backend, directory) for directory in DRIVES[:2]],
            keep=LastK(3),
            train_state_bytes=0,
            allow_volatile=True,
        )
        store.prune()
        kept = [part.name for part in store.checkpoints[0].manifest.parts]
        for directory, name in zip(DRIVES, kept, strict=False):
            assert [n for n in backend.list_dir(directory) if n.startswith("part-")] == [name]
        assert store.leftovers()[1].unnamed == []
        store.close()


class TestFiles:
    def test_a_part_whose_file_was_replaced_is_not_in_its_place(self) -> None:
        backend = memory()
        pool, layout, _ = pool_on(backend, 1)
        (part,) = pool.take(layout)
        assert part.is_in_place()
        name = f"{part.path}/master.safetensors"
        size = part.array("master").size_bytes
        backend.remove(name)
        assert not part.is_in_place()
        backend.create(name, size).close()
        assert not part.is_in_place()

    def test_all_files_of_a_part_are_closed(self) -> None:
        """A file that has been removed takes its space as long as it is open."""
        backend = MemoryBackend(directories=DRIVES[:1], capacity_bytes=1 << 20)
        pool, layout, _ = pool_on(backend, 1)
        (part,) = pool.take(layout)
        remove_tree(backend, part.path)
        assert backend.free_bytes(DRIVES[0]) < 1 << 20
        part.close()
        assert backend.free_bytes(DRIVES[0]) == 1 << 20

    @pytest.mark.parametrize("name", ["part.json", "exp_avg.safetensors"])
    def test_a_part_without_one_of_its_files_is_not_opened(self, name: str) -> None:
        backend = memory()
        pool, layout, _ = pool_on(backend, 1)
        (part,) = pool.take(layout)
        part.close()
        backend.remove(f"{part.path}/{name}")
        with pytest.raises(StorageError) as failed:
            open_part(backend, part.directory, part.name, layout, 1, writable=False)
        assert failed.value.errno == errno.ENOENT
        assert failed.value.filename == f"{part.path}/{name}"


class TestWhatAPartSays:
    def test_its_content_is_that_of_its_own_chunks(self) -> None:
        layout, rng = layout_on(3), random.Random(20261128)
        digests = {
            name: [f"{rng.getrandbits(64):016x}" for _ in range(layout.num_chunks)]
            for name in layout.array_names
        }
        before = [content_digest(layout, digests, drive) for drive in range(3)]
        assert len(set(before)) == 3
        digests["exp_avg"][layout.drives.index(1)] = "0" * 16
        after = [content_digest(layout, digests, drive) for drive in range(3)]
        assert [a == b for a, b in zip(after, before, strict=True)] == [True, False, True]

    @pytest.mark.parametrize("value", [0, (1 << 63) - 1])
    def test_the_largest_generation_is_read(self, value: int) -> None:
        sealed = SealedPart(STORE_ID, value, 1, "0" * 32)
        assert decode_part(sealed.encode(), "part.json") == sealed

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("store_id", 5),
            ("store_id", None),
            ("store_id", "f" * 31),
            ("content", ["0" * 32]),
            ("generation", "7"),
            ("generation", None),
            ("generation", True),
            ("generation", 7.0),
            ("generation", -1),
            ("generation", 1 << 63),
            ("drive", False),
            ("drive", -1),
        ],
    )
    def test_a_field_of_another_kind_is_refused(self, field: str, value: object) -> None:
        body = {"store_id": STORE_ID, "generation": 7, "drive": 1, "content": "0" * 32}
        data = document.signed(1, {**body, field: value})
        with pytest.raises(CheckpointError, match=r"/second/part-1/part\.json: not a part's file"):
            decode_part(data, "/second/part-1/part.json")
