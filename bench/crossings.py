"""Count of calls between modules in steps, one checkpoint and one restore.

    python -m bench.crossings [--json]

`sys.setprofile` on the training thread counts each call of a function of `offload` by a function in
another file of `offload`. Functions of other packages in between are left out: a call that comes
back through torch counts as a call by the function that called torch. The model is one chunk, and
its store is in memory. A steady step is one that follows another step. The first step after a
checkpoint is counted by itself, because it takes a new working slot.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import offload
from gds import MemoryBackend

PACKAGE = str(Path(offload.__file__).parent)


class Crossings:
    """Counter of calls between files of the package while a function runs."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[str, str]] = Counter()
        self._stack: list[str] = []

    def count(self, function: Callable[[], object]) -> None:
        """Run a function, and add its calls between files."""
        sys.setprofile(self._note)
        try:
            function()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE):
            return
        if event == "call":
            if self._stack and self._stack[-1] != file:
                self.pairs[self._stack[-1], file] += 1
            self._stack.append(file)
        elif event == "return" and self._stack:
            self._stack.pop()

    def figures(self) -> dict[str, int]:
        """Return the number of calls between modules, and the number of modules in them."""
        modules = {file for pair in self.pairs for file in pair}
        return {"crossings": self.pairs.total(), "modules": len(modules)}


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 64).to(torch.bfloat16)


def _optimizer(model: torch.nn.Module, backend: MemoryBackend) -> Any:
    return offload.AdamW(
        model.parameters(),
        directory="/store",
        model=model,
        options=offload.Options(backend=backend, allow_volatile=True),
    )


def _backward(model: torch.nn.Module) -> None:
    model(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean().backward()


def measure() -> dict[str, dict[str, int]]:
    """Return the figures of steps, a checkpoint and a restore, by name."""
    backend, model = MemoryBackend(), _model()
    step, after, checkpoint, restore = (Crossings() for _ in range(4))
    with _optimizer(model, backend) as optimizer:
        for number in range(6):
            _backward(model)
            count = {3: after.count, 5: step.count}.get(number, _run)
            count(optimizer.step)
            optimizer.zero_grad()
            if number < 3:
                optimizer.checkpoint().result()
        checkpoint.count(lambda: optimizer.checkpoint().result())
    model = _model()
    with _optimizer(model, backend) as optimizer:
        restore.count(optimizer.restore)
    found = {
        "steady step": step,
        "step after a checkpoint": after,
        "checkpoint": checkpoint,
        "restore": restore,
    }
    return {name: crossings.figures() for name, crossings in found.items()}


def _run(function: Callable[[], object]) -> None:
    function()


def main() -> None:
    """Count, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    found = measure()
    if parser.parse_args().json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        print(f"{name:<24}{figures['crossings']:>5} crossings, {figures['modules']:>3} modules")


if __name__ == "__main__":
    main()
