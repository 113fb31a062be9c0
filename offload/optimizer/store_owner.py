"""Guards of an optimizer that owns a store: one call at a time, no copies, and an orderly end.

Garbage collection runs on any thread that allocates, in the middle of any operation. On that
thread, an engine may be unable to wait for its own threads, or to start another thread.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NoReturn, Self

import torch

from offload.ambient import in_neutral, neutral
from offload.engine.engine import Engine
from offload.errors import OffloadError
from offload.interactive import html_table, names_to_offer
from offload.record.recorder import Recorder
from offload.tiers.background import BackgroundUploads
from offload.tiers.rank_uploads import FollowingUploads
from offload.units import count

_NOT_OFFERED = frozenset(
    (
        *("OptimizerPostHook", "OptimizerPreHook", "profile_hook_step"),  # torch's own
        *("torch_form", "upload_sealed"),  # for integrations
    )
)
"""Public names of an optimizer that a training loop does not use."""

_SHOWN_GROUPS = 4
"""Number of parameter groups whose learning rates a notebook shows."""


class StoreOwner(torch.optim.Optimizer):
    """A torch optimizer with an engine, which holds the store until `close`."""

    _engine: Engine | None
    """Engine of the optimizer; None while the constructor runs."""

    _finalizer: weakref.finalize[..., Any]
    """Closes the engine if the optimizer is garbage-collected."""

    _uploads: BackgroundUploads | FollowingUploads | None
    """Uploads of checkpoints to a tier; None if there is no tier."""

    _recorder: Recorder | None
    """Recorder of the run for `offload top`; None if nothing is recorded."""

    _finish_s: float
    """Longest time in seconds that `close` waits for uploads."""

    _running: str
    """Name of the public method that is running; empty if none is."""

    def close(self) -> None:
        """Wait for all work in flight, and release the store. Idempotent.

        Raises:
            SealError: The last checkpoint could not be sealed.
        """
        if self._engine is not None:
            try:
                with self._exclusive("close") as engine:
                    engine.close()
            finally:
                self._stop_recording()
            self._finalizer.detach()
        if self._uploads is not None:
            self._uploads.wait(self._finish_s)
            self._uploads.stop()

    def __repr__(self) -> str:
        """Return one line with the place and size of the state, followed by torch's lines."""
        engine = getattr(self, "_engine", None)
        if engine is None:  # the constructor has not ended, or has failed
            return f"<{type(self).__name__} without a store>"
        return f"{type(self).__name__} in {engine.describe()}\n{super().__repr__()}"

    def _repr_html_(self) -> str:
        """Return a table for notebooks; it waits for nothing and looks at no drive."""
        engine = getattr(self, "_engine", None)
        if engine is None:
            return html_table(type(self).__name__, {"store": "none"})
        groups = self.param_groups
        rates = ", ".join(f"{float(g['lr']):g}" for g in groups[:_SHOWN_GROUPS] if "lr" in g)
        checkpoints = engine.store.checkpoints
        return html_table(
            type(self).__name__,
            {
                "store": engine.describe(),
                "parameters": count(sum(p.numel() for g in groups for p in g["params"])),
                "groups": len(groups),
                "learning rate": rates + (", ..." if len(groups) > _SHOWN_GROUPS else ""),
                "checkpoints": ", ".join(str(one.manifest.step) for one in checkpoints),
            },
        )

    def __dir__(self) -> list[str]:
        return names_to_offer(super().__dir__(), _NOT_OFFERED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif self._engine is not None:
            close_quietly(self._engine)  # the error that is being raised says more
            self._stop_recording()
            if self._uploads is not None:
                self._uploads.stop()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: its state is a directory that one "
            "process owns. To move a run, copy the directory; to keep a point in time, call "
            "checkpoint()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__getstate__()

    def _stop_recording(self) -> None:
        """Record the end of the run, unless `close` was interrupted and will be called again."""
        engine, recorder = self._engine, self._recorder
        if recorder is not None and engine is not None and engine.state.lifecycle.is_over:
            recorder.stop()

    @contextmanager
    def _exclusive(self, name: str) -> Iterator[Engine]:
        """Yield the engine, within `neutral`, and refuse a call during another call.

        Signal handlers run between two instructions of a step, and a checkpoint made in one would
        be of half a step.

        Args:
            name: Name of the public method.
        """
        if self._running:
            raise OffloadError(
                f"{name}() was called while {self._running}() of the same optimizer is running, "
                "by a signal handler or another thread, so the state is incomplete. Set a flag "
                f"instead, check it after the step, and call {name}() then"
            )
        self._running = name
        try:
            engine = self._live_engine()
            engine.state.begin_call(f"{name}()")
            with neutral(keep_denormals=name == "step"):
                yield engine
        finally:
            self._running = ""

    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the optimizer has not been constructed")
        return self._engine


_OWN_THREADS = ("offload", "gds-")
"""Beginnings of the names of threads of this library, which `Engine.close` may wait for."""

_CLOSING_THREAD = "offload-close"

_left_open: list[Engine] = []
"""Engines of optimizers that were collected on a thread that cannot wait for others."""


@in_neutral
def close_quietly(engine: Engine) -> None:
    """Close an engine, on this thread or another, now or later; errors are only logged."""
    if _is_starting_thread():
        _left_open.append(engine)
        return
    name = threading.current_thread().name
    if name.startswith(_OWN_THREADS) and name != _CLOSING_THREAD:
        with suppress(RuntimeError):  # at exit, no thread can be started or waited for
            threading.Thread(target=close_quietly, args=(engine,), name=_CLOSING_THREAD).start()
        return
    try:
        engine.close()
    except (OffloadError, OSError) as error:
        # No caller is left to catch the error. Checkpoints that were sealed before stay sealed.
        logging.getLogger("offload").error("%s: %s", engine.store.directory, error)


@atexit.register
def close_left_open() -> None:
    """Close the engines in `_left_open`; called when the next optimizer is made, and at exit."""
    while _left_open:
        close_quietly(_left_open.pop())


def _is_starting_thread() -> bool:
    """Return whether this thread has not finished starting."""
    # A thread that is being started holds locks that joining or starting another thread needs.
    # The functions of `threading` take those locks, so its own table is read instead.
    return threading.get_ident() not in getattr(threading, "_active", {threading.get_ident()})
