"""Processes of their own for a small training run and for the command line.

python -m tests.exchange.commands      # serves them, as tests.forking says
"""

import importlib
import json
import sys
import warnings
from pathlib import Path

import offload
from offload.cli import main
from tests.forking import serve
from tests.stores.small import make_mixed_model, step

IMPORTED_BY_COMMANDS = (
    "offload.exchange.exporting",
    "offload.exchange.importing",
    "torch.distributed.checkpoint",
)
"""Modules that a command imports when it needs them: the server does, once for all children."""


def train(directory: str) -> None:
    """Train for three steps, and leave their checkpoint in ``run``."""
    model = make_mixed_model()
    settings = {"lr": 0.01, "directory": f"{directory}/run", "model": model}
    with offload.AdamW(model.named_parameters(), **settings) as optimizer:
        for number in range(3):
            step(optimizer, number)
        optimizer.checkpoint().result()


def command(directory: str) -> None:
    """Run ``offload`` with the arguments that are in ``arguments``; ends with its status."""
    warnings.simplefilter("default")  # as in a program of a user
    sys.argv = ["offload", *json.loads(Path(directory, "arguments").read_text())]
    main()


if __name__ == "__main__":
    for module in IMPORTED_BY_COMMANDS:
        importlib.import_module(module)
    serve(globals())
