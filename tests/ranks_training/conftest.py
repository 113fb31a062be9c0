"""The server of ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks_training.rank_server import Jobs


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    """Return a server of ranks."""
    server = Jobs()
    yield server
    server.close()
