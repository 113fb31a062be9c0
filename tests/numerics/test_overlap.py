"""Results do not depend on when transfers end, nor on whether a seal is still going on.

Steps, transfers and seals overlap: reads run ahead, writes and seals trail behind. What is used,
written and sealed is the same as if each had waited for the one before.
"""

from __future__ import annotations

import threading

import pytest
import torch

import offload
import offload.format.manifest
import offload.model.model_file
from offload.engine.seal import Seal
from offload.errors import SealError
from tests.eventually import TIMEOUT_S
from tests.numerics.delays import Disordered, Gate, Held
from tests.numerics.models import FIRST_LATE_STEP, trainable
from tests.numerics.pairs import CASES, CUTS, Cut, Pair
from tests.numerics.reference import assert_same_bits, assert_same_state, read_state


@pytest.mark.parametrize(
    "cut",
    # from many chunks for the ring to as few as it holds, where the next step's reads come soonest
    [Cut(4096, 2), Cut(4096, 7), Cut(7 * 4096, 3), Cut(11 * 4096, 2)],
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


def test_what_was_read_ahead_in_vain_is_waited_for_as_well():
    """`synchronize` waits for all transfers, also those of which nobody wants the result."""
    backend, cut = Held(), Cut(4096, 3)
    parameters = [torch.nn.Parameter(torch.ones(1024)) for _ in range(8)]
    optimizer = offload.AdamW(parameters, directory="/store", options=cut.options(backend))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    backend.hold(0)
    optimizer.step()
    backend.hold()  # not what is read from now on
    for parameter in parameters[:-1]:
        parameter.grad = None
    optimizer.step()
    synchronized = threading.Event()
    waiting = threading.Thread(target=lambda: (optimizer.synchronize(), synchronized.set()))
    waiting.start()
    assert not synchronized.wait(0.2)
    backend.release()
    assert synchronized.wait(TIMEOUT_S)
    waiting.join()
    optimizer.close()


@pytest.fixture
def small_blocks(monkeypatch):
    """Let a seal copy 4 KiB of parameters at a time, so that it has many blocks to be amid."""
    for module in (offload.format.manifest, offload.model.model_file):
        monkeypatch.setattr(module, "MODEL_BLOCK_BYTES", 4096)


@pytest.mark.parametrize(("name", "keep"), [("adamw", 2), ("sgd-momentum-in-some-groups", 3)])
def test_a_step_amid_a_seal_leaves_no_trace_in_it(name, keep, small_blocks, monkeypatch):
    gate = Gate()
    wait_copied = Seal.wait_copied
    waits: list[int] = []

    def open_gate_and_wait(seal: Seal, nbytes: int) -> None:
        gate.opened.set()  # the step has come here while only the first block is copied
        waits.append(nbytes)
        wait_copied(seal, nbytes)

    monkeypatch.setattr(Seal, "wait_copied", open_gate_and_wait)
    pair = Pair(CASES[name], CUTS[0], gate, keep=keep)
    for step in range(FIRST_LATE_STEP + 2):
        gate.opened.set()
        pair.step(step)
        gate.close_gate()
        handle = pair.optimizer.checkpoint({"step": step})
        assert gate.reached.wait(TIMEOUT_S)
        num_waits = len(waits)
        pair.step_live(step + 1)
        assert len(waits) > num_waits
        stored = read_state(handle.result(TIMEOUT_S).path, gate)
        assert_same_state(stored, pair.reference, trainable(pair.expected))
        for parameter, tensor in pair.expected.named_parameters():
            if parameter in stored.model:
                assert_same_bits(stored.model[parameter], tensor, parameter)
        assert pair.optimizer.restore().step == step + 1
        pair.assert_same_parameters()


def test_an_edit_amid_a_seal_fails_the_seal_and_nothing_else(small_blocks):
    gate = Gate()
    pair = Pair(CASES["adamw"], CUTS[0], gate)
    pair.step(0)
    pair.optimizer.checkpoint().result()
    pair.step(1)
    gate.close_gate()
    handle = pair.optimizer.checkpoint()
    assert gate.reached.wait(TIMEOUT_S)
    for model in pair.both():
        with torch.no_grad():
            model.wide64[-1] = 2.0  # near the end of the file: not copied yet
    gate.opened.set()
    with pytest.raises(SealError, match=r"'wide64' was changed in place.*call \.result\(\)"):
        handle.result(TIMEOUT_S)
    with pytest.raises(SealError, match="sealing step 2 failed"):
        pair.step_live(2)
    assert pair.optimizer.checkpoint().result().step == 2
    pair.steps(2, 9)
    pair.assert_same_state()
