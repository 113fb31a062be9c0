"""Copies of checkpoints that several ranks made: sent, verified and fetched by one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gds import PosixBackend
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.opening import open_checkpoint
from offload.errors import CheckpointError, DamagedError, RecycledError
from offload.tiers import list_tier, pull, push, verify_tier
from offload.tiers.contents import state_objects
from offload.tiers.ranks.owner_source import OwnerSource
from offload.tiers.services.objects import Data
from offload.tiers.services.opening import open_objects
from offload.tiers.upload import Upload
from tests.ranks_store.job import Job
from tests.stores.files import tree

SMALL = 2048


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of two owners, with the checkpoints of steps 1 and 2."""
    directory = tmp_path / "store"
    with Job([PosixBackend()] * 2, keep=2, directories=[str(directory)] * 2) as job:
        job.seal(1)
        job.seal(2)
    return directory


def verified(path: Path) -> str:
    """Return what ``offload verify`` says, which must be that all is well."""
    done = subprocess.run(
        [sys.executable, "-m", "offload.cli", "verify", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_parts_of_all_owners_go_up_and_come_back(
    store: Path, tmp_path: Path, tier: str
) -> None:
    report = push(store, tier, object_bytes=SMALL)
    (copy,) = list_tier(tier)
    assert copy.marker is not None
    assert {name.split("/")[0] for name in copy.marker.sizes} == {
        "manifest.json", "model.safetensors", "train_state.safetensors", "state", "owner-1",
    }  # fmt: skip
    assert report.num_sent == len(copy.marker.sizes)
    (checked,) = verify_tier(tier)
    assert (checked.problems, checked.foreign) == ((), ())
    assert checked.bytes_checked == copy.marker.nbytes
    back = tmp_path / "back"
    pull(tier, back)
    verified(back)
    with open_checkpoint(store) as before, open_checkpoint(back) as after:
        assert before.train_state == after.train_state
        for mine, theirs in zip(before.owners, after.owners, strict=True):
            assert mine.table == theirs.table
            assert [*tree(Path(mine.path)).values()] == [*tree(Path(theirs.path)).values()]
        first, second = tree(Path(before.path)), tree(Path(after.path))
    names = {path.name for path in first} - {"manifest.json"}
    assert {p.name: d for p, d in first.items() if p.name in names} == {
        p.name: d for p, d in second.items() if p.name in names
    }
    assert pull(tier, back).already_there
    with Job([PosixBackend()] * 2, keep=2, directories=[str(back)] * 2) as job:
        assert job.newest == 2
        assert job.wrong() == []
        job.seal(3)
        assert job.wrong() == []
    verified(back)


def test_a_push_that_was_stopped_sends_nothing_again(store: Path, s3: str) -> None:
    with open_objects(s3) as objects:
        counting = Counting(objects)
        for most in (3, 9, 1000):
            with open_checkpoint(store) as checkpoint:
                counting.left = most
                upload = Upload(
                    counting, checkpoint, object_bytes=SMALL, num_transfers=1,
                    is_stopped=lambda: counting.left <= 0,
                )  # fmt: skip
                try:
                    upload.run()
                except OSError:
                    assert list_tier(s3)[0].marker is None
    state = [name for name in counting.put_names if "/state/" in name]
    assert len(state) == len({*state})
    assert any("owner-1" in name for name in state)
    assert all(report.ok for report in verify_tier(s3))


class Counting:
    """Objects of a tier; counts what is put, and how much may still be put."""

    def __init__(self, objects: object) -> None:
        self._objects = objects
        self.left = 0
        self.put_names: list[str] = []

    def put(self, name: str, data: Data) -> None:
        self.left -= 1
        self.put_names.append(name)
        self._objects.put(name, data)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)


def test_a_damaged_object_of_an_owner_is_found(store: Path, tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    push(store, f"file://{tier}", object_bytes=SMALL)
    victim = sorted(tier.rglob("owner-1/state/*"))[1]
    data = bytearray(victim.read_bytes())
    data[5] ^= 1
    victim.write_bytes(data)
    (report,) = verify_tier(f"file://{tier}")
    assert len(report.problems) == 1
    assert "owner-1/state" in report.problems[0]
    with pytest.raises(DamagedError, match="owner-1/state"):
        pull(f"file://{tier}", tmp_path / "back")
    assert not [*(tmp_path / "back").glob("step-*")]
    table = next(tier.rglob("owner-1/table.json"))
    table.write_bytes(table.read_bytes().replace(b'"owner":1', b'"owner":2'))
    (report,) = verify_tier(f"file://{tier}")
    assert "owner-1/table.json" in report.problems[0]


def test_a_download_that_was_interrupted_goes_on(store: Path, tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    push(store, f"file://{tier}", object_bytes=SMALL)
    victim = max(tier.rglob("owner-1/state/*"))
    data = victim.read_bytes()
    victim.write_bytes(bytes(len(data)))
    with pytest.raises(DamagedError):
        pull(f"file://{tier}", tmp_path / "back", num_transfers=1)
    victim.write_bytes(data)
    report = pull(f"file://{tier}", tmp_path / "back")
    assert report.bytes_kept > report.bytes_fetched > 0
    verified(tmp_path / "back")


def test_a_part_that_is_recycled_ends_the_upload(store: Path, tmp_path: Path) -> None:
    with (
        Job([PosixBackend()] * 2, keep=1, directories=[str(store)] * 2) as job,
        open_checkpoint(store) as found,
        PosixBackend() as backend,
    ):
        checkpoint = Checkpoint(backend, found.path, found.manifest)
        found.close()
        source = OwnerSource(backend, checkpoint.owners[0])
        (first, *_) = state_objects(source.table, SMALL)
        buffer = backend.allocate(1 << 20, "host")
        assert source.read_object(first, buffer).nbytes == first.nbytes
        job.seal(3)
        job.seal(4)
        with pytest.raises(RecycledError):
            source.read_object(first, buffer)
        source.close()
        with (
            open_objects(f"file://{tmp_path}/tier") as objects,
            pytest.raises((RecycledError, CheckpointError)),
        ):
            Upload(objects, checkpoint, object_bytes=SMALL).run()
    assert list_tier(f"file://{tmp_path}/tier") == []


def test_further_directories_are_refused(store: Path, tmp_path: Path, s3: str) -> None:
    push(store, s3)
    with pytest.raises(CheckpointError, match="into one directory"):
        pull(s3, tmp_path / "back", parts=[tmp_path / "other"])
