"""Threads that update blocks, each with memory for one block and a stepper of its own.

torch could run each operation on all cores instead, but a block that fits in a cache takes tens of
microseconds per operation, and waking the other cores for each costs as much. Whole blocks on
threads that use one core each need no waking, and nobody waits where another program has a core.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar, cast

import torch

from offload.codecs import Scratch
from offload.rules import Stepper, UpdateRule

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
    return torch.empty(num_elements, dtype=dtype)


def default_num_threads() -> int:
    """Return on how many threads blocks are updated: as many as torch would use."""
    return torch.get_num_threads()


class UpdatePool:
    """Runs a function on many items, on as many threads as torch uses; one caller at a time.

    The threads start with the first work for more than one of them.

    Args:
        rule: For the steppers.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule
        self._num_threads = default_num_threads()
        self._contexts = [BlockContext(rule)]
        self._executor: ThreadPoolExecutor | None = None

    def run(self, function: Callable[[BlockContext, Item], object], items: Sequence[Item]) -> None:
        """Call ``function(context, item)`` for every item, in any order, and wait for all.

        Raises:
            BaseException: What one of the calls raised, or an interrupt of the wait. Items not
                begun by then are left out, and none is still being worked on.
        """
        num = min(self._num_threads, len(items))
        if num <= 1:
            for item in items:
                function(self._contexts[0], item)
            return
        executor = self._executor or self._start()
        while len(self._contexts) < num:
            self._contexts.append(BlockContext(self._rule))
        waiting = deque(items)

        @torch.no_grad()
        def work(context: BlockContext) -> None:
            try:
                while True:
                    try:
                        item = waiting.popleft()
                    except IndexError:
                        return
                    function(context, item)
            except BaseException:
                waiting.clear()
                raise

        futures = [executor.submit(work, context) for context in self._contexts[:num]]
        try:
            wait(futures)
        except BaseException:
            # What is being worked on writes into memory that the caller is about to use otherwise.
            waiting.clear()
            wait(futures)
            raise
        for future in futures:
            future.result()

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
            self._executor.shutdown()
            self._executor = None

    def _start(self) -> ThreadPoolExecutor:
        # torch's own setting is one number for the process and one for each thread: those of the
        # workers become 1, and the process gets back what it had. A thread takes over the number
        # of the process when it first asks for its own, so it must have asked before.
        num_threads = torch.get_num_threads()
        started = threading.Barrier(self._num_threads + 1)

        def begin() -> None:
            torch.get_num_threads()
            torch.set_num_threads(1)
            started.wait()

        executor = ThreadPoolExecutor(self._num_threads, UPDATE_THREAD, begin)
        for _ in range(self._num_threads):
            executor.submit(int)  # each starts a thread
        started.wait()
        torch.set_num_threads(num_threads)
        self._executor = executor
        return executor
