"""Threads that update blocks, each with memory for one block and its own stepper.

torch could run each operation on all cores instead. But an operation on a block that fits in a
cache takes tens of microseconds, and waking the other cores for each operation costs as much. So
each thread uses one core, and updates whole blocks on it. If another program occupies a core, only
the block on that core is delayed.

Several threads are faster only if a step waits for the update. They share caches, memory and the
interpreter. While one thread updates a block, the result of another thread leaves the cache before
it is digested. If the drive is the limit, one thread takes less CPU time, especially for digests,
and leaves the other cores alone (`UpdateThreads`).
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
from offload.ambient import flushes_denormals, for_thread
from offload.update.codecs import Scratch
from offload.update.rules import UpdateRule
from offload.update.stepper import Stepper

UPDATE_THREAD = "offload-update"
"""Prefix of the names of the update threads."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class BlockMemory:
    """Memory for one block, reused for the next block. Not for two threads at a time.

    Args:
        empty: Allocator of a flat tensor, given the number of elements and a dtype; None for host
            memory.
    """

    def __init__(self, empty: Callable[[int, torch.dtype], torch.Tensor] | None = None) -> None:
        self.scratch = Scratch()
        self._empty = empty or _host_memory
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def buffer(self, name: str, dtype: torch.dtype, num_elements: int) -> torch.Tensor:
        """Return flat memory with this name and dtype. Its content is left over from earlier use.

        The same name and dtype always give the same memory, until a call needs more elements.
        """
        tensor = self._buffers.get((name, dtype))
        if tensor is None or len(tensor) < num_elements:
            tensor = self._buffers[name, dtype] = self._empty(num_elements, dtype)
        return tensor[:num_elements]


class BlockContext(BlockMemory):
    """Memory and stepper of one thread that updates blocks.

    Args:
        rule: Update rule that makes the stepper.
        empty: Allocator of the memory; see `BlockMemory`.
    """

    def __init__(
        self, rule: UpdateRule, empty: Callable[[int, torch.dtype], torch.Tensor] | None = None
    ) -> None:
        super().__init__(empty)
        self.stepper: Stepper = rule.stepper()


def _host_memory(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(num_elements, dtype=dtype, device="cpu")


def default_num_threads() -> int:
    """Return the maximal number of update threads, which is torch's own number of threads."""
    return torch.get_num_threads()


class UpdateThreads:
    """Chooses the number of threads for the next pass: all threads, or one if one is as fast.

    One thread is as fast if its updates still wait for storage. A pass on one thread shows this by
    its waits. A pass on all threads predicts it, if its waits are longer than the additional time
    that updates took when one thread was last tried. That time is remembered, but shrinks from pass
    to pass, so that one thread is tried again after a while.

    A decision is based on `_WINDOW` passes, because a pass that begins with a full ring, or after a
    seal, says little about the next pass. The number of threads cannot change before that, so its
    first value matters.

    Args:
        most: Number of available threads.
        begin_with: Number of threads for the first passes: one, or all if an update takes long in
            relation to its bytes.
    """

    def __init__(self, most: int, begin_with: int = 1) -> None:
        self.most = most
        self.num_threads = begin_with
        """Number of threads for the next pass."""
        self._passes: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        """Seconds of updating and of waiting, per chunk, of the last passes with `num_threads`."""
        self._one_thread_s = 0.0
        """Seconds per chunk of the last updates on one thread; shrinks from pass to pass."""

    def passed(self, num_chunks: int, updating_s: float, waiting_s: float) -> None:
        """Record a pass that ran on `num_threads`, and choose the number for the next pass.

        Args:
            num_chunks: Number of chunks that the pass updated.
            updating_s: Seconds that the updates took.
            waiting_s: Seconds that the pass waited for chunks to arrive.
        """
        if self.most == 1 or not num_chunks:
            return
        self._one_thread_s *= _FADING
        self._passes.append((updating_s / num_chunks, waiting_s / num_chunks))
        if len(self._passes) < _WINDOW:
            return
        update_s, wait_s = (sum(seconds) / _WINDOW for seconds in zip(*self._passes, strict=True))
        pass_s = update_s + wait_s
        if self.num_threads == 1:
            self._one_thread_s = update_s
            if wait_s < _FEW_WAITS * pass_s:
                self._use(self.most)
        elif pass_s - max(self._one_thread_s, update_s) > _MANY_WAITS * pass_s:
            self._use(1)

    def _use(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._passes.clear()


class _AllThreads(UpdateThreads):
    """Always chooses all threads."""

    def passed(self, num_chunks: int, updating_s: float, waiting_s: float) -> None:
        """Ignore the pass."""


_WINDOW = 6
"""Number of passes that a choice is based on. If every second or every third pass differs from the
others, any six passes in a row contain equally many of each kind."""

_FEW_WAITS, _MANY_WAITS = 0.10, 0.14
"""Shares of waiting in a pass on one thread. Below the first share the next pass uses all threads,
above the second it uses one, and in between nothing changes. If drive and update are equally fast,
a tenth of the pass is waiting: the drive has nothing to write while the first chunk is updated, and
no update is left while the last chunk is written."""

_FADING = 0.998
"""Factor by which the remembered seconds on one thread shrink from one pass to the next."""


class UpdatePool:
    """Runs a function on many items, on as many threads as torch uses; one caller at a time.

    The threads start when they first have work.

    Args:
        rule: Update rule that makes the steppers.
        slow: Whether an update is likely to take longer than the drive needs for its bytes.
    """

    def __init__(self, rule: UpdateRule, *, slow: bool = False) -> None:
        self._rule = rule
        self._num_threads = default_num_threads()
        self.threads = UpdateThreads(self._num_threads, self._num_threads if slow else 1)
        """Number of threads that updates use."""
        self._contexts = [BlockContext(rule)]
        self._executor: TransferPool | None = None

    def run(
        self,
        function: Callable[[BlockContext, Item], object],
        items: Sequence[Item],
        num_threads: int | None = None,
    ) -> None:
        """Call ``function(context, item)`` for every item, in any order, and wait for all calls.

        Args:
            function: Function to call, with the `BlockContext` of its thread and one item.
            items: Items of the calls. One thread takes them in this order.
            num_threads: Maximal number of threads; None for all. With one thread the calls still
                run on a thread of the pool, on which torch uses one core per operation.

        Raises:
            BaseException: The error of one of the calls, or an interrupt of the wait. Items that
                had not begun are left out, and no call is in progress any more.
        """
        num = min(num_threads or self._num_threads, len(items))
        # On the calling thread, torch lets other threads help, and they flush no denormal numbers.
        alone = len(items) == 1 and not flushes_denormals()
        if self._num_threads == 1 or alone or not items:
            for item in items:
                function(self._contexts[0], item)
            return
        executor = self._executor or self._start()
        while len(self._contexts) < num:
            self._contexts.append(BlockContext(self._rule))
        waiting = deque(items)

        @for_thread
        def work(context: BlockContext) -> int:
            """Call the function for items until none is left."""
            try:
                # While a step runs beside the model, the use of a parameter waits for that step.
                # These threads are the step, so they must not wait.
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
            # Calls in progress write into memory that the caller is about to reuse.
            waiting.clear()
            wait(futures)
            raise
        for future in futures:
            future.result()

    def run_here(
        self, function: Callable[[BlockContext, Item], object], items: Sequence[Item]
    ) -> None:
        """Call ``function(context, item)`` for every item on the calling thread.

        Nothing else may use the pool meanwhile.
        """
        for item in items:
            function(self._contexts[0], item)

    @contextmanager
    def all_threads(self) -> Iterator[None]:
        """Let updates use all threads within the block. Its passes do not affect the choice."""
        chosen = self.threads
        self.threads = _AllThreads(chosen.most, chosen.most)
        try:
            yield
        finally:
            self.threads = chosen

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Call a function for every item, as `run` does, and return the results in item order."""
        results: list[Result | None] = [None] * len(items)

        def call(_: BlockContext, number: int) -> None:
            """Store one result at its place."""
            results[number] = function(items[number])

        self.run(call, range(len(items)))
        return cast("list[Result]", results)

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def _start(self) -> TransferPool:
        # torch has one number of threads for the process and one for each thread. Those of the
        # workers become 1, and the process gets its number back. A thread copies the number of
        # the process when it first reads its own number, so it has to read it before it sets it.
        num_threads = torch.get_num_threads()
        begun: SimpleQueue[None] = SimpleQueue()

        def begin() -> None:
            """Set torch's number of threads to 1 for this worker."""
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
