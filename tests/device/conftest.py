"""The kernels, compiled once for the tests of a run."""

from tests.device.fixtures import *  # noqa: F403
