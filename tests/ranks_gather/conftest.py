"""Fixtures of the tests of gathering."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks_gather.ranks import Run, runner
from tests.ranks_training.conftest import jobs
from tests.ranks_training.rank_server import Jobs

__all__ = ["jobs"]


@pytest.fixture
def run(jobs: Jobs, tmp_path: Path) -> Run:
    """Run a function on several ranks."""
    return runner(jobs, tmp_path)
