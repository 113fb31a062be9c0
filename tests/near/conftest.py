"""One server for all tests of a module that do not end it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.near.peers import Recorded
from tests.near.servers import Server, serving
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
