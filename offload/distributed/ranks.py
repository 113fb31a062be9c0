"""The ranks of one training. A process alone is all of them; `rank_group` extends this to several.

The engine makes the same calls whatever the number of ranks is, and does not know how they talk.
Training alone loads nothing else of this wing, and no process groups of torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, TypeVar, cast

import torch

from gds import Backend
from offload.device.boundary import Marks
from offload.errors import RanksError
from offload.format.boxes import Cut
from offload.format.manifest import Manifest
from offload.model.model_copy import ModelCopy
from offload.model.new_values import Step, Values
from offload.model.shards import Shards
from offload.model.stored import Stored
from offload.options import Options
from offload.retention.policy import Retention
from offload.store.opening import StoredCheckpoint
from offload.store.shared import Serving
from offload.store.slots.slot import Slot
from offload.store.state_store import StateSlot, StateStore
from offload.store.store import Store

T = TypeVar("T")

Drive: TypeAlias = tuple[Backend, str]
"""Backend and path of a directory of the store."""


class Ranks:
    """Ranks that train one model into one store: this process alone, unless a subclass has more.

    Every rank makes the same calls of the engine. What is *collective* waits for all ranks.
    """

    rank = 0
    """This rank, from 0."""

    size = 1
    """Number of ranks."""

    shards: Shards | None = None
    """Function that returns this rank's part of a tensor; None if there is one rank."""

    gathers: bool = False
    """Whether steps bring new values to other ranks that hold them as well."""

    cuts: Mapping[str, Cut] | None = None
    """Box of each parameter that this rank steps and stores, by name; None for whole ones."""

    def open_store(
        self, drives: Sequence[Drive], keep: Retention, options: Options, *, fresh: bool
    ) -> StateStore:
        """Open the store for writing. Collective; raises the errors of `Store`."""
        (backend, directory), *others = drives
        return Store(
            backend,
            directory,
            others,
            keep=keep,
            fresh=fresh,
            train_state_bytes=options.train_state_bytes,
            reader_timeout_s=options.reader_timeout_s,
            allow_volatile=options.allow_volatile,
            allow_remote=options.allow_remote,
        )

    def together(self, what: str, action: Callable[[], T]) -> T:
        """Do something on every rank, and return when it has succeeded on all of them. Collective.

        The action makes no collective call. If it fails on a rank, that rank raises its error, and
        the others one that names the rank and the cause, of the same class if it is one of this
        package. ``what`` is the call of the user, for messages.
        """
        del what
        return action()

    def everywhere(self, what: str, action: Callable[[], Any]) -> list[Any]:
        """Do something on every rank, and return what each of them says, by rank. Collective.

        The results are the same on all ranks. Each rank's is JSON; see `together` for the rest.
        """
        del what
        return [action()]

    def all(self, what: str, test: Callable[[], bool]) -> bool:
        """Return whether a test is true on all ranks. Collective; see `together`."""
        return all(self.everywhere(what, test))

    def union(self, what: str, find: Callable[[], Collection[int]]) -> Collection[int]:
        """Return all numbers from 0 that any rank finds, each once. Collective; see `together`."""

        def as_text() -> str:
            """Return the numbers of this rank as the bits of one, which may be large for JSON."""
            return f"{sum(1 << number for number in {*find()}):x}"

        found = 0
        for text in self.everywhere(what, as_text):
            found |= int(text, 16)
        return [number for number in range(found.bit_length()) if found >> number & 1]

    def choose(self, what: str, find: Callable[[], tuple[T, str]]) -> T:
        """Find something on every rank, and check that all ranks have found the same. Collective.

        ``find`` returns what this rank has found, and what that is in words; see `together`.
        """
        found: list[T] = []

        def in_words() -> str:
            """Find it, and return it in words."""
            value, words = find()
            found.append(value)
            return words

        said = self.everywhere(what, in_words)
        for rank, words in enumerate(said):
            if words != said[0]:
                raise RanksError(
                    f"{what}: rank 0 asks for {said[0]} and rank {rank} for {words}: make the same "
                    "call on every rank. Nothing was changed"
                )
        return found[0]

    def require_same(self, what: str, value: str) -> None:
        """Check that a value is the same on all ranks. Collective."""
        self.choose(what, lambda: (None, value))

    def progress(self) -> None:
        """Give a sign of progress, so that this rank does not count as lost. Cheap, never raises.

        Any thread may call it.
        """

    def measure(
        self, what: str, directory: str, state_bytes: int, action: Callable[[int], None]
    ) -> None:
        """Measure the drives of all ranks, each directory on one rank. Collective; see `together`.

        The action measures this rank's directory, if that is worth it for a state of the size that
        it is given: that of the largest state in the directory, or 0 if another rank has measured
        it by then. No other rank measures the same drive meanwhile.
        """
        del what, directory
        action(state_bytes)

    def begin_call(self, what: str, num_steps: int) -> None:
        """Record which call of the user begins, such as ``step()``, after how many steps."""

    def fail_seal(
        self, slot: StateSlot | None, step: int, error: Exception
    ) -> Callable[[], None] | None:
        """Begin a seal with the other ranks although it has failed on this one. Never waits.

        Training goes on in the slot; it is None if the state is torn. Returns a function that tells
        all ranks of the error and waits until they have ended the seal, on any thread; None if
        there is no other rank.
        """
        del slot, step, error
        return None

    def refuse_step(self, number: int, error: Exception, *, needs_slot: bool) -> None:
        """Take part, with an error, in a step that begins on all ranks. Collective, never raises.

        The other ranks raise an error that names this one, and no rank has taken the step.
        """

    def know(self, named: Sequence[tuple[str, torch.Tensor]], *, replaces: bool) -> None:
        """Decide who steps parameters that are new. Collective if there are any.

        ``named`` are all of the model and the optimizer; other objects may have replaced known ones
        if it ``replaces``.
        """

    def require_same_calls(self) -> None:
        """Check that no rank is in a call that this one, which is about to step, has not made.

        This waits for no rank, and finds what other ranks have said already.
        """

    def begin_step(self, terms: Step) -> Values | None:
        """Agree with all ranks on a step that begins, if new values are gathered. Collective."""
        del terms
        return None

    def model_copy(
        self, slot: StateSlot, stored: Sequence[Stored], marks: Marks
    ) -> ModelCopy | None:
        """Return the copy of this rank's share of the model; None for a copy of the whole model."""
        del slot, stored, marks
        return None

    def has_same_model(self, checkpoint: StoredCheckpoint, stored: Sequence[Stored]) -> bool | None:
        """Return whether this rank's share of the model equals a checkpoint's, bit for bit.

        None if the whole model is to be compared.
        """
        del checkpoint, stored
        return None

    def check_model(self, checkpoint: StoredCheckpoint) -> None:
        """Check, before anything changes, that this rank's host sees its share of the model."""

    def as_checkpoint(
        self, path: str, manifest: Manifest, own: Manifest, slot: StateSlot
    ) -> AbstractContextManager[StoredCheckpoint]:
        """Use a slot that is about to become a checkpoint as one, in a ``with`` block.

        ``own`` is its manifest with the layout of this rank's state.
        """
        del manifest
        return nullcontext(StoredCheckpoint(path, own, cast(Slot, slot)))

    def load_model(self, checkpoint: StoredCheckpoint, stored: Sequence[Stored]) -> int | None:
        """Load this rank's share of a checkpoint's model; return the number of bytes read.

        `share_model` must follow, on all ranks, if all have loaded their share. None if the whole
        model is to be loaded.
        """
        del checkpoint, stored
        return None

    def share_model(self, stored: Sequence[Stored]) -> None:
        """Bring loaded tensors to all ranks that hold them. Collective."""

    def share_state(self, tensors: Sequence[tuple[str, str, torch.Tensor]]) -> None:
        """Bring the boxes of tensors from the rank that steps each box to all that hold it.

        Collective, if any part of the model is on several ranks.
        """

    def serving(self) -> Serving | None:
        """Return which rank serves which part of the open store; None for one process."""
        return None

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that a step has failed here. Never waits, never raises."""

    def close(self, error: BaseException | None = None) -> None:
        """Leave the ranks, and tell them so, and why if it is because of an error. Idempotent.

        This is no exchange: other ranks may have ended already.
        """

    @contextmanager
    def leaving_on_error(self) -> Iterator[None]:
        """Leave the ranks if the block raises; the others are told the error."""
        try:
            yield
        except BaseException as error:
            self.close(error)
            raise

    def warn_together(self, call: str, message: str, level: int) -> None:
        """Warn on this rank, if there is something to warn of. Collective.

        With Python's ``-W error`` a warning ends the call on the rank that has it. The other ranks
        must not go on, and wait for that rank.
        """
        errors: list[Warning] = []
        if message:
            try:
                warnings.warn(message, RuntimeWarning, stacklevel=level + 1)
            except RuntimeWarning as error:
                errors.append(error)

        def settle() -> None:
            for error in errors:
                raise error

        self.together(call, settle)
