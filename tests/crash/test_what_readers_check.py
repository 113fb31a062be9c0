"""What a reader looks at before it trusts a checkpoint: every file, on every drive, and no more."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gds import (
    ALIGNMENT,
    Backend,
    Buffer,
    File,
    IOFuture,
    MemoryBackend,
    PosixBackend,
    StorageError,
    WrapperBackend,
)
from gds.backends.wrapper import WrapperFile
from gds.contract import Stat
from offload import Checkpoint, list_checkpoints, open_checkpoint
from offload.checkpoint import reading
from offload.checkpoint.reading import decode_manifest, directories_of_parts, read_part
from offload.errors import CheckpointError, DamagedError, ManifestError, UnreadableError
from offload.format.layout import Layout
from offload.format.manifest import Manifest
from offload.format.train_state import EncodedState, TrainStateTagError
from offload.store.sealing import pack_train_state
from tests.crash.fault_backend import FaultBackend
from tests.ranks_store.test_three_owners import Tracking
from tests.stores.files import contents, flip, overwrite, read, write
from tests.stores.small import STORE, make_model, make_optimizer, memory_store, train
from tests.torch_contract.test_damaged_checkpoints import edit_manifest

DRIVES = [STORE, "/second", "/third"]
NEWEST = f"{STORE}/step-00000001"
MANIFEST = f"{NEWEST}/manifest.json"
TRAIN_STATE = f"{NEWEST}/train_state.safetensors"


def on_three_drives(backend: Backend | None = None, directories: Sequence[str] = DRIVES) -> Backend:
    """Return files with a checkpoint whose state is on three drives."""
    inner = MemoryBackend() if backend is None else backend
    with make_optimizer(make_model(60, 80, 40), inner, directory=[*directories]) as optimizer:
        train(optimizer, 1)
    return inner


def parts_of(backend: Backend, path: str = NEWEST) -> list[str]:
    with open_checkpoint(path, backend=backend) as opened:
        return opened.parts


class TestDrives:
    @pytest.mark.parametrize("name", ["part.json", "master", "exp_avg", "exp_avg_sq"])
    @pytest.mark.parametrize("drive", [1, 2])
    def test_every_file_of_every_part_is_looked_at(self, drive: int, name: str) -> None:
        backend = on_three_drives()
        path = f"{parts_of(backend)[drive - 1]}/{name}"
        path += "" if name == "part.json" else ".safetensors"
        flip(backend, path, 12)
        with pytest.raises(CheckpointError, match=path):
            open_checkpoint(NEWEST, backend=backend)
        backend.remove(path)
        with pytest.raises(CheckpointError, match=path):
            open_checkpoint(NEWEST, backend=backend)

    def test_a_longer_file_is_not_what_was_written(self) -> None:
        backend = on_three_drives()
        path = f"{parts_of(backend)[1]}/part.json"
        write(backend, path, read(backend, path) + b" ")
        with pytest.raises(CheckpointError, match=f"{path}: a file of {ALIGNMENT + 1} bytes"):
            open_checkpoint(NEWEST, backend=backend)

    def test_a_part_that_cannot_be_read_is_said_to_be(self) -> None:
        backend = FaultBackend(on_three_drives())
        (_, part) = parts_of(backend)
        backend.fail_if(lambda kind, path: (kind, path) == ("open", f"{part}/part.json"))
        with pytest.raises(UnreadableError, match="not known whether its content is damaged"):
            read_part(backend, part)
        assert read_part(backend, part).drive == 2

    def test_a_link_to_a_part_is_no_part(self, tmp_path: Path) -> None:
        directories = [str(tmp_path / name) for name in ("one", "two", "three")]
        checkpoint = f"{directories[0]}/step-00000001"
        with PosixBackend() as backend:
            on_three_drives(backend, directories)
            part = Path(parts_of(backend, checkpoint)[0])
            part.rename(tmp_path / "elsewhere")
            part.symlink_to(tmp_path / "elsewhere")
            with pytest.raises(CheckpointError, match=rf"symbolic link.*directory: {part}"):
                open_checkpoint(checkpoint, backend=backend)

    def test_directories_that_are_given_count_and_not_those_that_are_recorded(self) -> None:
        backend = on_three_drives()
        recorded = parts_of(backend)
        with open_checkpoint(NEWEST, backend=backend) as opened:
            assert opened.parts_are_only_recorded
        for old, new in (("/second", "/a"), ("/third", "/b")):
            backend.rename(old, new)
        with open_checkpoint(NEWEST, parts=["/a", "/b"], backend=backend) as opened:
            moved = [path.replace("/second", "/a").replace("/third", "/b") for path in recorded]
            assert opened.parts == moved
            assert not opened.parts_are_only_recorded
            assert opened.verify().ok

    @pytest.mark.parametrize("given", [None, ["/second"]], ids=["none given", "one given"])
    def test_a_checkpoint_on_one_drive_needs_none(self, given: list[str] | None) -> None:
        """It may be of one process, in a store that ranks went on with in more directories."""
        with open_checkpoint(STORE, parts=given, backend=memory_store()) as opened:
            assert opened.parts == []
            assert not opened.parts_are_only_recorded
            assert opened.verify().ok

    def test_the_directory_of_each_part_is_found_among_those_that_are_given(self) -> None:
        backend = on_three_drives()
        manifest = decode_manifest(backend, NEWEST)
        backend.make_dir("/new")
        assert directories_of_parts(backend, manifest, []) == ["/second", "/third"]
        for old, new in (("/second", "/a"), ("/third", "/b")):
            backend.rename(old, new)
        assert directories_of_parts(backend, manifest, ["/b", "/a", "/new"]) == ["/a", "/b"]
        assert directories_of_parts(backend, manifest, ["/b"]) == ["/second", "/b"]

    def test_the_sizes_are_those_of_all_files(self) -> None:
        backend = on_three_drives()
        expected = {name: len(data) for name, data in contents(backend, NEWEST).items()}
        for part in parts_of(backend):
            found = contents(backend, part)
            expected |= {f"{part}/{name}": len(data) for name, data in found.items()}
        with open_checkpoint(NEWEST, backend=backend) as opened:
            assert opened.files == expected
            backend.remove(TRAIN_STATE)
            assert opened.files == expected | {"train_state.safetensors": 0}

    def test_all_files_are_opened_at_once_and_closed_together(self) -> None:
        backend = Tracking(on_three_drives())
        (*_, last) = parts_of(backend)
        arrays = ("master", "exp_avg", "exp_avg_sq")
        every = [f"{part}/{name}.safetensors" for part in parts_of(backend) for name in arrays]
        every += [f"{NEWEST}/{name}.safetensors" for name in ("model", *arrays)]
        with open_checkpoint(NEWEST, backend=backend) as opened:
            with opened.open_slot() as slot:
                slot.open_all()
                assert sorted(backend.opened) == sorted(every)
            assert backend.opened == []
            backend.remove(f"{last}/exp_avg_sq.safetensors")
            with pytest.raises(StorageError) as caught, opened.open_slot() as slot:
                slot.open_all()
            assert caught.value.filename == f"{last}/exp_avg_sq.safetensors"
            assert backend.opened == []


class TestVerifying:
    def test_a_manifest_that_was_replaced_since_is_said_to_be(self) -> None:
        backend = memory_store(1)
        with open_checkpoint(NEWEST, backend=backend) as opened:
            edit_manifest(lambda body: body.update(torch_version="2.0"))(backend, NEWEST)
            report = opened.verify()
        assert report.problems == (f"{MANIFEST}: replaced since it was opened",)

    @pytest.mark.parametrize("name", ["manifest.json", "part.json"])
    def test_a_file_that_cannot_be_read_is_not_called_damaged(self, name: str) -> None:
        backend = FaultBackend(on_three_drives())
        path = MANIFEST if name == "manifest.json" else f"{parts_of(backend)[1]}/{name}"
        with open_checkpoint(NEWEST, backend=backend) as opened:
            backend.fail_if(lambda kind, where: (kind, where) == ("open", path))
            report = opened.verify()
            assert report.problems == ()
            assert len(report.unreadable) == 1
            assert path in report.unreadable[0]
            assert opened.verify().ok

    @pytest.mark.parametrize("given", [None, DRIVES[1:]], ids=["recorded", "given"])
    def test_a_part_that_is_damaged_after_opening_is_found(self, given: list[str] | None) -> None:
        backend = on_three_drives()
        path = f"{parts_of(backend)[1]}/part.json"
        with open_checkpoint(NEWEST, parts=given, backend=backend) as opened:
            flip(backend, path, 12)
            report = opened.verify()
        assert len(report.problems) == 1
        assert path in report.problems[0]
        assert report.not_marked == (report.problems if given is None else ())

    def test_a_file_that_goes_after_opening_is_damage(self) -> None:
        backend = memory_store(1)
        with open_checkpoint(NEWEST, backend=backend) as opened:
            backend.remove(f"{NEWEST}/exp_avg.safetensors")
            report = opened.verify()
        assert report.unreadable == ()
        assert all("exp_avg.safetensors" in problem for problem in report.problems)
        assert len(report.problems) > 1, "the file as a whole, and each of its chunks"

    def test_a_mark_without_words_is_one(self) -> None:
        backend = memory_store(1)
        write(backend, f"{NEWEST}/damaged.txt", b"")
        with pytest.raises(DamagedError, match="quarantined"):
            open_checkpoint(NEWEST, backend=backend)
        with open_checkpoint(NEWEST, even_quarantined=True, backend=backend) as opened:
            assert opened.quarantined
            assert opened.verify().quarantined == opened.quarantined


class TestTrainState:
    @staticmethod
    def opened_with(text: str) -> Checkpoint:
        """Return a checkpoint with a stored train state whose digest is right."""
        backend = memory_store(1)
        with open_checkpoint(NEWEST, backend=backend) as opened:
            nbytes = opened.files["train_state.safetensors"]
            packed = pack_train_state(EncodedState(text, {}), opened.manifest, nbytes)
            overwrite(backend, TRAIN_STATE, packed)
            return opened.unlocked(backend)

    def test_that_of_a_later_version_is_not_called_damaged(self) -> None:
        found = self.opened_with('{"$":"new"}')
        with pytest.raises(TrainStateTagError, match=f"^{TRAIN_STATE}: .*'new'"):
            _ = found.train_state

    def test_one_that_is_not_understood_is_damaged(self) -> None:
        found = self.opened_with('{"$":"tuple"}')
        with pytest.raises(DamagedError, match=f"^{TRAIN_STATE}: damaged: train_state"):
            _ = found.train_states

    def test_a_directory_is_none(self) -> None:
        backend = memory_store(1)
        backend.remove(TRAIN_STATE)
        backend.make_dir(TRAIN_STATE)
        with pytest.raises(CheckpointError, match=f"{TRAIN_STATE}: a directory, expected a file"):
            open_checkpoint(NEWEST, backend=backend)


class TestManifest:
    def test_a_hole_is_found_before_the_rest_is_read(self) -> None:
        """The first block says enough, so that no memory is taken for what a file claims to be."""

        class Counting(WrapperBackend):
            largest = 0

            def wrap_file(self, file: File) -> File:
                return _Counted(file, self)

        class _Counted(WrapperFile):
            def __init__(self, inner: File, backend: Counting) -> None:
                super().__init__(inner)
                self._backend = backend

            def read_bytes(self, offset: int, nbytes: int) -> bytes:
                self._backend.largest = max(self._backend.largest, nbytes)
                return super().read_bytes(offset, nbytes)

            def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
                self._backend.largest = max(self._backend.largest, into.nbytes)
                return super().read_again(into, offset, direct=direct)

        backend = Counting(memory_store(1))
        write(backend, MANIFEST, bytes(1 << 20))
        with pytest.raises(ManifestError, match="zero bytes"):
            decode_manifest(backend, NEWEST)
        assert 0 < backend.largest <= 4096

    def test_a_short_one_is_read_whole(self) -> None:
        backend = memory_store(1)
        write(backend, MANIFEST, read(backend, MANIFEST)[:100])
        with pytest.raises(ManifestError, match="not a manifest: not a JSON document"):
            decode_manifest(backend, NEWEST)

    @pytest.mark.parametrize("of", ["MAX_MANIFEST_BYTES", "MAX_CONTENT_BYTES"])
    def test_as_many_bytes_as_are_allowed_are_read(
        self, of: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = memory_store(1)
        data = read(backend, MANIFEST)
        most = len(data) if of == "MAX_MANIFEST_BYTES" else len(data.rstrip())
        monkeypatch.setattr(reading, of, most)
        assert decode_manifest(backend, NEWEST).step == 1
        monkeypatch.setattr(reading, of, most - 1)
        with pytest.raises(ManifestError, match=f"{most} bytes.*at most {most - 1}"):
            decode_manifest(backend, NEWEST)

    def test_nothing_behind_a_link_is_looked_at(self, tmp_path: Path) -> None:
        with PosixBackend() as inner:
            with make_optimizer(make_model(), inner, directory=tmp_path / "run") as optimizer:
                (path,) = train(optimizer, 1)
            link = tmp_path / "run" / "step-00000009"
            link.symlink_to(path)

            class Unreadable(WrapperBackend):
                def stat(self, path: str) -> Stat | None:
                    if path.startswith(f"{link}/"):
                        raise StorageError(errno.EACCES, "stat", path)
                    return super().stat(path)

            backend = Unreadable(inner)
            with pytest.raises(ManifestError, match="links to one are not followed"):
                decode_manifest(backend, str(link))
            found = list_checkpoints(tmp_path / "run", backend=backend)
            assert [info.valid for info in found] == [True, False]

    def test_a_link_to_a_store_is_followed_unless_it_is_named_like_a_checkpoint(
        self, tmp_path: Path
    ) -> None:
        with make_optimizer(make_model(), directory=tmp_path / "run") as optimizer:
            train(optimizer, 1)
        for name in ("latest", "step-00000009"):
            (tmp_path / name).symlink_to(tmp_path / "run")
        with open_checkpoint(tmp_path / "latest") as opened:
            assert opened.step == 1
        for read_it in (open_checkpoint, list_checkpoints):
            with pytest.raises(CheckpointError, match="symbolic link"):
                read_it(tmp_path / "step-00000009")

    def test_all_parameters_have_names_or_it_has_none(self) -> None:
        backend = memory_store(1)
        with open_checkpoint(NEWEST, backend=backend) as opened:
            manifest = opened.manifest
        assert Checkpoint(backend, NEWEST, manifest).has_model_names
        first, *others = manifest.layout.parameters
        unnamed = replace(first, name="group0.param0")
        layout: Layout = replace(manifest.layout, parameters=(unnamed, *others))
        mixed: Manifest = replace(manifest, layout=layout)
        assert not Checkpoint(backend, NEWEST, mixed).has_model_names

    def test_a_checkpoint_that_holds_nothing_can_be_closed(self) -> None:
        backend = memory_store(1)
        with open_checkpoint(NEWEST, backend=backend) as opened:
            manifest = opened.manifest
        with Checkpoint(backend, NEWEST, manifest) as found:
            assert found.train_state == {"step": 1}
        found.close()
