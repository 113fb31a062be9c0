"""The thread that records a run. Training does nothing for it, not even in a step.

Once a second the thread looks at counters that exist anyway, and replaces the status; every 30
seconds, and when a checkpoint has been sealed, it appends to the history. It takes well under a
millisecond of a second, and may wait for the drive as long as it likes: nobody waits for it, except
`Recorder.stop` for some seconds.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gds.waiting import start
from offload.errors import reason_of
from offload.journal import log_event
from offload.record.history import add_lines
from offload.record.status import Drive, SealedCheckpoint, Status, write_status

STATUS_S: Final = 1.0
"""Seconds between two replacements of the status."""

HISTORY_S: Final = 30.0
"""Seconds between two lines about steps in the history."""

_RECENT_S = 10.0
_RECENT_STEPS = 2
_MOST_SAMPLES = 300
"""Bounds of the time that `Status.recent` covers; see there."""

_SETTLE_S = 0.1
"""Seconds for which the line about a checkpoint is held back: a step that has waited for the seal
counts that only when it goes on."""

_STOP_S = 5.0

_MOST_CHECKPOINTS = 8

_PHASES = (
    "step_s",
    "beside_s",
    "compute_s",
    "wait_read_s",
    "wait_write_s",
    "wait_seal_s",
    "wait_device_s",
    "wait_update_s",
    "outside_s",
    "read_s",
    "write_s",
)
"""Totals that a line about steps has in ``seconds``."""

_GROWING = ("steps", "seals", "bytes_read", "bytes_written", *_PHASES)
"""Totals that only grow; others are of one call, or the most of something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a run is doing, as the optimizer says when it is asked."""

    step: int
    """Number of optimizer steps of the present state."""

    totals: Mapping[str, float]
    """All numbers of `Stats` by name, and `Stats.drive_writes`."""

    drives: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Some of these numbers for each of several drives, by its directory."""

    update_code: str = ""
    tier: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    @property
    def has_begun(self) -> bool:
        """Whether training has begun: nothing is recorded of an optimizer that is only made."""
        return any(self.totals[name] for name in ("steps", "seals", "restore_s"))


@dataclass(frozen=True, slots=True)
class _Called:
    seconds: float


@dataclass(frozen=True, slots=True)
class _Restored:
    step: int
    at: float


_Event = SealedCheckpoint | _Restored

_Totals = dict[str, dict[str, float]]
"""Totals that only grow: of each of several drives by its directory, and of everything by ""."""


class Recorder:
    """Records one run in the first directory of its store, on a thread of its own.

    Nothing that goes wrong is raised. The first failure is logged as a warning.

    Args:
        directory: The store's first directory.
        look: Function that says what the run is doing. It is called on the thread, and must not
            wait for training.
        num_ranks: Number of ranks that train together.
    """

    def __init__(self, directory: str, look: Callable[[], Look], *, num_ranks: int = 1) -> None:
        self._directory = directory
        self._look = look
        self._num_ranks = num_ranks
        self._inode = _inode_of(directory)
        self._host = socket.gethostname()
        self._started = time.time()
        # A queue in C, which a signal handler or a collection may use in the middle of a call.
        self._messages: queue.SimpleQueue[_Called | _Event | None] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._has_warned = False
        self._samples: deque[tuple[float, _Totals]] = deque(maxlen=_MOST_SAMPLES)
        self._checkpoints: deque[SealedCheckpoint] = deque(maxlen=_MOST_CHECKPOINTS)
        self._noted: tuple[float, Mapping[str, float]] | None = None
        """Time and totals at the last line about steps; None before the first line of any kind."""
        self._step = 0
        """Step at the last look."""
        self._called_s = 0.0
        self._waited_s = 0.0
        """Seconds in `checkpoint` since the last checkpoint, and total of steps' waits then."""
        self._thread = threading.Thread(target=self._run, name="offload-record", daemon=True)

    def start(self) -> None:
        """Begin to record."""
        try:
            start(self._thread)
        except RuntimeError as error:  # too many threads, or the interpreter is shutting down
            self._warn(error)

    def called(self, seconds: float) -> None:
        """Count the seconds of a call of `checkpoint`, before `sealed` is called for it."""
        self._messages.put(_Called(seconds))

    def sealed(
        self, step: int, *, bytes_written: int, seal_s: float, metrics: Mapping[str, float]
    ) -> None:
        """Record a checkpoint that has been sealed. Never waits."""
        self._messages.put(
            SealedCheckpoint(
                step=step,
                at=time.time(),
                bytes_written=bytes_written,
                stall_s=0.0,
                seal_s=seal_s,
                metrics=metrics,
            )
        )

    def restored(self, step: int) -> None:
        """Record that training goes on from a checkpoint. Never waits."""
        self._messages.put(_Restored(step, time.time()))

    def stop(self, *, wait: bool = True) -> None:
        """Record that the run has ended. Idempotent.

        Args:
            wait: Whether to wait for that, some seconds at most.
        """
        if os.getpid() != self._pid:
            return  # a forked child has no thread, and the run is not its own
        self._messages.put(None)
        if wait and self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        due, events = time.monotonic() + STATUS_S, list[_Event]()
        is_over = False
        while not is_over:
            wait_s = _SETTLE_S if events else max(due - time.monotonic(), 0.0)
            try:
                message = self._messages.get(timeout=wait_s)
            except queue.Empty:
                pass
            else:
                if isinstance(message, _Called):
                    self._called_s += message.seconds
                elif message is not None:
                    events.append(message)
                is_over = message is None
                if not is_over and time.monotonic() < due:
                    continue
            is_due = is_over or time.monotonic() >= due
            try:
                self._record(events, is_due=is_due, ended=is_over)
            except Exception as error:  # noqa: BLE001  (training goes on)
                self._warn(error)
            events = []
            if is_due:
                due = time.monotonic() + STATUS_S

    def _record(self, events: Sequence[_Event], *, is_due: bool, ended: bool) -> None:
        """Look, and write what there is to write."""
        if self._inode is None or _inode_of(self._directory) != self._inode:
            return  # the store has been moved or removed
        look = self._look()
        if not look.has_begun:
            return
        try:
            if lines := [*self._lines(look, events, ended=ended)]:
                add_lines(self._directory, lines)
        finally:  # a history that cannot be written does not hide the status
            if is_due:
                write_status(self._directory, self._status(look, ended=ended))

    def _lines(
        self, look: Look, events: Sequence[_Event], *, ended: bool
    ) -> Iterator[dict[str, object]]:
        """Yield new lines of the history."""
        if self._noted is None:
            age_s = time.time() - self._started
            self._noted = time.monotonic() - age_s, dict.fromkeys(_GROWING, 0.0)
            if not (events and isinstance(events[0], _Restored)):
                begun = max(look.step - int(look.totals["steps"]), 0)
                yield {"kind": "start", "at": self._started, "step": begun}
        elif any(isinstance(event, _Restored) for event in events):
            yield from self._steps_line(look, self._step)
        sealed = [event for event in events if isinstance(event, SealedCheckpoint)]
        for event in events:
            if isinstance(event, _Restored):
                yield {"kind": "start", "at": event.at, "step": event.step}
                self._step = event.step
            else:
                yield self._checkpoint_line(event, look if event is sealed[-1] else None)
        if look.step < self._step:  # other state has been loaded
            yield {"kind": "start", "at": time.time(), "step": look.step}
        self._step = look.step
        if ended or time.monotonic() - self._noted[0] >= HISTORY_S:
            yield from self._steps_line(look, look.step)

    def _checkpoint_line(self, sealed: SealedCheckpoint, look: Look | None) -> dict[str, object]:
        """Return a line, with the stalls since the last one; of several at once, the last has all.

        Args:
            sealed: The checkpoint.
            look: Present totals, for the last of several checkpoints only.
        """
        done = sealed if look is None else replace(sealed, stall_s=self._stall_s(look))
        self._checkpoints.append(done)
        return {
            "kind": "checkpoint",
            "at": done.at,
            "step": done.step,
            "bytes_written": done.bytes_written,
            "stall_s": round(done.stall_s, 6),
            "seal_s": round(done.seal_s, 6),
            "metrics": dict(done.metrics),
        }

    def _steps_line(self, look: Look, step: int) -> Iterator[dict[str, object]]:
        """Yield a line about what happened since the last one, unless nothing did."""
        now, (then, before) = time.monotonic(), self._noted or (0.0, {})
        grown = _growth(before, look.totals)
        if grown["steps"] or grown["bytes_read"] or grown["bytes_written"]:
            self._noted = now, look.totals
            yield {
                "kind": "steps",
                "at": time.time(),
                "step": step,
                "elapsed_s": round(now - then, 3),
                "steps": int(grown["steps"]),
                "seconds": {name: round(grown[name], 6) for name in _PHASES},
                "read_bytes": int(grown["bytes_read"]),
                "written_bytes": int(grown["bytes_written"]),
            }

    def _stall_s(self, look: Look) -> float:
        """Return the seconds that training has waited for checkpoints since the last call."""
        waited_s = look.totals["wait_seal_s"]
        stall_s = self._called_s + waited_s - self._waited_s
        self._called_s, self._waited_s = 0.0, waited_s
        return stall_s

    def _status(self, look: Look, *, ended: bool) -> Status:
        now = time.monotonic()
        samples = self._samples
        while len(samples) > 1 and (
            now - samples[1][0] >= _RECENT_S
            and look.totals["steps"] - samples[1][1][""]["steps"] >= _RECENT_STEPS
        ):
            samples.popleft()
        if not samples:
            samples.append((now - (time.time() - self._started), {}))
        then, before = samples[0]
        every = {"": look.totals, **look.drives}
        samples.append((now, {key: _growth({}, totals) for key, totals in every.items()}))
        recent = {key: _growth(before.get(key, {}), totals) for key, totals in every.items()}
        return Status(
            at=time.time(),
            started=self._started,
            ended=ended,
            pid=self._pid,
            host=self._host,
            ranks=self._num_ranks,
            step=look.step,
            totals=look.totals,
            recent_s=now - then,
            recent=recent[""],
            drives=tuple(
                Drive(directory=directory, totals=totals, recent=recent[directory])
                for directory, totals in look.drives.items()
            ),
            checkpoints=tuple(self._checkpoints),
            update_code=look.update_code,
            tier=look.tier,
            warnings=tuple(look.warnings),
        )

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            log_event(
                f"{self._directory}: the run is not recorded for `offload top`, and goes on: "
                f"{reason_of(error)}",
                logging.WARNING,
            )


def _growth(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return by how much totals have grown; they begin at 0."""
    return {name: now[name] - before.get(name, 0.0) for name in _GROWING if name in now}


def _inode_of(directory: str) -> tuple[int, int] | None:
    try:
        found = os.stat(directory)
    except OSError:
        return None
    return found.st_dev, found.st_ino
