"""File systems that another machine or a program serves: refused by name, unless asked for."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from gds import MemoryBackend, PosixBackend, WrapperBackend, probe
from gds.contract import Capabilities
from gds.probe import DirectIOUnavailable
from offload import open_checkpoint
from offload.errors import RemoteStoreError, StoreError
from tests.kernel import fuse
from tests.stores.training import Model, Reference, backward, differences, optimizer_for, options

ROOT = Path(__file__).parents[2]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Path]:
    if reason := fuse.why_not():
        pytest.skip(reason)
    with fuse.mounted(tmp_path) as point:
        yield point


@pytest.mark.parametrize("exists", [False, True], ids=["new", "there"])
def test_a_store_on_fuse_is_refused_by_name(served: Path, exists: bool) -> None:
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


def test_a_second_directory_on_fuse_is_refused_before_the_first_is_made(
    served: Path, tmp_path: Path
) -> None:
    with pytest.raises(RemoteStoreError) as error:
        optimizer_for(Model(), [str(tmp_path / "run"), str(served / "run")], options())
    assert error.value.filename == str(served / "run")
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


def test_gds_says_the_same_of_it(served: Path) -> None:
    words = probe.describe_remote(probe.mount_of(str(served)).filesystem)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DirectIOUnavailable)
        assert PosixBackend().capabilities(str(served)).remote
    checked = gds("check", "--json", str(served))
    findings = json.loads(checked.stdout)["findings"]
    (found,) = (one for one in findings if one["what"] == "file system")
    assert (found["verdict"], found["why"]) == ("limits", words)
    measured = gds(
        "bench", "--json", "--size=64K", "--file-size=1M", "--allow-small", "--path=buffered",
        str(served),
    )  # fmt: skip
    assert words in " ".join(measured.stderr.split())
    assert json.loads(measured.stdout)["target"]["filesystem"] == "fuse"


def gds(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gds.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


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
