"""Steps of what keeps a step beside the model apart from everybody who reads the parameters."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone

_HOOKS = "offload/overlap/forward_hooks.py"
_WATCH = "offload/model/watch.py"
_STREAMER = "offload/stream/streamer.py"
_BACKWARD = "offload/overlap/backward.py"
_BACKWARD_HOOKS = "offload/overlap/backward_hooks.py"
_READERS = "tests/numerics/test_overlap_readers.py"
_GRADIENTS = "tests/numerics/test_overlap_gradients.py"
_HELD = "tests/numerics/test_held_backwards.py"
_NEEDED = "tests/numerics/test_overlap_backward_readers.py"
_CONSTANTS = "offload/overlap/constant_uses.py"
_DDP = "tests/torch_contract/test_overlap_ddp.py"

OVERLAPPING = (
    Mutation(
        "overlap-gradients-not-copied",
        "a gradient that somebody else can write is copied before step() returns",
        (
            Edit(
                "offload/overlap/forward.py",
                "num_copied = copy_shared_gradients(gradients)",
                "num_copied = 0",
            ),
        ),
        (f"{_GRADIENTS}::test_who_writes_into_a_gradient_after_the_step_does_not_change_it",),
    ),
    Mutation(
        "overlap-parts-not-all",
        "gradients that are parts of one memory are copied if somebody else has another part",
        (
            Edit(
                "offload/overlap/own_gradients.py",
                "found[-1] - alone[-1] != len(numbers) - 1:",
                "False:",
            ),
        ),
        (f"{_GRADIENTS}::test_a_buffer_for_the_gradients_of_every_step",),
    ),
    Mutation(
        "overlap-other-memory-not-announced",
        "a parameter that is given other memory by set_() waits for the step",
        (gone(_WATCH, '            "set_": set_,\n'),),
        (f"{_READERS}::test_a_reader_waits", "tests/numerics/test_watch.py"),
    ),
    Mutation(
        "overlap-not-watched",
        "parameters are watched while a step runs beside the forward",
        (
            Edit(
                _HOOKS,
                "self._watch.add([self._plan.tensors[number] for number in self._changing])",
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
                "            self._await(running, [self._plan.numbers[id(parameter)]])\n",
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
        "overlap-stepped-not-watched",
        "a parameter whose gradient backward has applied is watched",
        (gone(_BACKWARD, "        self._stepped.add([parameter])"),),
        (f"{_NEEDED}::test_between_backward_and_step",),
    ),
    Mutation(
        "overlap-constant-not-held",
        "a backward that needs a parameter as a constant is held",
        (
            Edit(
                _BACKWARD_HOOKS,
                "        self._is_needed_later = True\n        self._warn_once(_CONSTANT)\n",
                "        self._warn_once(_CONSTANT)\n",
            ),
        ),
        (f"{_NEEDED}::test_a_value_that_is_a_constant_of_the_graph_too",),
    ),
    Mutation(
        "overlap-constant-of-recomputation-not-seen",
        "a use without a graph in what will be computed again counts as one of a constant",
        (gone(_CONSTANTS, "            is_recomputed_later()\n            or "),),
        (f"{_NEEDED}::test_a_value_that_is_a_constant_of_the_graph_too",),
    ),
    Mutation(
        "overlap-backward-hooks-not-held",
        "a backward through modules with backward hooks is held",
        (Edit(_BACKWARD_HOOKS, "                self._is_hooked = True\n", ""),),
        (f"{_NEEDED}::test_backward_hooks_of_modules_that_read_weights",),
    ),
    Mutation(
        "overlap-taken-before-hooks",
        "a gradient is taken after the hooks of others have been called",
        (
            Edit(
                _BACKWARD,
                "        if not self._is_last_hook(parameter):\n            return",
                "        if False:\n            return",
            ),
        ),
        (f"{_NEEDED}::test_hooks_on_parameters_run_before_their_gradient_is_taken",),
    ),
    Mutation(
        "overlap-others-gradients-dropped",
        "step() leaves the gradient of a parameter that is in no group",
        (
            Edit(
                _BACKWARD,
                "            self._stepped.release_all()\n            self._drop_applied()\n",
                "            self._stepped.release_all()\n"
                "            for trainable in self._table.trainables:\n"
                "                trainable.parameter.grad = None\n",
            ),
        ),
        (f"{_NEEDED}::test_a_parameter_that_another_optimizer_trains_now_keeps_its_gradient",),
    ),
    Mutation(
        "overlap-rerun-not-noted",
        "modules that reentrant checkpointing will run again are remembered",
        (Edit(_BACKWARD_HOOKS, "self._rerun.add(key)", "pass"),),
        (f"{_HELD}::test_reentrant_checkpointing_of_what_is_used_twice_in_some_steps_only",),
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
        (gone(_BACKWARD_HOOKS, "            require_no_active_ddp(strategy.is_trained)\n"),),
        (_DDP,),
    ),
    Mutation(
        "interrupt-kept",
        "an interrupt is not kept as the error of a transfer",
        (
            gone(
                _STREAMER,
                "                if not isinstance(error, Exception):\n"
                "                    raise  # an interrupt, which this thread's caller handles\n",
            ),
        ),
        ("tests/crash/test_interrupted_transfers.py",),
    ),
)
