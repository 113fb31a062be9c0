"""A checkpoint that went to a tier and came back is the same checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

import offload
from gds import MemoryBackend
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
from tests.tiers.conftest import SETTINGS, optimizer_in

SMALL = 8192
"""Bytes of an object: two chunks, so that there are several."""


def files(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(checkpoint.iterdir())}


def require_whole(store: Path) -> None:
    with offload.open_checkpoint(store) as checkpoint:
        assert checkpoint.verify().ok


def test_training_goes_on_from_what_came_back_to_the_same_bits(
    store: Path, tier: str, tmp_path: Path
) -> None:
    sent = push(store, tier, object_bytes=SMALL)
    assert (sent.step, sent.already_complete, sent.num_kept) == (3, False, 0)
    assert sent.num_sent > 6
    back = tmp_path / "back"
    got = pull(tier, back)
    assert got.path == str(back / "step-00000003")
    assert files(back / "step-00000003") == files(store / "step-00000003")
    assert [p.name for p in back.iterdir() if p.name != "LOCK"] == ["step-00000003"]
    ends = []
    for directory in (store, back):
        model = make_model(64, 40)
        with make_optimizer(model, settings=SETTINGS, directory=directory, keep=3) as optimizer:
            restored = optimizer.restore()
            assert restored is not None
            assert restored.train_state == {"step": 3}
            train(optimizer, 2)
        ends.append(files(directory / "step-00000005"))
        assert all(torch.isfinite(p).all() for p in model.parameters())
    del ends[0]["manifest.json"], ends[1]["manifest.json"]  # the times differ
    assert ends[0] == ends[1]


def test_people_open_the_model_in_the_tier(store: Path, tmp_path: Path) -> None:
    copy = Path(push(store, f"file://{tmp_path}/tier").url.removeprefix("file://"))
    found = safetensors.torch.load_file(copy / "model.safetensors")
    expected = safetensors.torch.load_file(store / "step-00000003" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((copy / "manifest.json").read_text())["body"]["step"] == 3


def test_the_second_push_and_pull_send_nothing(store: Path, tier: str, tmp_path: Path) -> None:
    first = push(store, tier)
    again = push(store, tier)
    assert (again.already_complete, again.num_sent, again.url) == (True, 0, first.url)
    assert len(list_tier(tier)) == 1
    pull(tier, tmp_path / "back")
    there = pull(tier, tmp_path / "back")
    assert (there.already_there, there.bytes_fetched) == (True, 0)
    assert not [*(store / "tiers").glob("*.upload")]


def test_copies_are_found_by_step_by_url_and_by_store(
    store: Path, tier: str, tmp_path: Path
) -> None:
    urls = [push(store / f"step-0000000{number}", tier).url for number in (1, 2, 3)]
    listed = list_tier(tier)
    assert [copy.url for copy in listed] == urls
    assert [copy.marker and copy.marker.step for copy in listed] == [1, 2, 3]
    assert pull(tier, tmp_path / "newest").step == 3
    assert pull(tier, tmp_path / "second", step=2).step == 2
    assert pull(urls[0], tmp_path / "first").step == 1
    with pytest.raises(TierNotFoundError, match=r"of step 7 \(there are: 1, 2, 3\)"):
        pull(tier, tmp_path / "none", step=7)
    assert not (tmp_path / "none").exists()
    other = tmp_path / "other"
    with optimizer_in(other) as optimizer:
        train(optimizer, 1)
    push(other, tier)
    with pytest.raises(TierError, match="copies of 2 stores are here"):
        pull(tier, tmp_path / "none")
    store_id = listed[0].identity.store_id
    assert pull(f"{tier}/{store_id}", tmp_path / "third").step == 3
    assert len(verify_tier(tier)) == 4
    assert len(verify_tier(f"{tier}/{store_id}")) == 3
    assert [report.url for report in verify_tier(urls[1])] == [urls[1]]


def test_older_checkpoints_stay_and_newer_ones_are_never_overtaken(
    store: Path, tier: str, tmp_path: Path
) -> None:
    for number in (1, 2, 3):
        push(store / f"step-0000000{number}", tier)
    back = tmp_path / "back"
    pull(tier, back, step=1)
    pull(tier, back, step=3)
    assert steps(back) == [1, 3]
    before = tree(back)
    with pytest.raises(StoreError, match="newer, or of another run"):
        pull(tier, back, step=2)
    other = tmp_path / "other"
    with optimizer_in(other) as optimizer:
        train(optimizer, 1)
    with pytest.raises(StoreError, match="checkpoints of another store"):
        pull(tier, other)
    with optimizer_in(back) as optimizer:
        optimizer.restore()
        with pytest.raises(StoreLockedError):
            pull(tier, back)
    assert steps(back) == [1, 3]
    assert before.items() <= tree(back).items()


def test_two_runs_that_went_on_from_the_same_checkpoint_are_told_apart(
    store: Path, tier: str, tmp_path: Path
) -> None:
    push(store, tier)
    fork = tmp_path / "fork"
    pull(tier, fork)
    for directory, number in ((store, 50), (fork, 60)):
        with optimizer_in(directory) as optimizer:
            optimizer.restore()
            step(optimizer, number)
            optimizer.checkpoint().result()
        push(directory, tier)
    with pytest.raises(TierError, match="from two runs that went on from the same store"):
        pull(tier, tmp_path / "back")
    for copy in list_tier(tier)[1:]:
        pull(copy.url, tmp_path / copy.identity.writer)
    assert all(report.ok for report in verify_tier(tier))


@pytest.mark.parametrize("drives", [(1, 2), (2, 1), (2, 3)], ids=str)
def test_the_state_may_come_back_on_another_number_of_drives(
    tmp_path: Path, drives: tuple[int, int], s3: str
) -> None:
    before = [tmp_path / f"a{number}" for number in range(drives[0])]
    after = [tmp_path / f"b{number}" for number in range(drives[1])]
    with optimizer_in(before) as optimizer:
        train(optimizer, 2)
    push(before[0], s3, object_bytes=SMALL)
    shutil.copytree(before[0], tmp_path / "kept")
    pull(s3, after[0], parts=after[1:])
    require_whole(after[0])
    ends = []
    for directories in (before, after):
        model = make_model(64, 40)
        with make_optimizer(model, settings=SETTINGS, directory=directories, keep=3) as optimizer:
            assert optimizer.restore() is not None
            train(optimizer, 2)
            ends.append({name: p.clone() for name, p in model.state_dict().items()})
            state = optimizer.checkpoint().result()
            ends[-1] |= {
                f"{name}/{array}": offload.read_state(state, name)[array]
                for name, _ in model.named_parameters()
                for array in ("master", "exp_avg")
            }
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_state_that_does_not_exist_yet_is_not_sent(tmp_path: Path, s3: str) -> None:
    """A checkpoint before the first step holds parameters only."""
    with optimizer_in(tmp_path / "store") as optimizer:
        optimizer.checkpoint({"begun": True}).result()
    assert push(tmp_path / "store", s3).num_sent == 3
    pull(s3, tmp_path / "back")
    model = make_model(64, 40, seed=1)
    with make_optimizer(model, settings=SETTINGS, directory=tmp_path / "back") as optimizer:
        restored = optimizer.restore()
        assert restored is not None
        assert restored.train_state == {"begun": True}
    assert torch.equal(model[0].weight, make_model(64, 40)[0].weight)


def test_a_damaged_checkpoint_is_not_offered_by_the_tier(store: Path, tier: str) -> None:
    flip_on_disk(store / "step-00000003" / "exp_avg.safetensors", 5000)
    with pytest.raises(DamagedError, match=r"exp_avg\.safetensors"):
        push(store / "step-00000003", tier)
    assert [copy.marker for copy in list_tier(tier)] in ([None], [])
    with pytest.raises(TierNotFoundError, match="no complete copy"):
        pull(tier, store.parent / "back")


def test_a_checkpoint_that_training_recycles_is_given_up_and_cleaned_away(
    store: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is not held up: it recycles the checkpoint in the middle of the upload."""
    with optimizer_in(store, keep=1) as optimizer:
        optimizer.restore()
        recycled = threading.Event()
        begun = 0

        def progress(done: int, total: int) -> None:
            nonlocal begun
            begun += 1
            if begun == 1:
                train(optimizer, 2)  # neither step nor seal waits for the upload
                recycled.set()

        with pytest.raises(RecycledError):
            push(store / "step-00000003", s3, object_bytes=1, num_transfers=1, progress=progress)
        assert recycled.is_set()
    assert list_tier(s3) == []
    with open_objects(s3) as objects:
        assert [*objects.sizes_below("")] == ["TIER.json"]
    assert push(store, s3).step == 5


def test_a_checkpoint_is_pushed_beside_training_and_a_pin_keeps_it(store: Path, s3: str) -> None:
    with optimizer_in(store, keep=1) as optimizer:
        optimizer.restore()
        optimizer.pin("leaving", 3)
        push(store / "step-00000003", s3, progress=lambda *_: train(optimizer, 1))
        assert [report.ok for report in verify_tier(s3)] == [True]


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


def test_a_store_that_cannot_be_written_is_pushed_without_a_record(store: Path, s3: str) -> None:
    (store / "tiers").write_bytes(b"in the way")
    with pytest.warns(RuntimeWarning, match="no record of the upload can be kept"):
        assert push(store, s3).num_sent == 6
    assert all(report.ok for report in verify_tier(s3))


def damage(tier: str, name: str, change: str) -> None:
    """Change an object of the only copy in a tier."""
    with open_objects(tier) as objects:
        (path,) = [path for path in objects.sizes_below("") if path.endswith(name)]
        data = objects.get(path, 1 << 20)
        if change == "missing":
            objects.delete([path])
        elif change == "short":
            objects.put(path, data[:-1])
        elif change == "long":
            objects.put(path, data + b"x")
        else:
            at = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[change]
            objects.put(path, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


NAMES = ["model.safetensors", "manifest.json", "train_state.safetensors", "state/exp_avg.000000",
         "COMPLETE.json"]  # fmt: skip


@pytest.mark.parametrize("change", ["first", "middle", "last", "short", "long", "missing"])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_wrong_with_an_object_is_found(
    store: Path, tmp_path: Path, name: str, change: str
) -> None:
    tier = f"file://{tmp_path}/tier"
    push(store, tier, object_bytes=SMALL)
    damage(tier, name, change)
    if name == "COMPLETE.json" and change != "long":
        # A space at the end would be no damage; anything else means that nothing is offered.
        if change in ("last", "short"):
            return
        with pytest.raises(TierNotFoundError, match="no complete copy"):
            verify_tier(tier)
        with pytest.raises(TierNotFoundError, match="no complete copy"):
            pull(tier, tmp_path / "back")
        return
    if name == "COMPLETE.json":
        return
    (report,) = verify_tier(tier)
    assert name in report.problems[0]
    if change == "long" and not name.endswith("json"):
        pull(tier, tmp_path / "back")  # more than was sent does no harm
        return
    if name == "manifest.json" and change in ("last", "long", "short"):
        return  # its last byte is a line feed, which no reader needs
    if name == "model.safetensors" and change == "first":
        pull(tier, tmp_path / "back")  # the header is made anew from the manifest
        require_whole(tmp_path / "back")
        return
    with pytest.raises(CheckpointError, match=name):
        pull(tier, tmp_path / "back")
    back = tmp_path / "back"
    assert not back.exists() or not steps(back)


def test_a_copy_with_damage_is_mended_by_nobody_but_another_push_is_possible(
    store: Path, s3: str
) -> None:
    push(store / "step-00000003", s3)
    damage(s3, "exp_avg.000000", "first")
    assert not verify_tier(s3)[0].ok
    (copy,) = list_tier(s3)
    with open_objects(s3) as objects:
        objects.delete([f"{copy.folder}/COMPLETE.json"])
    push(store / "step-00000003", s3)
    assert [report.ok for report in verify_tier(s3)] == [True]
    assert pull(s3, store.parent / "back").step == 3


@pytest.mark.parametrize("what", ["state/exp_avg.000000", "model.safetensors"])
def test_a_copy_that_somebody_has_removed_objects_of_is_sent_anew(
    store: Path, tier: str, what: str
) -> None:
    """Else a push, or the uploads of a training, would take it for the copy of the checkpoint."""
    first = push(store, tier)
    with open_objects(tier) as objects:
        (name,) = [name for name in objects.sizes_below("") if name.endswith(what)]
        objects.delete([name])
    again = push(store, tier)
    assert (again.already_complete, again.num_kept) == (False, 0)
    assert again.url != first.url
    assert [report.ok for report in verify_tier(again.url)] == [True]
    assert push(store, tier).url == again.url


def test_the_copy_that_is_whole_is_pulled(store: Path, tier: str, tmp_path: Path) -> None:
    """Wherever a list has it among copies that somebody has removed objects of."""
    damaged = []
    while not damaged or push(store, tier).url < min(damaged):
        damaged.append(push(store, tier).url)
        with open_objects(tier) as objects:
            folder = damaged[-1].removeprefix(f"{objects.url}/")
            objects.delete([f"{folder}/state/exp_avg.000000"])
    assert [report.ok for report in verify_tier(tier)].count(True) == 1
    pulled = Path(pull(tier, tmp_path / "back").path)
    assert files(pulled) == files(store / "step-00000003")


def test_pruning_keeps_what_the_policy_keeps_and_touches_nothing_foreign(
    store: Path, tier: str, tmp_path: Path
) -> None:
    for number in (1, 2, 3):
        push(store / f"step-0000000{number}", tier)
    first = list_tier(tier)[0]
    foreign = ["README.md", "other/x", f"{first.folder}/notes.txt", f"{first.folder}/state/mine"]
    with open_objects(tier) as objects:
        for name in foreign:
            objects.put(name, b"mine")
    assert verify_tier(first.url)[0].foreign == ("notes.txt", "state/mine")
    policy = offload.LastK(1) | offload.BestBy("loss")
    dry = prune_tier(tier, policy, dry_run=True)
    assert len(list_tier(tier)) == 3
    done = prune_tier(tier, policy)
    assert done == dry
    assert [copy.marker and copy.marker.step for copy in done.kept] == [2, 3]
    assert [copy.marker and copy.marker.step for copy in list_tier(tier)] == [2, 3]
    with open_objects(tier) as objects:
        left = objects.sizes_below("")
        assert [name for name in left if name in foreign] == sorted(foreign)
        assert [name for name in left if name.startswith(first.folder)] == sorted(foreign[2:])
    with pytest.raises(offload.MetricError, match="they have: loss"):
        prune_tier(tier, offload.BestBy("accuracy"))
    assert all(report.ok for report in verify_tier(tier))


def test_pruning_leaves_unfinished_copies_unless_asked(store: Path, s3: str) -> None:
    push(store / "step-00000002", s3)
    push(store / "step-00000003", s3)
    unfinished = list_tier(s3)[1]
    with open_objects(s3) as objects:
        objects.delete([f"{unfinished.folder}/COMPLETE.json"])
        report = prune_tier(s3, offload.LastK(1))
        assert [copy.url for copy in report.left_alone] == [unfinished.url]
        assert objects.sizes_below(unfinished.folder)
        prune_tier(s3, offload.LastK(1), unfinished=True)
        assert not objects.sizes_below(unfinished.folder)
    assert len(list_tier(s3)) == 1


def test_a_store_in_a_given_backend_is_pushed_and_pulled(s3: str) -> None:
    backend, other = MemoryBackend(), MemoryBackend()
    with make_optimizer(make_model(), backend) as optimizer:
        train(optimizer, 2)
    with pytest.warns(RuntimeWarning, match="no record of the upload can be kept"):
        push("/run", s3, backend=backend.reopened())
    pull(s3, "/back", backend=other, allow_volatile=True)
    with offload.open_checkpoint("/back", backend=other) as checkpoint:
        assert checkpoint.verify().ok


def test_a_disk_that_is_full_is_an_error_before_anything_is_fetched(
    store: Path, s3: str, tmp_path: Path
) -> None:
    push(store, s3)
    backend = MemoryBackend(capacity_bytes=40_000)
    with pytest.raises(offload.StoreFullError):
        pull(s3, "/back", backend=backend, allow_volatile=True)
    assert not [name for name in backend.list_dir("/back") if name.startswith("step")]
    assert os.environ["AWS_ENDPOINT_URL"]


def test_a_model_of_many_blocks_goes_up_in_parts_and_comes_back(tmp_path: Path, s3: str) -> None:
    """Six blocks of 16 MiB, whose memory is used again while others are being sent."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 41_000, bias=False).bfloat16()
    options = offload.Options(
        drives=offload.DriveTuning(calibrate=False), allow_volatile=True, train_state_bytes=8192
    )
    optimizer = offload.AdamW(
        model.parameters(), directory=tmp_path / "store", model=model, keep=1, options=options
    )
    with optimizer:
        optimizer.checkpoint().result()  # before the first step: parameters only
    push(tmp_path / "store", s3)
    pull(s3, tmp_path / "back")
    (before, after) = (
        (tmp_path / name / "step-00000000" / "model.safetensors").read_bytes()
        for name in ("store", "back")
    )
    assert before == after
