"""Processes of their own for a small training run and for the command line.

python -m tests.exchange.commands      # serves them, as tests.forking says
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import offload
from offload.cli import main
from tests.forking import Children, serve
from tests.stores.small import make_mixed_model, step

NUM_STEPS: Final = 3
IMPORTED_BY_COMMANDS: Final = (
    "offload.exchange.exporting",
    "offload.exchange.importing",
    "torch.distributed.checkpoint",
)
"""Modules that a command imports when it needs them: the server does, once for all children."""


def train(directory: str) -> None:
    """Train for some steps, and leave their checkpoint in ``run``."""
    model = make_mixed_model()
    settings = {"lr": 0.01, "directory": f"{directory}/run", "model": model}
    with offload.AdamW(model.named_parameters(), **settings) as optimizer:
        for number in range(NUM_STEPS):
            step(optimizer, number)
        optimizer.checkpoint().result()


def command(directory: str) -> None:
    """Run ``offload`` with the arguments that are in ``arguments``; ends with its status."""
    warnings.simplefilter("default")  # as in a program of a user
    sys.argv = ["offload", *json.loads(Path(directory, "arguments").read_text())]
    main()


class Commands:
    """The tests' side: each call has a process of its own.

    Args:
        children: Server of the processes.
        directory: Directory for what the processes are told and what they print.
    """

    def __init__(self, children: Children, directory: Path) -> None:
        self._children = children
        self._directory = directory

    def train(self) -> Path:
        """Train in a new process; return the store."""
        ended = self._children.run(train, self._directory)
        assert ended.status == 0, ended.output
        return self._directory / "run"

    def offload(self, *arguments: str | Path) -> str:
        """Run a command, which must succeed, in a new process; return what it printed."""
        (self._directory / "arguments").write_text(json.dumps([*map(str, arguments)]))
        ended = self._children.run(command, self._directory)
        assert ended.status == 0, ended.output
        return ended.output


@contextmanager
def commands_in(directory: Path) -> Iterator[Commands]:
    """Start the server, and end it afterwards."""
    children = Children("tests.exchange.commands")
    try:
        yield Commands(children, directory)
    finally:
        children.close()


if __name__ == "__main__":
    for module in IMPORTED_BY_COMMANDS:
        importlib.import_module(module)
    serve(globals())
