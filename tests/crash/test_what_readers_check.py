"""What a reader looks at before it trusts a checkpoint: every file, on every drive, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gds import (
    Backend,
    Buffer,
    File,
    IOFuture,
    MemoryBackend,
    PosixBackend,
    WrapperBackend,
)
from gds.backends.wrapper import WrapperFile
from offload import list_checkpoints, load_parameters, open_checkpoint
from offload.errors import CheckpointError, DamagedError, ManifestError, UnreadableError
from offload.format.train_state import EncodedState, TrainStateTagError
from offload.store.sealing import pack_train_state
from tests.crash.fault_backend import FaultBackend
from tests.stores.files import flip, overwrite, read, write
from tests.stores.small import STORE, make_model, make_optimizer, memory_store, train
from tests.torch_contract.test_damaged_checkpoints import edit_manifest

DRIVES = [STORE, "/second", "/third"]
ARRAYS = ("master", "exp_avg", "exp_avg_sq")
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
    def test_every_file_of_every_part_is_looked_at(self) -> None:
        backend = on_three_drives()
        for part in parts_of(backend):
            for name in ("part.json", *(f"{array}.safetensors" for array in ARRAYS)):
                path = f"{part}/{name}"
                data = read(backend, path)
                flip(backend, path, 12)
                with pytest.raises(CheckpointError, match=path):
                    open_checkpoint(NEWEST, backend=backend)
                backend.remove(path)
                with pytest.raises(CheckpointError, match=path):
                    open_checkpoint(NEWEST, backend=backend)
                write(backend, path, data)
        open_checkpoint(NEWEST, backend=backend).close()

    def test_a_part_that_cannot_be_read_is_not_called_damaged(self) -> None:
        backend = FaultBackend(on_three_drives())
        (_, part) = parts_of(backend)
        backend.fail_if(lambda kind, path: (kind, path) == ("open", f"{part}/part.json"))
        with pytest.raises(UnreadableError, match="not known whether its content is damaged"):
            open_checkpoint(NEWEST, backend=backend)
        open_checkpoint(NEWEST, backend=backend).close()
        backend.close()

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
        """In any order, and one that has no parts may be among them."""
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
        backend.make_dir("/new")
        model = make_model(60, 80, 40, seed=1)
        assert load_parameters(model, STORE, parts=["/b", "/a", "/new"], backend=backend) == 1


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
            (reason,) = report.unreadable
            assert path in reason
            assert opened.verify().ok
        backend.close()

    @pytest.mark.parametrize("given", [None, DRIVES[1:]], ids=["recorded", "given"])
    def test_a_part_that_is_damaged_after_opening_is_found(self, given: list[str] | None) -> None:
        backend = on_three_drives()
        path = f"{parts_of(backend)[1]}/part.json"
        with open_checkpoint(NEWEST, parts=given, backend=backend) as opened:
            flip(backend, path, 12)
            report = opened.verify()
        (problem,) = report.problems
        assert path in problem
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


class _Counting(WrapperBackend):
    """Notes the largest read of a file's content."""

    largest = 0

    def wrap_file(self, file: File) -> File:
        return _CountedFile(file, self)


class _CountedFile(WrapperFile):
    def __init__(self, inner: File, backend: _Counting) -> None:
        super().__init__(inner)
        self._backend = backend

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        self._backend.largest = max(self._backend.largest, nbytes)
        return super().read_bytes(offset, nbytes)

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        self._backend.largest = max(self._backend.largest, into.nbytes)
        return super().read_again(into, offset, direct=direct)


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new)

    return change


class TestTrainState:
    @pytest.mark.parametrize(
        ("text", "error", "words"),
        [
            ('{"$":"new"}', TrainStateTagError, f"^{TRAIN_STATE}: .*'new'"),
            ('{"$":"tuple"}', DamagedError, f"^{TRAIN_STATE}: damaged: train_state"),
        ],
        ids=["of a later version", "not understood"],
    )
    def test_one_that_says_what_nobody_knows_although_its_digest_is_right(
        self, text: str, error: type[Exception], words: str
    ) -> None:
        backend = memory_store(1)
        with open_checkpoint(NEWEST, backend=backend) as opened:
            nbytes = opened.files["train_state.safetensors"]
            packed = pack_train_state(EncodedState(text, {}), opened.manifest, nbytes)
            overwrite(backend, TRAIN_STATE, packed)
            with pytest.raises(error, match=words):
                _ = opened.train_states

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (replaced(b'state_format":"1"', b'state_format":"2"'), "train_state_format is '2'"),
            (replaced(b'\\"step\\":1', b'\\"step\\":4'), "the content has the digest"),
            (replaced(b'"__metadata__"', b'"__metadatA__"'), ""),
            (lambda data: data[:100] + b"\0" + data[101:], "zero bytes in its header"),
        ],
        ids=["another version", "another value", "no header", "a hole"],
    )
    def test_content_that_was_not_written_is_damage(
        self, change: Callable[[bytes], bytes], reason: str
    ) -> None:
        backend = memory_store(1)
        overwrite(backend, TRAIN_STATE, change(read(backend, TRAIN_STATE)))
        with open_checkpoint(NEWEST, backend=backend) as opened:
            with pytest.raises(DamagedError, match=rf"^{TRAIN_STATE}: damaged: .*{reason}"):
                _ = opened.train_state
            assert any(TRAIN_STATE.rpartition("/")[2] in one for one in opened.verify().problems)


class TestManifest:
    def test_a_hole_is_found_before_the_rest_is_read(self) -> None:
        """The first block says enough, so that no memory is taken for what a file claims to be."""
        backend = _Counting(memory_store(1))
        write(backend, MANIFEST, bytes(1 << 20))
        with pytest.raises(ManifestError, match="zero bytes"):
            open_checkpoint(NEWEST, backend=backend)
        assert 0 < backend.largest <= 4096

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
