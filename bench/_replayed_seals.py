"""Replay of steps with a checkpoint after each, without arithmetic: the same transfers and syncs.

A checkpoint's writes and syncs take less time by themselves than beside the transfers of steps,
with which they share the drive. Here they are beside them, as in an optimizer: a step reads one
slot and writes another; the checkpoint of a step is sealed by a thread while the next step runs;
and a checkpoint waits for the one before it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque

from bench.replay import Plan, fill_random
from gds import Backend, Buffer, File, IOFuture

_PARAMETER_BYTES = 2
_BLOCK_BYTES = 16 << 20
_BLOCKS = 3


class _Slot:
    """Files of one checkpoint."""

    def __init__(
        self, backend: Backend, directory: str, name: str, plan: Plan, model_bytes: int
    ) -> None:
        self.names = (os.path.join(directory, name), os.path.join(directory, f"{name}-sealed"))
        self.path = self.names[0]
        backend.make_dir(self.path)
        self.state = [
            backend.create(os.path.join(self.path, f"array-{number}.bin"), plan.file_bytes)
            for number in range(plan.num_files)
        ]
        self.model = backend.create(os.path.join(self.path, "model"), model_bytes)
        self.train_state, self.manifest = (
            backend.create(os.path.join(self.path, name), 4096)
            for name in ("train_state", "manifest")
        )
        self.writes: list[IOFuture] = []
        """Of the state, in the last step."""

    @property
    def files(self) -> list[File]:
        """All files but the manifest."""
        return [*self.state, self.model, self.train_state]

    def rename(self, backend: Backend, directory: str) -> None:
        """Give the slot its other name, durably."""
        other = self.names[self.path == self.names[0]]
        backend.rename(self.path, other)
        self.path = other
        backend.sync_dir(directory)


class ReplayedSeals:
    """Steps with checkpoints, of which only the transfers and syncs are made.

    Args:
        backend: Backend of the files.
        directory: Directory for them.
        plan: Bytes that a step moves.
        num_parameters: Number of parameters, whose 16-bit values a checkpoint writes.
        ring_chunks: Number of chunks in memory.
    """

    def __init__(
        self, backend: Backend, directory: str, plan: Plan, num_parameters: int, ring_chunks: int
    ) -> None:
        self._backend, self._directory, self._plan = backend, directory, plan
        self._model_bytes = -(-num_parameters * _PARAMETER_BYTES // 4096) * 4096
        self._slots = [
            _Slot(
                backend, directory, f"replayed-{num_parameters}-{number}", plan, self._model_bytes
            )
            for number in range(3)
        ]
        self._frames = [
            [backend.allocate(plan.chunk_bytes) for _ in range(plan.num_files)]
            for _ in range(min(ring_chunks, plan.num_chunks))
        ]
        self._blocks = [backend.allocate(_BLOCK_BYTES) for _ in range(_BLOCKS)]
        for buffer in (*self._blocks, self._frames[0][0]):
            fill_random(buffer)
        self._changed = threading.Condition(threading.RLock())
        self._free = [*self._frames]
        self._loading: dict[int, tuple[list[Buffer], list[IOFuture]]] = {}
        self._writing: set[int] = set()
        self._ahead: deque[int] = deque()
        self._at = 0
        """Number of the slot that has the present state."""
        self._seal: threading.Thread | None = None
        self._error: BaseException | None = None
        for _ in range(4):
            self.run(1, seals=True)

    def run(self, steps: int, *, seals: bool) -> float:
        """Replay steps back to back, and return the mean seconds of one.

        Args:
            steps: Number of steps.
            seals: Whether a checkpoint follows each of them.
        """
        if not self._loading:
            self._read_ahead()
        self._step(moves=False)
        self._settle()
        started = time.perf_counter()
        for _ in range(steps):
            self._step(moves=seals)
            if seals:
                self._checkpoint()
        self._settle()
        return (time.perf_counter() - started) / steps

    def _step(self, *, moves: bool) -> None:
        target = (self._at + 1) % len(self._slots) if moves else self._at
        self._slots[target].writes = []
        for chunk in range(self._plan.num_chunks):
            self._write(chunk, self._take(chunk), self._slots[target])
        self._at = target
        self._read_ahead()

    def _checkpoint(self) -> None:
        if self._seal is not None:
            self._seal.join()
        sealed, oldest = self._slots[self._at], self._slots[(self._at + 1) % len(self._slots)]
        self._seal = threading.Thread(target=self._run_seal, args=(sealed, oldest))
        self._seal.start()

    def _run_seal(self, slot: _Slot, oldest: _Slot) -> None:
        try:
            backend = self._backend
            if oldest.path != oldest.names[0]:  # withdraw it
                oldest.rename(backend, self._directory)
                oldest.manifest.write_bytes(b"0" * 4096, 0)
                oldest.manifest.sync()
            futures: list[IOFuture] = []
            for number, offset in enumerate(range(0, self._model_bytes, _BLOCK_BYTES)):
                if number >= _BLOCKS:
                    futures[number - _BLOCKS].result()
                nbytes = min(_BLOCK_BYTES, self._model_bytes - offset)
                block = self._blocks[number % _BLOCKS].slice(0, nbytes)
                futures.append(slot.model.write(block, offset))
            for future in (*futures, *slot.writes):
                future.result()
            slot.train_state.write_bytes(b"1" * 4096, 0)
            for file in slot.files:
                file.sync()
            backend.sync_dir(slot.path)
            slot.manifest.write_bytes(b"1" * 4096, 0)
            slot.manifest.sync()
            backend.sync_dir(slot.path)
            slot.rename(backend, self._directory)
        except BaseException as error:  # noqa: BLE001  (raised by the thread that waits)
            self._error = error

    def _read_ahead(self) -> None:
        with self._changed:
            self._ahead.extend(range(self._plan.num_chunks))
            self._pump()

    def _take(self, chunk: int) -> list[Buffer]:
        with self._changed:
            self._changed.wait_for(lambda: chunk in self._loading)
            frame, reads = self._loading.pop(chunk)
        for read in reads:
            read.result()
        return frame

    def _write(self, chunk: int, frame: list[Buffer], slot: _Slot) -> None:
        with self._changed:
            self._writing.add(chunk)
        left = len(slot.state)
        offset, nbytes = self._plan.byte_range(chunk)

        def ended(_: IOFuture) -> None:
            """Free the frame after the last write."""
            nonlocal left
            with self._changed:
                left -= 1
                if not left:
                    self._writing.discard(chunk)
                    self._free.append(frame)
                    self._pump()

        for file, buffer in zip(slot.state, frame, strict=True):
            write = file.write(buffer.slice(0, nbytes), offset)
            slot.writes.append(write)
            write.add_done_callback(ended)

    def _pump(self) -> None:
        while self._ahead and self._free and self._ahead[0] not in self._writing:
            chunk, frame = self._ahead.popleft(), self._free.pop()
            offset, nbytes = self._plan.byte_range(chunk)
            source = self._slots[self._at].state
            reads = [
                file.read(buffer.slice(0, nbytes), offset)
                for file, buffer in zip(source, frame, strict=True)
            ]
            self._loading[chunk] = frame, reads
        self._changed.notify_all()

    def _settle(self) -> None:
        if self._seal is not None:
            self._seal.join()
            self._seal = None
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)
            loading = [read for _, reads in self._loading.values() for read in reads]
        for future in (*loading, *(write for slot in self._slots for write in slot.writes)):
            future.result()
        if self._error is not None:
            raise self._error
