"""Make the stores anew, and record what becomes of them; see the package."""

from __future__ import annotations

import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tests.format.recorded_stores import (
    CHECKPOINT_STEP,
    HERE,
    LAST_STEP,
    SETTINGS,
    Model,
    optimizer_for,
    state_digests,
    stored_digests,
    train,
)


def make(name: str, directory: Path) -> dict[str, Any]:
    """Train, pack the store, and train on; returns the digests."""
    model = Model()
    with optimizer_for(model, directory / "run", name) as optimizer:
        train(model, optimizer, 1, CHECKPOINT_STEP)
        checkpoint = optimizer.checkpoint({"epoch": 1}).result()
        found = {"state": state_digests(checkpoint), "stored": stored_digests(checkpoint.path)}
    with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as archive:
        archive.add(directory / "run" / "LOCK", "run/LOCK")
        archive.add(checkpoint.path, f"run/{Path(checkpoint.path).name}")
    model = Model()
    with optimizer_for(model, directory / "run", name) as optimizer:
        optimizer.restore()
        train(model, optimizer, CHECKPOINT_STEP + 1, LAST_STEP)
        checkpoint = optimizer.checkpoint().result()
        found["state_after"] = state_digests(checkpoint)
        found["stored_after"] = stored_digests(checkpoint.path)
    return found


def main() -> None:
    """Make both."""
    expected = {}
    for name in SETTINGS:
        with tempfile.TemporaryDirectory() as directory:
            expected[name] = make(name, Path(directory))
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
