"""Results do not depend on when transfers end, nor on whether a seal is still going on.

Steps, transfers and seals overlap: reads run ahead, writes and seals trail behind. What is used,
written and sealed is the same as if each had waited for the one before.
"""

from __future__ import annotations

import threading

import pytest

import offload
import offload.checkpoint.sealed_slot
import offload.format.manifest
import offload.model.model_file
from tests.eventually import TIMEOUT_S
from tests.numerics.delays import Disordered, Gate
from tests.numerics.models import FIRST_LATE_STEP, trainable
from tests.numerics.pairs import CASES, CUTS, Cut, Pair
from tests.numerics.reference import assert_same_bits, assert_same_state, read_state


@pytest.mark.parametrize(
    "cut",
    # from many chunks for the ring to as few as it holds, where the next step's reads come soonest
    [Cut(4096, 2), Cut(11 * 4096, 2)],
    ids=str,
)
@pytest.mark.parametrize("name", ["sgd-momentum-in-some-groups"])
def test_transfers_that_overtake_each_other(name, cut):
    backend = Disordered(seed=cut.ring_chunks)
    pair = Pair(CASES[name], cut, backend)
    for step in range(9):
        pair.step(step)
        pair.assert_same_parameters()
        if step in (2, 3, 6):
            pair.optimizer.checkpoint({"step": step})
        if step == 7:
            pair.optimizer.checkpoint()
            pair.optimizer.restore()
            pair.assert_same_parameters()
    pair.assert_same_state()
    pair.optimizer.close()
    backend.pool.shutdown()


@pytest.fixture
def small_blocks(monkeypatch):
    """Let a seal copy 4 KiB of parameters at a time, so that it has many blocks to be amid."""
    for module in (
        offload.format.manifest,
        offload.model.model_file,
        offload.checkpoint.sealed_slot,
    ):
        monkeypatch.setattr(module, "MODEL_BLOCK_BYTES", 4096)


@pytest.mark.parametrize(("name", "keep"), [("adamw", 2), ("sgd-momentum-in-some-groups", 3)])
def test_a_step_amid_a_seal_leaves_no_trace_in_it(name, keep, small_blocks):
    gate = Gate()
    pair = Pair(CASES[name], CUTS[0], gate, keep=keep)
    for step in range(FIRST_LATE_STEP + 2):
        gate.opened.set()
        pair.step(step)
        gate.close_gate()
        handle = pair.optimizer.checkpoint({"step": step})
        assert gate.reached.wait(TIMEOUT_S)
        opener = threading.Timer(0.02, gate.opened.set)  # the step comes while a block is copied
        opener.start()
        pair.step_live(step + 1)
        opener.join()
        stored = read_state(handle.result(TIMEOUT_S).path, gate)
        assert_same_state(stored, pair.reference, trainable(pair.expected))
        for parameter, tensor in pair.expected.named_parameters():
            if parameter in stored.model:
                assert_same_bits(stored.model[parameter], tensor, parameter)
        assert pair.optimizer.restore().step == step + 1
        pair.assert_same_parameters()
