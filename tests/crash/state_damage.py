"""A bit of a checkpoint that flips while nobody looks, and a process that has to find it."""

from __future__ import annotations

from dataclasses import dataclass

from gds import Backend
from offload import (
    CheckpointError,
    DamagedError,
    MismatchError,
    open_checkpoint,
)
from tests.crash.state_model import Step, set_gradients
from tests.crash.state_process import StoreProcess, Uid, num_done
from tests.stores.files import flip as flip_bit

_READ_AT_ONCE = ("manifest.json", "part.json", "model.safetensors", "train_state.safetensors")
_UNUSABLE = (CheckpointError, MismatchError)
"""What `restore` may say if a checkpoint is damaged: none is left, or it has other groups."""


@dataclass(frozen=True)
class Flip:
    """Which bit flips, of files that are given later."""

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
        stat = backend.stat(path)
        assert stat is not None
        flip_bit(backend, path, int(self.place * stat.size_bytes), 1 << self.bit)


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


class DamagedStore(StoreProcess):
    """A process whose store gets damaged between two others."""

    def damage_one(self, uid: Uid, flip: Flip) -> None:
        """Flip a bit of a checkpoint; unless it is of no consequence a process has to find it."""
        path = self.path_of(uid)
        file = flip.path(self.log, path)
        flip.apply(self.log, file)
        found = problems(self.log.inner, path)
        if found:
            assert file in found
            num_done["flips"] += 1
        else:  # where no parameter has state yet nothing was written
            assert is_state(file), f"{file}: {flip} is not noticed"
        if found and [uid] == self.listed[-1:] and self.is_given_up(uid, file):
            self.damaged[path] = uid
            del self.listed[-1]
            self.promised = frozenset({self.listed[-1]})
        else:  # of no consequence; or not the newest; or there is none left: it is repaired
            flip.apply(self.log, file)
            if self.log.stat(f"{path}/damaged.txt") is not None:
                self.log.remove(f"{path}/damaged.txt")
            self.log.sync_dir(path)
            assert problems(self.log.inner, path) == ""

    def is_given_up(self, uid: Uid, file: str) -> bool:
        """Let a process find out that the newest is damaged; returns whether there is another."""
        older = self.listed[-2:-1]
        with_head = self.begin_process()
        checkpoint, error = self.attempt(lambda: self.optimizer.restore(), refusal=_UNUSABLE)
        if checkpoint is not None and checkpoint.train_state["uid"] == uid:
            assert is_state(file), f"{file}: restored, though it is damaged"
            set_gradients(self.model, Step(0), with_head=with_head)
            _, error = self.attempt(self.step_and_wait, refusal=(DamagedError,))
            assert error is not None, f"{file}: trained on, though it is damaged"
            assert file in str(error)
            checkpoint, error = self.attempt(lambda: self.optimizer.restore(), refusal=_UNUSABLE)
        if isinstance(error, MismatchError):
            assert any(self.sealed[u].with_head != with_head for u in older)
        elif error is not None:
            assert older == [], error
        else:
            assert [checkpoint.train_state["uid"]] == older
        self.optimizer.close()
        self.end()
        return older != []

    def step_and_wait(self) -> None:
        self.optimizer.step()
        self.optimizer.synchronize()
