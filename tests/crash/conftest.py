"""One thread: these tensors are too small to share out, and runs must be the same to the bit."""

from tests.threads import one_thread

__all__ = ["one_thread"]
