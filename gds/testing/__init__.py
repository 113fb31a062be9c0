"""The contract of a storage backend as tests: subclass `BackendContract` and provide a backend.

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

Hooks that a backend cannot offer skip the tests that need them. Needs pytest. This wing may know
`contract`, `errors` and `buffers`, and no backend.
"""

import pytest

pytest.register_assert_rewrite(
    "gds.testing._clones", "gds.testing._harness", "gds.testing._names", "gds.testing._transfers"
)

from gds.testing._clones import CloneContract  # noqa: E402 - after the rewriting is set up
from gds.testing._harness import Harness  # noqa: E402
from gds.testing._names import NamesContract  # noqa: E402
from gds.testing._transfers import TransferContract  # noqa: E402

__all__ = ["BackendContract", "CloneContract", "Harness", "NamesContract", "TransferContract"]


class BackendContract(TransferContract, CloneContract, NamesContract):
    """Everything that `gds.Backend` promises, except durability, which needs a crash."""
