"""Stores, tiers on servers of this machine, and a proxy in between."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.cli import main
from offload.tiers import arriving, background
from tests.campaigns import FULL
from tests.command_line import Run, runner
from tests.ranks_training.rank_server import Jobs
from tests.stores.small import train
from tests.tiers import servers
from tests.tiers.copies import optimizer_in
from tests.tiers.proxy import Proxy
from tests.tiers.rank_jobs import Sent


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the checkpoints of steps 1 to 3."""
    store = tmp_path_factory.mktemp("trained") / "store"
    with optimizer_in(store) as optimizer:
        train(optimizer, 3, losses={1: 3.0, 2: 1.0, 3: 2.0})
    return store


@pytest.fixture
def store(trained: Path, tmp_path: Path) -> Path:
    """A copy of the store."""
    return Path(shutil.copytree(trained, tmp_path / "store"))


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that a user of S3 has."""
    for name, value in servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests beside training that fail are given up soon."""
    monkeypatch.setattr(background, "RETRY_S", 0.2)
    monkeypatch.setattr(arriving, "DEFAULT_RETRY_S", 0.2)


@pytest.fixture(scope="session")
def moto() -> Iterator[tuple[str, int]]:
    """A server of S3 in this process."""
    with servers.moto() as place:
        servers.make_bucket(*place, "bucket")
        yield place


@pytest.fixture(scope="session")
def juicefs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """JuiceFS's gateway of S3."""
    with servers.juicefs(tmp_path_factory.mktemp("juicefs")) as place:
        yield place


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Microsoft's emulator of Azure Blob Storage."""
    program = servers.find_azurite()
    if program is None:
        pytest.skip("Azurite is not installed; `make integration` installs it where npm is")
    with servers.azurite(tmp_path_factory.mktemp("azurite"), program) as place:
        yield place


@pytest.fixture
def s3(moto: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty tier on moto."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{moto[0]}:{moto[1]}")
    return f"s3://bucket/{uuid.uuid4().hex}/run"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """URL of an empty tier on a mounted drive."""
    (tmp_path / "mounted" / "lost+found").mkdir(parents=True)
    return f"file://{tmp_path}/mounted/tier"


@pytest.fixture
def proxy(s3: str, moto: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before moto, by way of which `s3` is reached."""
    proxy = Proxy(*moto)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.close()


@pytest.fixture(params=["folder", "s3", *(["juicefs", "azurite"] if FULL else [])])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty tier of each kind; JuiceFS's gateway and Azurite in the full run only.

    It is for what each kind must do. All else is shown on one of them.
    """
    given = request.getfixturevalue(request.param)
    if isinstance(given, str):
        return given
    name, (host, port) = uuid.uuid4().hex, given
    if request.param == "juicefs":
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        return f"s3://tier/{name}/run"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", servers.AZURE_ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", servers.AZURE_KEY)
    endpoint = f"http://{host}:{port}/{servers.AZURE_ACCOUNT}"
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
    return f"az://bucket/{name}/run"


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    """A server that forks ranks, and processes that tests kill."""
    server = Jobs()
    yield server
    server.close()


@pytest.fixture(scope="session")
def all_sent(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Sent:
    return Sent(jobs, tmp_path_factory.mktemp("sent"))


@pytest.fixture
def origin(all_sent: Sent, proxy: Proxy) -> Sent:
    """What ranks have sent; it was not asked for by way of a faulty link."""
    return all_sent


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process; gives its status, standard output and error."""
    return runner("offload", main, monkeypatch, capsys)
