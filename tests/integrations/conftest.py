"""As in `tests/numerics`: small tensors on many threads are slow."""

from tests.numerics.conftest import one_thread

__all__ = ["one_thread"]
