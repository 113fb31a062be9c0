"""A client, its server or both are killed: nothing that was sealed is lost, nor any bit changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random

import pytest

from tests.near.kills import WHEN, WHO, Killing

SEED = int(os.environ.get("NEAR_SEED", "20261129"))


@pytest.fixture(scope="module")
def killing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killing]:
    """A server that is started again when it is killed."""
    found = Killing(tmp_path_factory.mktemp("killed"), Random(SEED))
    yield found
    found.close()
    assert "Traceback" not in found.server.said()


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("who", WHO)
def test_the_run_goes_on_to_the_same_bits(who: str, when: str, killing: Killing) -> None:
    before = killing.kills
    killing.train(f"{who}-{when}", who, when)
    assert killing.kills == before + 1
