"""A checkpoint that went to a tier and came back is the same checkpoint."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

import offload
from gds import Buffer, MemoryBackend, PosixBackend, WrapperBackend
from gds.contract import BufferKind
from offload.errors import (
    CheckpointError,
    DamagedError,
    RecycledError,
    StoreError,
    StoreLockedError,
    TierError,
    TierNotFoundError,
)
from offload.tiers import list_tier, prune_tier, pull, push, verify_tier
from offload.tiers.services.opening import open_objects
from tests.stores.files import flip_on_disk, steps, tree
from tests.stores.small import make_model, make_optimizer, step, train
from tests.tiers.copies import SMALL, change, files, new_in, optimizer_in, steps_in, whole


def require_whole(store: Path) -> None:
    with offload.open_checkpoint(store) as checkpoint:
        assert checkpoint.verify().ok


def test_training_goes_on_from_what_came_back_to_the_same_bits(
    store: Path, tier: str, tmp_path: Path
) -> None:
    sent = push(store, tier, object_bytes=SMALL)
    assert (sent.step, sent.already_complete, sent.num_kept) == (3, False, 0)
    assert sent.num_sent > 6
    again = push(store, tier, object_bytes=SMALL)
    assert (again.url, again.already_complete, again.num_sent) == (sent.url, True, 0)
    assert whole(tier) == [True]
    back = tmp_path / "back"
    got = pull(tier, back)
    assert got.path == str(back / "step-00000003")
    assert files(back / "step-00000003") == files(store / "step-00000003")
    assert [p.name for p in back.iterdir() if p.name != "LOCK"] == ["step-00000003"]
    again_got = pull(tier, back)
    assert (again_got.path, again_got.already_there, again_got.bytes_fetched) == (got.path, True, 0)
    ends = []
    for directory in (store, back):
        with optimizer_in(directory) as optimizer:
            restored = optimizer.restore()
            assert restored is not None
            assert restored.train_state == {"step": 3}
            train(optimizer, 2)
        ends.append(files(directory / "step-00000005", "manifest.json"))
    assert ends[0] == ends[1]


def test_people_open_the_model_in_the_tier(store: Path, folder: str) -> None:
    copy = Path(push(store, folder).url.removeprefix("file://"))
    found = safetensors.torch.load_file(copy / "model.safetensors")
    expected = safetensors.torch.load_file(store / "step-00000003" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((copy / "manifest.json").read_text())


def test_copies_are_found_by_step_by_url_and_by_store(store: Path, s3: str, tmp_path: Path) -> None:
    urls = [push(store / f"step-0000000{number}", s3).url for number in (1, 2, 3)]
    listed = list_tier(s3)
    assert [copy.url for copy in listed] == urls
    assert steps_in(s3) == [1, 2, 3]
    assert pull(s3, tmp_path / "newest").step == 3
    assert pull(s3, tmp_path / "second", step=2).step == 2
    assert pull(urls[0], tmp_path / "first").step == 1
    with pytest.raises(TierNotFoundError, match=r"of step 7 \(there are: 1, 2, 3\)"):
        pull(s3, tmp_path / "none", step=7)
    other = tmp_path / "other"
    with optimizer_in(other) as optimizer:
        train(optimizer, 1)
    push(other, s3)
    with pytest.raises(TierError, match="copies of 2 stores are here"):
        pull(s3, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    store_id = listed[0].identity.store_id
    assert pull(f"{s3}/{store_id}", tmp_path / "third").step == 3
    assert whole(s3) == [True] * 4
    assert whole(f"{s3}/{store_id}") == [True] * 3
    assert [report.url for report in verify_tier(urls[1])] == [urls[1]]


def test_older_checkpoints_stay_and_newer_ones_are_never_overtaken(
    store: Path, s3: str, tmp_path: Path
) -> None:
    for number in (1, 2, 3):
        push(store / f"step-0000000{number}", s3)
    back, other = tmp_path / "back", tmp_path / "other"
    pull(s3, back, step=1)
    pull(s3, back, step=3)
    assert steps(back) == [1, 3]
    before = tree(back)
    with pytest.raises(StoreError, match="newer, or of another run"):
        pull(s3, back, step=2)
    with optimizer_in(other) as optimizer:
        train(optimizer, 1)
    with pytest.raises(StoreError, match="checkpoints of another store"):
        pull(s3, other)
    with optimizer_in(back) as optimizer:
        optimizer.restore()
        with pytest.raises(StoreLockedError):
            pull(s3, back)
    assert steps(back) == [1, 3]
    assert before.items() <= tree(back).items()


def test_two_runs_that_went_on_from_the_same_checkpoint_are_told_apart(
    store: Path, s3: str, tmp_path: Path
) -> None:
    push(store, s3)
    fork = tmp_path / "fork"
    pull(s3, fork)
    for directory, number in ((store, 50), (fork, 60)):
        with optimizer_in(directory) as optimizer:
            optimizer.restore()
            step(optimizer, number)
            optimizer.checkpoint().result()
        push(directory, s3)
    with pytest.raises(TierError, match="from two runs that went on from the same store"):
        pull(s3, tmp_path / "back")
    for copy in list_tier(s3)[1:]:
        pull(copy.url, tmp_path / copy.identity.writer)
    assert all(whole(s3))


def test_the_state_may_come_back_on_another_number_of_drives(tmp_path: Path, s3: str) -> None:
    before = [tmp_path / f"a{number}" for number in range(3)]
    after = [tmp_path / f"b{number}" for number in range(2)]
    with optimizer_in(before) as optimizer:
        train(optimizer, 2)
    push(before[0], s3, object_bytes=SMALL)
    pull(s3, after[0], parts=after[1:])
    require_whole(after[0])
    ends = []
    for directories in (before, after):
        model = make_model(64, 40)
        with optimizer_in(directories, model=model) as optimizer:
            assert optimizer.restore() is not None
            train(optimizer, 2)
            state = optimizer.checkpoint().result()
            ends.append({name: p.clone() for name, p in model.state_dict().items()})
            for name, _ in model.named_parameters():
                arrays = offload.read_state(state, name).items()
                ends[-1] |= {f"{name}/{array}": tensor for array, tensor in arrays}
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_state_that_does_not_exist_yet_is_not_sent(tmp_path: Path, s3: str) -> None:
    """A checkpoint before the first step holds parameters only."""
    with optimizer_in(tmp_path / "store") as optimizer:
        optimizer.checkpoint({"begun": True}).result()
    assert push(tmp_path / "store", s3).num_sent == 3
    pull(s3, tmp_path / "back")
    model = make_model(64, 40, seed=1)
    with optimizer_in(tmp_path / "back", model=model) as optimizer:
        restored = optimizer.restore()
        assert restored is not None
        assert restored.train_state == {"begun": True}
    assert torch.equal(model[0].weight, make_model(64, 40)[0].weight)


def test_a_damaged_checkpoint_is_not_offered_by_the_tier(store: Path, s3: str) -> None:
    flip_on_disk(store / "step-00000003" / "exp_avg.safetensors", 5000)
    with pytest.raises(DamagedError, match=r"exp_avg\.safetensors"):
        push(store / "step-00000003", s3)
    assert steps_in(s3) in ([None], [])
    with pytest.raises(TierNotFoundError, match="no complete copy"):
        pull(s3, store.parent / "back")


def test_a_checkpoint_that_training_recycles_is_given_up_and_cleaned_away(
    store: Path, s3: str
) -> None:
    """Training is not held up: it recycles the checkpoint in the middle of the upload."""
    with optimizer_in(store, keep=1) as optimizer:
        optimizer.restore()
        recycled = threading.Event()

        def progress(done: int, total: int) -> None:
            if not recycled.is_set():
                train(optimizer, 2)  # neither step nor seal waits for the upload
                recycled.set()

        with pytest.raises(RecycledError):
            push(store / "step-00000003", s3, object_bytes=1, num_transfers=1, progress=progress)
        assert recycled.is_set()
        assert list_tier(s3) == []
        with open_objects(s3) as objects:
            assert [*objects.sizes_below("")] == ["TIER.json"]
        optimizer.pin("leaving", 5)  # which keeps it
        push(store, s3, progress=lambda *_: train(optimizer, 1))
    assert (steps_in(s3), whole(s3)) == ([5], [True])


def test_two_uploads_of_one_checkpoint_at_a_time_are_refused(store: Path, s3: str) -> None:
    errors: list[Exception] = []

    def progress(done: int, total: int) -> None:
        if not errors:
            try:
                push(store, s3)
            except TierError as error:
                errors.append(error)

    push(store, s3, progress=progress)
    assert "another process uploads this checkpoint" in str(errors[0])


NAMES = ["model.safetensors", "manifest.json", "train_state.safetensors", "state/exp_avg.000000",
         "COMPLETE.json"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_wrong_with_an_object_is_found(store: Path, folder: str, name: str) -> None:
    url = push(store, folder, object_bytes=SMALL).url
    path = Path(url.removeprefix("file://")) / name
    good = path.read_bytes()
    for how in ("first", "middle", "last", "short", "long", "missing"):
        change(folder, name, how)
        back = store.parent / f"back from {how}"
        if name == "COMPLETE.json":
            with pytest.raises(TierNotFoundError, match="no complete copy"):
                verify_tier(folder)
            with pytest.raises(TierNotFoundError, match="no complete copy"):
                pull(folder, back)
        else:
            (report,) = verify_tier(folder)
            assert name in report.problems[0], how
            # More than was sent does no harm; and a header is made anew from the manifest.
            if how == "long" or (name, how) == ("model.safetensors", "first"):
                if name != "manifest.json":
                    pull(folder, back)
                    require_whole(back)
            else:
                with pytest.raises(CheckpointError, match=name):
                    pull(folder, back)
                assert not back.exists() or not steps(back), how
        path.write_bytes(good)
        assert whole(folder) == [True]


@pytest.mark.parametrize("what", ["state/exp_avg.000000", "model.safetensors", "COMPLETE.json"])
def test_a_copy_that_somebody_has_removed_objects_of_is_sent_anew(
    store: Path, s3: str, what: str
) -> None:
    """Else a push, or the uploads of a training, would take it for the copy of the checkpoint."""
    first = push(store, s3)
    change(s3, what, "missing")
    again = push(store, s3)
    assert (again.already_complete, again.num_kept) == (False, 0)
    assert again.url != first.url
    assert whole(again.url) == [True]
    assert push(store, s3).url == again.url
    pulled = Path(pull(s3, store.parent / "back").path)
    assert files(pulled) == files(store / "step-00000003"), "the copy that is whole"


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_pruning_keeps_what_the_policy_keeps_and_touches_nothing_foreign(
    request: pytest.FixtureRequest, store: Path, kind: str
) -> None:
    tier = request.getfixturevalue(kind)
    for number in (1, 2, 3):
        push(store / f"step-0000000{number}", tier)
    first, _, unfinished = list_tier(tier)
    foreign = ["README.md", "other/x", f"{first.folder}/notes.txt", f"{first.folder}/state/mine"]
    with open_objects(tier) as objects:
        for name in foreign:
            objects.put(name, b"mine")
        assert verify_tier(first.url)[0].foreign == ("notes.txt", "state/mine")
        with pytest.raises(offload.MetricError, match="they have: loss"):
            prune_tier(tier, offload.BestBy("accuracy"))
        policy = offload.LastK(1) | offload.BestBy("loss")
        dry = prune_tier(tier, policy, dry_run=True)
        assert len(list_tier(tier)) == 3
        done = prune_tier(tier, policy)
        assert done == dry
        assert [copy.marker and copy.marker.step for copy in done.kept] == [2, 3]
        assert steps_in(tier) == [2, 3]
        left = objects.sizes_below("")
        assert [name for name in left if name in foreign] == sorted(foreign)
        assert [name for name in left if name.startswith(first.folder)] == sorted(foreign[2:])
        assert all(whole(tier))
        objects.delete([f"{unfinished.folder}/COMPLETE.json"])
        report = prune_tier(tier, offload.LastK(1))
        assert unfinished.url in [copy.url for copy in report.left_alone]
        assert objects.sizes_below(unfinished.folder)
        prune_tier(tier, offload.LastK(1), unfinished=True)
        assert not objects.sizes_below(unfinished.folder)


def test_a_store_in_a_given_backend_is_pushed_and_pulled(s3: str) -> None:
    backend, other = MemoryBackend(), MemoryBackend()
    with make_optimizer(make_model(), backend) as optimizer:
        train(optimizer, 2)
    with pytest.warns(RuntimeWarning, match="no record of the upload can be kept"):
        push("/run", s3, backend=backend.reopened())
    pull(s3, "/back", backend=other, allow_volatile=True)
    with offload.open_checkpoint("/back", backend=other) as checkpoint:
        assert checkpoint.verify().ok
    # A full disk is an error before anything is fetched.
    small = MemoryBackend(capacity_bytes=4096)
    with pytest.raises(offload.StoreFullError):
        pull(s3, "/back", backend=small, allow_volatile=True)
    assert not [name for name in small.list_dir("/back") if name.startswith("step")]


BLOCKS = {"chunk_bytes": 16 << 20, "drives": offload.DriveTuning(calibrate=False)}


class Counting(WrapperBackend):
    """A drive of this machine that notes the memory that transfers take."""

    def __init__(self) -> None:
        super().__init__(PosixBackend())
        self.sizes: list[int] = []

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> Buffer:
        self.sizes.append(nbytes)
        return self.inner.allocate(nbytes, kind)


def test_a_model_of_many_blocks_goes_up_in_parts_in_bounded_memory(tmp_path: Path, s3: str) -> None:
    """Five blocks of 16 MiB, whose memory is used again while others are being sent."""
    with torch.random.fork_rng():
        model = torch.nn.Linear(1024, 33_000, bias=False).bfloat16()
    with make_optimizer(model, directory=tmp_path / "store", settings=BLOCKS) as optimizer:
        optimizer.checkpoint().result()  # before the first step: parameters only
    sending, fetching = Counting(), Counting()
    push(tmp_path / "store", s3, backend=sending, num_transfers=2)
    pull(s3, tmp_path / "back", backend=fetching, num_transfers=2)
    (before, after) = (
        (tmp_path / name / "step-00000000" / "model.safetensors").read_bytes()
        for name in ("store", "back")
    )
    assert before == after
    shutil.rmtree(tmp_path / "store")
    for used in (sending, fetching):
        assert sum(used.sizes) < len(before)


@pytest.mark.parametrize("below", ["", "/gen-00000001/" + "0a" * 16])
def test_a_folder_that_is_named_like_the_copies_of_a_store_takes_no_uploads(
    store: Path, tmp_path: Path, below: str
) -> None:
    """Nothing in it would be found again."""
    url = f"file://{tmp_path}/{'0a' * 16}{below}"
    with pytest.raises(TierError, match="leave it out, or, if the name is your own, add a folder"):
        push(store, url)
    with pytest.raises(TierError, match="leave it out"):
        new_in(tmp_path / "new", url)
    run = tmp_path / ("0a" * 16) / "run"
    run.parent.mkdir()
    (run.parent / "other").touch()  # an empty folder may be where a drive is not mounted
    push(store, f"file://{run}")
    assert whole(f"file://{run}") == [True]
