"""A bit of a checkpoint that flips while nobody looks."""

from __future__ import annotations

from dataclasses import dataclass

from gds import Backend
from offload import open_checkpoint
from offload.errors import CheckpointError

_READ_AT_ONCE = ("manifest.json", "part.json", "model.safetensors", "train_state.safetensors")


@dataclass(frozen=True)
class Flip:
    """Which bit, of files that are given later."""

    file: int
    """Which of them, counted round and round."""

    place: float
    """Where in the file: 0 for its first byte, below 1."""

    bit: int
    """Which of the byte, from 0 to 7."""

    def path(self, backend: Backend, checkpoint: str) -> str:
        """Choose a file of a sound checkpoint, or of its parts on other drives."""
        with open_checkpoint(checkpoint, backend=backend) as found:
            names = sorted(found.files)
        name = names[self.file % len(names)]
        return name if name.startswith("/") else f"{checkpoint}/{name}"

    def apply(self, backend: Backend, path: str) -> None:
        """Change the bit, durably; once more changes it back."""
        file = backend.open(path, writable=True)
        try:
            offset = int(self.place * file.size_bytes)
            (byte,) = file.read_bytes(offset, 1)
            file.write_bytes(bytes([byte ^ (1 << self.bit)]), offset)
            file.sync()
        finally:
            file.close()


def is_state(path: str) -> bool:
    """Return whether a file holds optimizer state, which is read when it is trained on."""
    return not path.endswith(_READ_AT_ONCE)


def problems(backend: Backend, checkpoint: str) -> str:
    """Return what a complete read of a checkpoint finds; empty if that is nothing."""
    try:
        with open_checkpoint(checkpoint, backend=backend) as found:
            return "; ".join(found.verify().problems)
    except CheckpointError as error:
        return str(error)
