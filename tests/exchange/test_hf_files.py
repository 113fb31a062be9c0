"""Files that describe a model, beside a checkpoint: writes that fail, and slots that are reused."""

from __future__ import annotations

from pathlib import Path

import pytest

import offload
from gds import MemoryBackend, StorageError
from offload.errors import CheckpointError
from tests.crash.fault_backend import KINDS, FaultBackend
from tests.stores.small import STORE, make_model, make_optimizer, train

CONFIG, TEMPLATE = b'{"model_type": "gpt2"}', b"a template"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory that describes a model."""
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / "chat_template.jinja").write_bytes(TEMPLATE)
    return tmp_path


def content(backend: MemoryBackend | FaultBackend, path: str) -> bytes:
    with backend.open(path) as file:
        return file.read_bytes(0, file.size_bytes)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_fails_the_checkpoint_is_whole_and_no_file_is_partial(folder, kind):
    nth = 0
    while True:
        nth += 1
        backend = FaultBackend(MemoryBackend())
        with make_optimizer(make_model(), backend) as optimizer:
            train(optimizer, 1)
            sealed = optimizer.checkpoint().result()
            backend.fail(kind, nth, forever=True)
            try:
                offload.add_hf_files(sealed, folder)
                failed = False
            except StorageError:
                failed = True
            backend.repair()
            for name, expected in (("config.json", CONFIG), ("chat_template.jinja", TEMPLATE)):
                path = f"{sealed.path}/{name}"
                assert (
                    not failed or backend.stat(path) is None or content(backend, path) == expected
                )
            assert sealed.verify().ok
            offload.add_hf_files(sealed, folder)  # as at the next save
            assert content(backend, f"{sealed.path}/config.json") == CONFIG
            assert [name for name in backend.list_dir(sealed.path) if name.endswith(".new")] == []
            train(optimizer, 2)
        if not failed:
            return


@pytest.mark.parametrize(("mark", "again"), [(None, True), ("damaged.txt", False)])
def test_a_slot_that_a_process_has_left_is_used_again_without_these_files(folder, mark, again):
    """Unless it is marked as damaged: its space may be bad."""
    backend = MemoryBackend()
    with make_optimizer(make_model(), backend, keep=1) as optimizer:
        for _ in range(3):
            train(optimizer, 1, seal_at=())
            offload.add_hf_files(optimizer.checkpoint().result(), folder)
        train(optimizer, 1, seal_at=())
    slots = [n for n in backend.list_dir(STORE) if n.startswith(".slot-")]
    (slot,) = [n for n in slots if "config.json" in backend.list_dir(f"{STORE}/{n}")]
    inode = backend.stat(f"{STORE}/{slot}").inode
    if mark is not None:
        backend.create(f"{STORE}/{slot}/{mark}", 1).close()

    backend = backend.reopened()
    with make_optimizer(make_model(), backend, keep=1) as optimizer:
        optimizer.restore()
        (path,) = train(optimizer, 1)
        assert (backend.stat(path).inode == inode) == again, "space given back and taken again"
        assert not {"config.json", "damaged.txt"} & {*backend.list_dir(path)}


def test_a_checkpoint_without_names_of_a_model_is_not_described(folder, tmp_path_factory):
    """`from_pretrained` would return random parameters, with no more than a warning."""
    place = tmp_path_factory.mktemp("unnamed")
    with make_optimizer(make_model(), directory=place / "run", model=None) as optimizer:
        train(optimizer, 1)
        optimizer.checkpoint().result()
    sealed = offload.open_checkpoint(place / "run")
    assert not sealed.has_model_names
    with pytest.raises(CheckpointError, match=r"group0\.param0\).*pass model= to the optimizer"):
        offload.add_hf_files(sealed, folder)
    with pytest.raises(CheckpointError, match="pass model= to the optimizer"):
        offload.export_checkpoint(sealed, place / "exported", "hf", config=folder)
    assert not (place / "exported").exists()
    assert "config.json" not in {path.name for path in Path(sealed.path).iterdir()}
    offload.export_checkpoint(sealed, place / "exported", "hf")
    sealed.close()
