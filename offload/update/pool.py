"""Threads that update blocks, each with memory for one block and a stepper of its own.

torch could run each operation on all cores instead, but a block that fits in a cache takes tens of
microseconds per operation, and waking the other cores for each costs as much. Whole blocks on
threads that use one core each need no waking, and nobody waits where another program has a core.

Several threads are faster only where the update is what a step waits for; they share caches, memory
and the interpreter, and while one of them updates a block, what another has written leaves the
cache before it is digested. Where the drive is the limit, one thread takes less CPU time, for
digests most of all, and leaves the other cores alone (`UpdateThreads`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TypeVar, cast

import torch

from gds.backends.threads import Transfer, TransferPool
from gds.waiting import wait
from offload.ambient import for_thread
from offload.update.codecs import Scratch
from offload.update.rules import UpdateRule
from offload.update.stepper import Stepper

UPDATE_THREAD = "offload-update"
"""Prefix of the threads' names."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class BlockMemory:
    """Memory for one block, used again for the next one.

    Args:
        empty: Makes a tensor of so many elements, wherever blocks are.
    """

    def __init__(self, empty: Callable[[int, torch.dtype], torch.Tensor] | None = None) -> None:
        self.scratch = Scratch()
        self._empty = empty or _host_memory
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def buffer(self, name: str, dtype: torch.dtype, num_elements: int) -> torch.Tensor:
        """Return flat memory by name, with whatever it was left with."""
        tensor = self._buffers.get((name, dtype))
        if tensor is None or len(tensor) < num_elements:
            tensor = self._buffers[name, dtype] = self._empty(num_elements, dtype)
        return tensor[:num_elements]


class BlockContext(BlockMemory):
    """What one thread needs to update a block.

    Args:
        rule: For the stepper.
        empty: As for `BlockMemory`.
    """

    def __init__(
        self, rule: UpdateRule, empty: Callable[[int, torch.dtype], torch.Tensor] | None = None
    ) -> None:
        super().__init__(empty)
        self.stepper: Stepper = rule.stepper()


def _host_memory(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(num_elements, dtype=dtype, device="cpu")


def default_num_threads() -> int:
    """Return on how many threads blocks are updated at most: as many as torch would use."""
    return torch.get_num_threads()


class UpdateThreads:
    """Chooses on how many threads the next pass updates: on all, or on one if that is as fast.

    One is as fast where the update waits for storage in spite of it. That is seen in passes on one
    thread, and expected in passes on all of them if their waits are longer than what updating on
    one took longer when it was last tried. That memory fades, so that it is tried again in time.
    It takes `_WINDOW` passes to decide: one that begins with the ring full, or after a seal, says
    little of the next. So it matters what the first ones are on.

    Args:
        most: Threads that there are.
        begin_with: Of the first passes: one, or all of them if an update is long for its bytes.
    """

    def __init__(self, most: int, begin_with: int = 1) -> None:
        self.most = most
        self.num_threads = begin_with
        """Of the next pass."""
        self._passes: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        """Seconds of updating and of waiting, per chunk, of the last passes on as many threads."""
        self._alone_s = 0.0
        """Seconds that updating a chunk took on one thread, when that was last seen; fading."""

    def passed(self, num_chunks: int, updating_s: float, waiting_s: float) -> None:
        """Take note of a pass that ran on `num_threads`.

        Args:
            num_chunks: That it updated.
            updating_s: Seconds that updating them took.
            waiting_s: Seconds that it waited for them to be there.
        """
        if self.most == 1 or not num_chunks:
            return
        self._alone_s *= _FADING
        self._passes.append((updating_s / num_chunks, waiting_s / num_chunks))
        if len(self._passes) < _WINDOW:
            return
        update_s, wait_s = (sum(seconds) / _WINDOW for seconds in zip(*self._passes, strict=True))
        pass_s = update_s + wait_s
        if self.num_threads == 1:
            self._alone_s = update_s
            if wait_s < _FEW_WAITS * pass_s:
                self._use(self.most)
        elif pass_s - max(self._alone_s, update_s) > _MANY_WAITS * pass_s:
            self._use(1)

    def _use(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._passes.clear()


class _AllThreads(UpdateThreads):
    """Chooses all, always."""

    def passed(self, num_chunks: int, updating_s: float, waiting_s: float) -> None:
        """Ignore it."""


_WINDOW = 6
"""Passes that a choice rests on: as much of each, where every second or third one is different."""

_FEW_WAITS, _MANY_WAITS = 0.10, 0.14
"""Of passes on one thread: with a smaller share of waits all threads are needed, with a larger one
they are not; in between it stays as it is. A tenth is left over where drive and update are equally
fast, as the first chunk is updated before the drive has anything to write, and the last after."""

_FADING = 0.998
"""Of what is remembered, from one pass to the next."""


class UpdatePool:
    """Runs a function on many items, on as many threads as torch uses; one caller at a time.

    The threads start with the first work for them.

    Args:
        rule: For the steppers.
        slow: Whether an update is likely to take longer than the drive needs for its bytes.
    """

    def __init__(self, rule: UpdateRule, *, slow: bool = False) -> None:
        self._rule = rule
        self._num_threads = default_num_threads()
        self.threads = UpdateThreads(self._num_threads, self._num_threads if slow else 1)
        """How many of them updates are to use."""
        self._contexts = [BlockContext(rule)]
        self._executor: TransferPool | None = None

    def run(
        self,
        function: Callable[[BlockContext, Item], object],
        items: Sequence[Item],
        num_threads: int | None = None,
    ) -> None:
        """Call ``function(context, item)`` for every item, in any order, and wait for all.

        Args:
            function: What to call.
            items: With what; in this order, on one thread.
            num_threads: Most threads to use, if not all. One is one of the pool's, where torch does
                not use all cores for an operation.

        Raises:
            BaseException: What one of the calls raised, or an interrupt of the wait. Items not
                begun by then are left out, and none is still being worked on.
        """
        num = min(num_threads or self._num_threads, len(items))
        if self._num_threads == 1 or len(items) <= 1:
            for item in items:
                function(self._contexts[0], item)
            return
        executor = self._executor or self._start()
        while len(self._contexts) < num:
            self._contexts.append(BlockContext(self._rule))
        waiting = deque(items)

        @for_thread
        def work(context: BlockContext) -> int:
            try:
                # Whoever reads a parameter while a step runs beside the model waits for this.
                with torch._C.DisableTorchFunctionSubclass():
                    while True:
                        try:
                            item = waiting.popleft()
                        except IndexError:
                            return 0
                        function(context, item)
            except BaseException:
                waiting.clear()
                raise

        futures: list[Transfer] = []
        try:
            contexts = self._contexts[:num]
            futures.extend(executor.submit(partial(work, context)) for context in contexts)
            wait(futures)
        except BaseException:
            # What is being worked on writes into memory that the caller is about to use otherwise.
            waiting.clear()
            wait(futures)
            raise
        for future in futures:
            future.result()

    @contextmanager
    def all_threads(self) -> Iterator[None]:
        """Have updates use all threads within the block; nothing in it counts for the choice."""
        chosen = self.threads
        self.threads = _AllThreads(chosen.most, chosen.most)
        try:
            yield
        finally:
            self.threads = chosen

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Call a function for every item, as `run` does, and return the results in order."""
        results: list[Result | None] = [None] * len(items)

        def call(_: BlockContext, number: int) -> None:
            results[number] = function(items[number])

        self.run(call, range(len(items)))
        return cast("list[Result]", results)

    def close(self) -> None:
        """Let the threads end. Idempotent."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def _start(self) -> TransferPool:
        # torch's own setting is one number for the process and one for each thread: those of the
        # workers become 1, and the process gets back what it had. A thread takes over the number
        # of the process when it first asks for its own, so it must have asked before.
        num_threads = torch.get_num_threads()
        begun: SimpleQueue[None] = SimpleQueue()

        def begin() -> None:
            torch.get_num_threads()
            torch.set_num_threads(1)
            begun.put(None)

        executor = TransferPool(UPDATE_THREAD, self._num_threads, begin)
        try:
            executor.submit(lambda: 0)  # starts all threads
            for _ in range(self._num_threads):
                begun.get()
        except BaseException:
            executor.close()
            raise
        finally:
            torch.set_num_threads(num_threads)
        self._executor = executor
        return executor
