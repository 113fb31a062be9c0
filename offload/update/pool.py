"""Threads that update blocks, each with memory for one block and its own stepper.

torch could run each operation on all cores instead, but waking them takes as long as an operation
on a block that fits in a cache. So each thread updates whole blocks on its core.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeVar, cast

import torch

from gds.backends.threads import Transfer, TransferPool
from gds.waiting import wait
from offload.ambient import flushes_denormals, for_thread
from offload.update.rules import UpdateRule
from offload.update.scratch import Scratch
from offload.update.stepper import Stepper

UPDATE_THREAD = "offload-update"
"""Prefix of the names of the update threads."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class BlockMemory:
    """Memory for one block, reused for the next block. Not for two threads at a time."""

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
    """Memory and stepper of one thread that updates blocks."""

    def __init__(
        self, rule: UpdateRule, empty: Callable[[int, torch.dtype], torch.Tensor] | None = None
    ) -> None:
        super().__init__(empty)
        self.stepper: Stepper = rule.stepper()


def _host_memory(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(num_elements, dtype=dtype, device="cpu")


def default_num_threads() -> int:
    """Return the number of update threads of this process, at least 1.

    This is torch's own number of threads, with one exception. If torchrun starts several ranks on
    a machine, it sets ``OMP_NUM_THREADS=1`` for each of them, unless the user has set the variable.
    Each rank then takes its share of the cores on which this process may run: their number divided
    by the number of ranks on the machine, rounded down.

    torchrun does not tell whether a 1 is its own or the user's. So the user's choice counts if it
    is another number, set by ``OMP_NUM_THREADS`` or by `torch.set_num_threads`.
    """
    num_threads = torch.get_num_threads()
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    num_ranks = int(ranks) if ranks.isdecimal() else 1
    is_torchruns = num_threads == 1 and os.environ.get("OMP_NUM_THREADS") == "1" and num_ranks > 1
    return max(1, len(os.sched_getaffinity(0)) // num_ranks) if is_torchruns else num_threads


class UpdatePool:
    """Runs a function on many items, on `default_num_threads` threads; one caller at a time.

    The threads start when they first have work.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule
        self._most = default_num_threads()
        self.num_threads = self._most
        """Number of threads that `run` uses. A smaller number leaves the other threads idle; a
        larger one than that of a new pool has no effect."""
        self.context = BlockContext(rule)
        """Context for the calling thread, while nothing else uses the pool."""
        self._contexts = [self.context]
        self._executor: TransferPool | None = None

    def run(self, function: Callable[[BlockContext, Item], object], items: Sequence[Item]) -> None:
        """Call ``function(context, item)`` for every item, in any order, and wait for all calls.

        Args:
            function: Function to call, with the `BlockContext` of its thread and one item.
            items: Items of the calls. Each thread takes the first one that is left.

        Raises:
            BaseException: The error of one of the calls, or an interrupt of the wait. Items that
                had not begun are left out, and no call is in progress any more.
        """
        num = min(self.num_threads, self._most, len(items))
        # On the calling thread, torch lets other threads help, and they flush no denormal numbers.
        alone = len(items) == 1 and not flushes_denormals()
        if self._most == 1 or alone or not items:
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

        executor = TransferPool(UPDATE_THREAD, self._most, begin)
        try:
            executor.submit(lambda: 0)  # starts all threads
            for _ in range(self._most):
                begun.get()
        except BaseException:
            executor.close()
            raise
        finally:
            torch.set_num_threads(num_threads)
        self._executor = executor
        return executor
