"""File systems that another machine or a program serves: refused by name, unless asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gds import MemoryBackend, PosixBackend, WrapperBackend
from gds.contract import Capabilities
from offload import open_checkpoint
from offload.errors import RemoteStoreError, StoreError
from tests.kernel import fuse
from tests.stores.training import Model, Reference, backward, differences, optimizer_for, options


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Path]:
    if reason := fuse.why_not():
        pytest.skip(reason)
    with fuse.mounted(tmp_path) as point:
        yield point


@pytest.mark.parametrize("exists", [False, True], ids=["new", "there"])
def test_a_store_on_fuse_is_refused_by_name(served: Path, tmp_path: Path, exists: bool) -> None:
    store = served / "runs" / "run"
    if exists:
        store.mkdir(parents=True)
    before = sorted(served.rglob("*"))
    with pytest.raises(RemoteStoreError, match="files on fuse are served by a program") as error:
        optimizer_for(Model(), str(store), options())
    assert "options=Options(allow_remote=True)" in str(error.value)
    assert isinstance(error.value, StoreError)
    assert error.value.filename == str(store)
    assert sorted(served.rglob("*")) == before
    with pytest.raises(RemoteStoreError) as error:  # so is a second directory of a store
        optimizer_for(Model(), [str(tmp_path / "run"), str(store)], options())
    assert error.value.filename == str(store)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore::gds.probe.DirectIOUnavailable")
def test_it_is_taken_if_it_is_asked_for(served: Path) -> None:
    model = Model()
    with optimizer_for(model, str(served / "run"), options(allow_remote=True)) as optimizer:
        backward(model, 1)
        optimizer.step()
        optimizer.checkpoint().result()
    backend = PosixBackend(direct=False)
    with open_checkpoint(served / "run", backend=backend) as found:
        assert differences(found, backend, Reference().after(1)) == []
    backend.close()


class _Nfs(WrapperBackend):
    """Is what a backend says on a network file system."""

    def capabilities(self, directory: str) -> Capabilities:
        found = super().capabilities(directory)
        return Capabilities(
            backend=found.backend,
            filesystem="nfs4",
            direct=False,
            alignment=1,
            volatile=False,
            remote=True,
            device_memory=False,
            reason=found.reason,
        )


def test_a_network_file_system_is_refused_by_name() -> None:
    backend = _Nfs(MemoryBackend())
    with pytest.raises(RemoteStoreError, match="files on nfs4 are served by another machine"):
        optimizer_for(Model(), "/run", options(backend))
    assert backend.list_dir("/") == []
    optimizer_for(Model(), "/run", options(backend, allow_remote=True)).close()
