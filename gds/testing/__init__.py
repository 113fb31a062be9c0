"""Tests of the contract of a storage backend: subclass `BackendContract` and provide a backend.

Example::

    class TestMine(BackendContract):
        @pytest.fixture
        def directory(self, tmp_path: Path) -> str:
            return str(tmp_path)

        @pytest.fixture
        def backend(self, directory: str) -> Iterator[Backend]:
            backend = MyBackend()
            yield backend
            backend.close()

A test is skipped if it needs a hook that the subclass does not provide. The tests need pytest. This
wing may know `buffers`, `contract` and `errors`, and no backend.
"""

import pytest

pytest.register_assert_rewrite(
    "gds.testing._clones",
    "gds.testing._harness",
    "gds.testing._locks",
    "gds.testing._names",
    "gds.testing._transfers",
)

from gds.testing._clones import CloneContract  # noqa: E402 - assertion rewriting comes first
from gds.testing._harness import Harness  # noqa: E402
from gds.testing._locks import LockContract  # noqa: E402
from gds.testing._names import NamesContract  # noqa: E402
from gds.testing._transfers import TransferContract  # noqa: E402

__all__ = [
    "BackendContract",
    "CloneContract",
    "Harness",
    "LockContract",
    "NamesContract",
    "TransferContract",
]


class BackendContract(TransferContract, CloneContract, NamesContract, LockContract):
    """Tests of all promises of `gds.Backend`, except durability, whose test needs a crash."""
