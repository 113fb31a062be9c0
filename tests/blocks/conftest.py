"""The device that is not there, for blocks that are streamed to it."""

from tests.placement.conftest import device  # noqa: F401
