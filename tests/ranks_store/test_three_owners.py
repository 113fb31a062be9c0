"""Readers of a store that three ranks have made: each of the parts counts, and not only the first.

Each rank has a directory of its own. Whether a reader sees it is decided by renaming it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count

import pytest

from gds import Backend, File, LockHeldError, MemoryBackend, WrapperBackend
from gds.backends.wrapper import WrapperFile
from gds.contract import Stat
from offload import Checkpoint, list_checkpoints, open_checkpoint
from offload.checkpoint.checkpoint import require_one_owner
from offload.checkpoint.listing import list_unnamed_parts
from offload.checkpoint.opening import open_for_parameters
from offload.checkpoint.sealed_slot import SealedOwner, SealedRange, SealedSlot
from offload.checkpoint.verify import VerifyReport
from offload.errors import CheckpointError, UnreadableError
from offload.format.boxes import Box, Cut
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.manifest import Manifest, num_model_blocks
from offload.format.shares.owners import (
    MODEL_PIECE_BYTES,
    ModelBox,
    num_pieces,
    parameter_boxes,
)
from offload.format.shares.part_table import OwnerTable
from offload.format.shares.rank_states import join_ranks
from offload.format.train_state import encode
from offload.retention.policy import LastK
from offload.store.owners.store import OwnerStore
from offload.store.poison import Poison
from offload.store.quarantine import write_quarantine
from offload.store.sealing import compose
from offload.store.shared import SharedStore
from offload.store.slots.slot import Slot
from offload.store.store import Store
from tests.crash.fault_backend import FaultBackend
from tests.ranks_store.job import ARRAYS, MODEL, model_bytes, rows, write_state
from tests.ranks_store.synthetic import manifest_of, reference_to, sharded, table_of
from tests.stores.files import contents, overwrite, remove_tree, write
from tests.stores.small import STORE as OF_ONE_PROCESS
from tests.stores.small import memory_store

FIRST, TWO, THREE = DIRECTORIES = ("/one/run", "/two/run", "/three/run")
"""The store's directory on the node of each owner."""

NEWEST = f"{FIRST}/step-00000002"

LAYOUTS = (
    Layout((rows("embed", 0, 30), ParameterSpec("norm", "BF16", (300,), 0, ARRAYS)), MODEL, 1024),
    Layout((rows("embed", 30, 70), rows("head", 0, 25)), MODEL, 1024),
    Layout((rows("embed", 70, 90), rows("head", 25, 40)), MODEL, 1024),
)
SCALARS = tuple(((("step", "f32", 1.0),),) * len(layout.parameters) for layout in LAYOUTS)


def write_boxes(slot: Slot, layout: Layout, step: int) -> list[ModelBox]:
    """Write what an owner steps into the common file of the model; return it for the table."""
    header, data, found = slot.layout.model_header, model_bytes(step), []
    tensors = {tensor.name: tensor for tensor in MODEL}
    for name, box in parameter_boxes(layout):
        one = ModelBox(name, box, ())
        first, last = (header.entries[name].start + n for n in one.byte_range(tensors[name]))
        slot.model.write_bytes(data[first:last], header.data_start + first)
        digest = slot.context.digest(one.digest_array, 0, memoryview(data)[first:last])
        found.append(replace(one, digests=(digest,)))
    return found


def seal(store: Store, owners: list[OwnerStore], step: int) -> None:
    """Take a step and seal it. The train state of each rank is its number."""
    slot = store.acquire(LAYOUTS[0], 1)
    generation = slot.context.generation
    parts = [
        owner.ready(layout, generation, store.named_parts(), written=())
        for owner, layout in zip(owners, LAYOUTS[1:], strict=True)
    ]
    for number, files in enumerate((slot, *parts)):
        write_state(files, number, step)
    composition = compose(
        slot,
        join_ranks([encode({"rank": rank}) for rank in range(3)]),
        step=step,
        torch_version="2.13.0",
        optimizer="torch.optim.adamw.AdamW",
        groups=[{"lr": 0.1}],
        scalars=SCALARS[0],
        order=None,
        owners=dict(enumerate(DIRECTORIES[1:], 1)),
        model_boxes=parameter_boxes(LAYOUTS[0]),
    )
    store.sealing.begin(composition.manifest)
    boxes = [write_boxes(slot, layout, step) for layout in LAYOUTS]
    references = [
        owner.prepare(part, scalars, written)
        for owner, part, scalars, written in zip(owners, parts, SCALARS[1:], boxes[1:], strict=True)
    ]
    prepared = store.sealing.prepare(slot, composition, (), owners=references, model_boxes=boxes[0])
    store.sealing.publish(prepared)
    store.sealing.end()
    for owner, part in zip(owners, parts, strict=True):
        owner.published(part)
        owner.release(part)


def made(num_steps: int = 2) -> MemoryBackend:
    """Return the files of a store with checkpoints of steps 1, 2, ..., whose job has ended."""
    backend = MemoryBackend()
    shared = SharedStore(dict(enumerate(DIRECTORIES[1:], 1)), {1: {}, 2: {}})
    with ExitStack() as job:
        store = Store(
            backend, FIRST, keep=LastK(num_steps), train_state_bytes=8192, allow_volatile=True,
            shared=shared,
        )  # fmt: skip
        job.callback(store.close)
        owners = []
        for number, directory in enumerate(DIRECTORIES[1:], 1):
            owner = OwnerStore(
                backend, directory, number, store_id=store.store_id, allow_volatile=True
            )
            job.callback(owner.close)
            owners.append(owner)
        for step in range(1, num_steps + 1):
            seal(store, owners, step)
    return backend.reopened()


def parts_of(backend: Backend, path: str = NEWEST) -> list[str]:
    """Return the paths of the parts of a checkpoint."""
    with open_checkpoint(path, backend=backend) as opened:
        return [owner.path for owner in opened.owners]


class Tracking(WrapperBackend):
    """Knows which files are open."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.opened: list[str] = []

    def wrap_file(self, file: File) -> File:
        self.opened.append(file.path)
        return _Tracked(file, self.opened)


class _Tracked(WrapperFile):
    def __init__(self, inner: File, opened: list[str]) -> None:
        super().__init__(inner)
        self._opened, self._is_closed = opened, False

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._opened.remove(self.path)
        super().close()


class TestOpening:
    def test_an_open_checkpoint_keeps_every_part_until_it_is_closed(self) -> None:
        backend = made()
        every = [NEWEST, *parts_of(backend)]
        assert len(every) == 3
        with open_checkpoint(NEWEST, backend=backend):
            for path in every:
                with pytest.raises(LockHeldError):
                    backend.lock(path)
        for path in every:
            backend.lock(path).release()

    def test_parameters_are_opened_without_the_parts(self) -> None:
        backend = made()
        remove_tree(backend, parts_of(backend)[0])
        with open_for_parameters(NEWEST, backend=backend) as opened:
            assert opened.step == 2
        with pytest.raises(CheckpointError, match="part of owner 1"):
            open_checkpoint(NEWEST, backend=backend)

    def test_what_reads_one_process_only_refuses_it(self) -> None:
        with (
            open_checkpoint(NEWEST, backend=made()) as opened,
            pytest.raises(CheckpointError, match="its state has 3 owners"),
        ):
            require_one_owner(opened)
        with open_checkpoint(OF_ONE_PROCESS, backend=memory_store()) as opened:
            require_one_owner(opened)


class TestVerifying:
    def test_every_byte_of_every_owner_is_verified_and_counted(self) -> None:
        backend = made()
        parts = parts_of(backend)
        with open_checkpoint(NEWEST, backend=backend) as opened:
            report = opened.verify()
            assert report.ok
            assert report.whole_parts == tuple(parts)
            state = sum(layout.state_bytes for layout in LAYOUTS)
            assert report.bytes_checked == state + sum(tensor.nbytes for tensor in MODEL)
            expected = contents(backend, NEWEST)
            for part in parts:
                found = contents(backend, part)
                expected |= {f"{part}/{name}": data for name, data in found.items()}
            assert opened.files == {name: len(data) for name, data in expected.items()}
            assert opened.marked_parts == []

    def test_the_parts_that_are_seen_are_enough(self) -> None:
        """What another node has is neither a fault nor whole: it is not looked at."""
        backend = made()
        parts = parts_of(backend)
        backend.rename("/three", "/elsewhere")
        with open_checkpoint(NEWEST, backend=backend) as opened:
            report = opened.verify()
        assert report.problems == ()
        assert report.not_seen == (parts[1],)
        assert report.whole_parts == (parts[0],)

    @pytest.mark.parametrize("owner", [1, 2])
    def test_a_part_that_is_damaged_after_opening_is_found(self, owner: int) -> None:
        backend = made()
        parts = parts_of(backend)
        with open_checkpoint(NEWEST, backend=backend) as opened:
            overwrite(backend, f"{parts[owner - 1]}/table.json", b"{{{")
            report = opened.verify()
            assert opened.quarantined == ""
        assert len(report.problems) == 1
        assert parts[owner - 1] in report.problems[0]
        assert report.not_marked == report.problems, "the first directory has no damage"
        assert report.whole_parts == (parts[2 - owner],)

    @pytest.mark.parametrize("owner", [1, 2])
    def test_a_part_that_cannot_be_read_is_not_called_damaged(self, owner: int) -> None:
        backend = FaultBackend(made())
        parts = parts_of(backend)
        table = f"{parts[owner - 1]}/table.json"
        with open_checkpoint(NEWEST, backend=backend) as opened:
            backend.fail_if(lambda kind, path: (kind, path) == ("open", table))
            report = opened.verify()
        assert backend.num_failed == 1
        self._assert_unreadable(report, parts[owner - 1], parts[2 - owner])

    @pytest.mark.parametrize("owner", [1, 2])
    def test_state_that_cannot_be_read_is_not_called_damaged(self, owner: int) -> None:
        backend = FaultBackend(made())
        parts = parts_of(backend)
        array = f"{parts[owner - 1]}/exp_avg.safetensors"
        with open_checkpoint(NEWEST, backend=backend) as opened:
            backend.fail_if(lambda kind, path: (kind, path) == ("read", array))
            report = opened.verify()
        assert backend.num_failed == 1
        self._assert_unreadable(report, parts[owner - 1], parts[2 - owner])

    @staticmethod
    def _assert_unreadable(report: VerifyReport, part: str, other: str) -> None:
        assert (report.problems, report.not_marked, report.damaged_parts) == ((), (), ())
        assert len(report.unreadable) == 1
        assert part in report.unreadable[0]
        assert report.whole_parts == (other,)

    def test_the_files_of_one_part_are_open_at_a_time(self) -> None:
        """There may be as many owners as there are ranks."""
        backend = Tracking(made())
        parts = parts_of(backend)
        seen: list[set[str]] = []

        def look(checked: int, total: int) -> None:
            seen.append({posixpath.dirname(path) for path in backend.opened} & {*parts})

        with open_checkpoint(NEWEST, backend=backend) as opened:
            assert opened.verify(look).ok
        assert {*map(len, seen)} == {0, 1}
        assert set.union(*seen) == {*parts}
        assert backend.opened == []

    def test_the_mark_of_a_part_counts_where_it_is_seen(self) -> None:
        backend = made()
        parts = parts_of(backend)
        write_quarantine(backend, parts[1], "read twice", Poison(parts[1]))
        with open_checkpoint(NEWEST, even_quarantined=True, backend=backend) as opened:
            assert opened.marked_parts == [parts[1]]
            assert opened.quarantined == "read twice"
        # The caller says where the parts of this store are, and this one is in none of these.
        with open_checkpoint(NEWEST, parts=[TWO], backend=backend) as opened:
            assert [owner.table is None for owner in opened.owners] == [False, True]
            assert opened.marked_parts == []
            assert opened.quarantined == ""


class Vanishing(WrapperBackend):
    """Recycles a checkpoint and removes a part of it before a look at the part's table."""

    def __init__(self, inner: Backend, part: str, look: int) -> None:
        super().__init__(inner)
        self._part, self._look = part, look
        self.num_looks = 0

    def stat(self, path: str) -> Stat | None:
        if path == f"{self._part}/table.json":
            self.num_looks += 1
            if self.num_looks == self._look:
                self.inner.rename(NEWEST, f"{FIRST}/.slot-9")
                remove_tree(self.inner, self._part)
        return super().stat(path)


class TestListing:
    def test_one_whose_part_goes_at_any_look_is_left_out(self) -> None:
        for look in count(1):
            inner = made()
            backend = Vanishing(inner, parts_of(inner)[1], look)
            found = list_checkpoints(FIRST, backend=backend)
            if backend.num_looks < look:
                break
            assert [(info.step, info.valid) for info in found] == [(1, True)], f"look {look}"
        assert look > 5
        assert [(info.step, info.valid) for info in found] == [(1, True), (2, True)]

    @pytest.fixture
    def backend(self) -> MemoryBackend:
        """A store whose first checkpoint has gone without its parts."""
        backend = made()
        self.left = parts_of(backend, f"{FIRST}/step-00000001")
        remove_tree(backend, f"{FIRST}/step-00000001")
        return backend

    def test_parts_that_no_checkpoint_names_are_found_where_one_looks(
        self, backend: MemoryBackend
    ) -> None:
        assert list_unnamed_parts(FIRST, backend=backend) == []
        assert list_unnamed_parts(FIRST, parts=[TWO], backend=backend) == self.left[:1]
        assert list_unnamed_parts(FIRST, parts=[TWO, THREE], backend=backend) == self.left

    def test_parts_of_another_store_are_none_of_them(self, backend: MemoryBackend) -> None:
        other = made(1)
        (source, _) = parts_of(other, f"{FIRST}/step-00000001")
        for name in ("owner-3", "owner-3/part-1"):
            backend.make_dir(f"{TWO}/{name}")
        for name, data in contents(other, source).items():
            write(backend, f"{TWO}/owner-3/part-1/{name}", data)
        assert list_unnamed_parts(FIRST, parts=[TWO], backend=backend) == self.left[:1]

    def test_a_checkpoint_that_cannot_be_understood_may_name_any(
        self, backend: MemoryBackend
    ) -> None:
        overwrite(backend, f"{NEWEST}/manifest.json", b"{{{")
        assert list_unnamed_parts(FIRST, parts=[TWO, THREE], backend=backend) == []

    @pytest.mark.parametrize("directory", [FIRST, f"{TWO}/owner-1"])
    def test_a_directory_that_cannot_be_read_is_said_to_be(
        self, backend: MemoryBackend, directory: str
    ) -> None:
        faulty = FaultBackend(backend)
        faulty.fail_if(lambda kind, path: (kind, path) == ("list_dir", directory))
        with pytest.raises(UnreadableError, match="could not be read"):
            list_unnamed_parts(FIRST, parts=[TWO], backend=faulty)


class TestTrainStates:
    @pytest.mark.parametrize(
        ("rank", "num_ranks", "expected"),
        [(0, 3, 0), (1, 3, 1), (2, 3, 2), (0, 1, 0), (1, 2, 0), (3, 4, 0)],
    )
    def test_a_rank_gets_its_own_if_as_many_run_and_else_that_of_the_first(
        self, rank: int, num_ranks: int, expected: int
    ) -> None:
        backend = made(1)
        path = f"{FIRST}/step-00000001"
        with open_checkpoint(path, backend=backend) as opened:
            manifest = opened.manifest
            assert opened.train_states == [{"rank": n} for n in range(3)]
        found = Checkpoint(backend, path, manifest, rank=rank, num_ranks=num_ranks)
        assert found.train_state == {"rank": expected}

    def test_it_is_read_once(self) -> None:
        backend = made(1)
        path = f"{FIRST}/step-00000001"
        with open_checkpoint(path, backend=backend) as opened:
            first = opened.train_state
            backend.remove(f"{path}/train_state.safetensors")
            assert opened.train_state is first


PIECE = MODEL_PIECE_BYTES // 2
"""Elements of one piece of a tensor in bf16."""


def cut_rows(shape: tuple[int, int], start: int, stop: int, dtype: str = "BF16") -> ParameterSpec:
    """Return rows of the parameter ``w``."""
    box = Box((start, 0), (stop - start, shape[1]))
    return ParameterSpec("w", dtype, box.sizes, 0, ARRAYS, Cut(shape, box))


def with_boxes(layout: Layout) -> tuple[ModelBox, ...]:
    """Return what an owner writes of the model, with a digest for each piece that says which."""
    return tuple(
        ModelBox(
            name, box, tuple(f"{piece:016x}" for piece in range(num_pieces(2 * box.num_elements)))
        )
        for name, box in parameter_boxes(layout)
    )


def of_three(shape: tuple[int, int], *stops: int) -> tuple[Manifest, list[OwnerTable]]:
    """Return manifest and tables of a model of one large tensor, whose rows three owners have."""
    model = (ModelTensor("w", "BF16", shape),)
    starts = (0, *stops[:-1])
    layouts = [
        Layout((cut_rows(shape, a, b),), model, 1 << 24) for a, b in zip(starts, stops, strict=True)
    ]
    references = [reference_to(1), reference_to(2)]
    manifest = replace(manifest_of(references, layouts[0]), model_boxes=with_boxes(layouts[0]))
    tables = [
        replace(table_of(owner, layout), model_boxes=with_boxes(layout))
        for owner, layout in enumerate(layouts[1:], 1)
    ]
    return manifest, tables


def assert_covered(found: list[SealedRange], start: int, stop: int) -> None:
    """Check that ranges follow each other from the first to the last byte."""
    for sealed in found:
        assert sealed.offset == start
        assert 0 < sealed.nbytes <= MODEL_PIECE_BYTES
        start += sealed.nbytes
    assert start == stop


def of_model(found: Iterator[SealedRange]) -> list[SealedRange]:
    return [sealed for sealed in found if sealed.array.startswith("model")]


class TestRanges:
    """Which bytes have which digest, without files: real models have more than one piece."""

    def test_the_boxes_of_all_owners_are_all_of_the_model(self) -> None:
        shape = (6, 3 * PIECE // 4)  # two rows are a piece and a half
        manifest, tables = of_three(shape, 2, 5, 6)
        header = manifest.layout.model_header
        slot = SealedSlot(MemoryBackend(), "/x", (), manifest, tables)
        found = [*slot.model_ranges()]
        assert_covered(found, header.data_start, header.file_bytes)
        assert [sealed.index for sealed in found] == [0, 1, 0, 1, 2, 0]
        assert [int(sealed.digest, 16) for sealed in found] == [0, 1, 0, 1, 2, 0]
        assert len({sealed.array for sealed in found}) == 3

    def test_the_blocks_of_one_process_are_all_of_the_model(self) -> None:
        model = (ModelTensor("w", "BF16", (5, PIECE // 2)),)
        layout = Layout((ParameterSpec("w", "BF16", (5, PIECE // 2), 0, ARRAYS),), model, 1 << 24)
        digests = tuple(f"{n:016x}" for n in range(num_model_blocks(layout)))
        manifest = replace(manifest_of([], layout), model_digests=digests, model_boxes=())
        header = layout.model_header
        found = [*SealedSlot(MemoryBackend(), "/x", (), manifest).model_ranges()]
        assert_covered(found, header.data_start, header.file_bytes)
        assert [int(sealed.digest, 16) for sealed in found] == [0, 1, 2]

    def test_a_shard_file_is_all_of_what_its_owner_has(self) -> None:
        manifest, tables = of_three((6, 3 * PIECE // 4), 2, 5, 6)
        first = replace(manifest, layout=sharded(manifest.layout))
        header = first.layout.model_file_header
        slot = SealedSlot(MemoryBackend(), "/x", (), first)
        assert_covered([*slot.model_ranges()], header.data_start, header.file_bytes)
        table = replace(tables[0], layout=sharded(tables[0].layout, 1))
        header = table.layout.model_file_header
        found = of_model(SealedOwner(MemoryBackend(), "/x", table).ranges())
        assert_covered(found, header.data_start, header.file_bytes)
        assert [sealed.index for sealed in found] == [0, 1, 2]

    def test_a_part_without_a_shard_file_has_nothing_of_the_model(self) -> None:
        _, (table, _) = of_three((6, 64), 2, 5, 6)
        assert table.model_boxes
        found = [*SealedOwner(MemoryBackend(), "/x", table).ranges()]
        assert [sealed.array for sealed in found] == [*ARRAYS]

    def test_what_holds_no_state_has_no_range(self) -> None:
        """A chunk of FP32 parameters has no masters; one that was never stepped has no state."""
        parameters = (
            ParameterSpec("a", "F32", (1024,), 0, ("exp_avg",)),
            ParameterSpec("b", "BF16", (1024,), 0, ARRAYS),
        )
        model = (ModelTensor("a", "F32", (1024,)), ModelTensor("b", "BF16", (1024,)))
        layout = Layout(parameters, model, 1024)
        digests: dict[str, tuple[str | None, ...]] = {
            "master": ("0" * 16, "1" * 16),
            "exp_avg": ("2" * 16, None),
        }
        table = replace(table_of(1, layout), digests=digests)
        slot = SealedOwner(MemoryBackend(), "/x", table)
        found = {(s.array, s.index): (s.nbytes, s.digest) for s in slot.ranges()}
        assert found == {("master", 1): (4096, "1" * 16), ("exp_avg", 0): (4096, "2" * 16)}
        assert slot.has_arrived(0), "a reader has all that there is"


class TestFiles:
    def test_the_files_of_a_part_are_closed_with_it(self) -> None:
        backend = Tracking(made())
        with open_checkpoint(NEWEST, backend=backend) as opened:
            owner = opened.owners[0]
        assert owner.table is not None
        with SealedOwner(backend, owner.path, owner.table) as files:
            paths = {files.file(sealed).path for sealed in files.ranges()}
            assert {*backend.opened} == paths
            assert len(paths) == 2
        assert backend.opened == []
