"""Each rank of these tests has a store of its own, which the format does not have for users."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.rank import manifests_may_have_boxes


@pytest.fixture(autouse=True)
def boxes_in_manifests() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        manifests_may_have_boxes(patch)
        yield
