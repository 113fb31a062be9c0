"""Steps of what keeps a step beside the model apart from everybody who reads the parameters."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone

_HOOKS = "offload/forward_hooks.py"
_WATCH = "offload/watch.py"
_STREAMER = "offload/streamer.py"
_BACKWARD = "offload/overlap_backward.py"
_BACKWARD_HOOKS = "offload/backward_hooks.py"
_READERS = "tests/numerics/test_overlap_readers.py"
_HELD = "tests/numerics/test_held_backwards.py"
_DDP = "tests/torch_contract/test_overlap_ddp.py"

OVERLAPPING = (
    Mutation(
        "overlap-not-watched",
        "parameters are watched while a step runs beside the forward",
        (
            Edit(
                _HOOKS,
                "self._watch.add([self._tensors[number] for number in self._changing])",
                "self._watch.add([])",
            ),
        ),
        (f"{_READERS}::test_a_reader_waits",),
    ),
    Mutation(
        "overlap-use-does-not-wait",
        "a use of a parameter waits for the chunks that it is in",
        (
            Edit(
                _HOOKS,
                "            running.wait_for(self._spans[self._numbers[id(parameter)]])\n",
                "            pass\n",
            ),
        ),
        (f"{_READERS}::test_a_reader_waits",),
    ),
    Mutation(
        "overlap-other-call-not-waited",
        "a call that is not like those recorded waits for everything at its entry",
        (
            Edit(
                _HOOKS,
                "if records or self._compiled or kind not in self._recorded:",
                "if records or self._compiled:",
            ),
        ),
        (
            f"{_READERS}::test_a_call_that_is_not_like_those_recorded_waits_for_everything_at_its_entry",
        ),
    ),
    Mutation(
        "overlap-copy-waits",
        "a copy of a watched tensor, which nobody knows, behaves as its class",
        (
            Edit(
                _WATCH,
                "if id(tensor) in self._watched and not self._before_use(tensor):",
                "if not self._before_use(tensor):",
            ),
        ),
        ("tests/numerics/test_watch.py",),
    ),
    Mutation(
        "overlap-held-is-applied",
        "the gradients of a held backward are left alone",
        (gone(_BACKWARD, "            if self._hooks.holds:\n                return\n"),),
        (_HELD,),
    ),
    Mutation(
        "overlap-rerun-not-noted",
        "modules that reentrant checkpointing will run again are remembered",
        (Edit(_BACKWARD_HOOKS, "self._rerun.add(key)", "pass"),),
        (_HELD,),
    ),
    Mutation(
        "overlap-inner-outputs-not-hooked",
        "a loss of what is inside the model is held as well",
        (
            Edit(
                _BACKWARD_HOOKS,
                "if (is_outermost or calls.leads_elsewhere) and",
                "if is_outermost and",
            ),
        ),
        (_HELD,),
    ),
    Mutation(
        "overlap-held-for-ever",
        "a backward that was held has ended, and the next one is applied",
        (
            Edit(
                _BACKWARD_HOOKS,
                "        if self._backward == backward:\n"
                "            self._backward, self._is_held = None, False\n",
                "        return\n",
            ),
            Edit(
                _BACKWARD_HOOKS,
                "            self._backward, self._is_held = backward_id(), False\n",
                "            self._backward = backward_id()\n",
            ),
        ),
        (_HELD,),
    ),
    Mutation(
        "overlap-ddp-made-later",
        "the forward of a DistributedDataParallel is refused",
        (gone(_BACKWARD_HOOKS, "            _require_no_active_ddp(engine)\n"),),
        (_DDP,),
    ),
    Mutation(
        "interrupt-kept",
        "an interrupt is not kept as the error of a transfer",
        (
            gone(
                _STREAMER,
                "                if not isinstance(error, Exception):\n"
                "                    raise  # an interrupt, of this thread's caller\n",
            ),
        ),
        ("tests/crash/test_interrupted_transfers.py",),
    ),
)
