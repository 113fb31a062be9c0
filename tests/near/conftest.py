"""One server for all tests of a module that do not end it, and two for all tests of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.near.peers import Recorded
from tests.near.servers import Server, serving
from tests.ranks_training.rank_server import Jobs
from tests.threads import one_thread as one_thread


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that all tests of a module use; it lives on to the end, and shows no traceback."""
    with serving(tmp_path_factory.mktemp("server")) as found:
        yield found
        assert found.process.poll() is None, found.said()


@pytest.fixture(scope="module")
def recorded(server: Server) -> Recorded:
    """What a real client has sent."""
    return Recorded(server)


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    """Return a server of ranks."""
    found = Jobs()
    yield found
    found.close()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers, with a directory each; who kills one starts it again."""
    folder = tmp_path_factory.mktemp("servers")
    with serving(folder / "0") as first, serving(folder / "1") as other:
        yield [first, other]


@pytest.fixture
def urls(servers: list[Server], request: pytest.FixtureRequest) -> list[str]:
    """Runs on both servers that no other test has."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[:90]
    return [server.url(name) for server in servers]
