"""Programs that end while a step runs beside the model."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gds import PosixBackend
from offload import open_checkpoint
from tests.crash import children as child
from tests.forking import Children
from tests.stores.training import Reference, differences


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    server = Children("tests.crash.children")
    yield server
    server.close()


@pytest.mark.parametrize(
    ("work", "status", "step"),
    [
        (child.end_while_stepping, 0, 3),
        (child.end_by_an_error_while_stepping, 1, 3),
        (child.killed_while_stepping, -signal.SIGKILL, 2),
        (child.fork_while_stepping, 0, 3),
        (child.end_amid_a_backward, 1, 2),
    ],
    ids=["end", "uncaught-error", "killed", "forked", "amid-a-backward"],
)
def test_what_was_asked_for_is_there(
    work: Callable[[str], None],
    status: int,
    step: int,
    children: Children,
    tmp_path: Path,
) -> None:
    ended = children.run(work, tmp_path)
    assert ended.status is not None, "it hangs"
    assert os.waitstatus_to_exitcode(ended.status) == status, ended.output
    if work is child.fork_while_stepping:
        assert ended.output.startswith("OffloadError: a step was running beside the model")
        assert "call synchronize() before forking" in ended.output
    with open_checkpoint(tmp_path / "run") as found:
        assert found.train_state == {"step": step}
        assert differences(found, PosixBackend(), Reference().after(step)) == []
