"""Several implementations step one chunk: each takes only pieces that none before it has taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from offload.device.staging import Traffic
from offload.update.host_place import HostPlace
from offload.update.kernel import KernelStep
from offload.update.pool import UpdatePool
from offload.update.step_code import Call, LoadedChunk, PieceNumbers, StepCode
from offload.update.step_keys import StepKeys
from offload.update.torch_step import TorchStep
from offload.update.updater import ChunkUpdater
from tests.update_kernel.chunk_steps import ChunkStep, Parameter
from tests.update_kernel.steps import kernel_for

BF16 = torch.bfloat16


class TakesOnly:
    """Code that takes some pieces, and changes nothing."""

    def __init__(self, wanted: Sequence[int]) -> None:
        self._wanted = wanted

    def why_not(self, group: int) -> str:
        return ""

    def add_gradient(self, index: int) -> None:
        pass

    def calls(
        self, chunk: LoadedChunk, numbers: PieceNumbers
    ) -> tuple[Sequence[Call], PieceNumbers]:
        return [], numbers[~np.isin(numbers, self._wanted)]

    def done(self, chunk: LoadedChunk) -> None:
        pass


@pytest.mark.parametrize("by_kernel", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("taken", [(), (1,), (0, 3), (0, 1, 2, 3)], ids=str)
def test_code_leaves_alone_what_other_code_has_taken(
    taken: tuple[int, ...], by_kernel: bool
) -> None:
    parameters = [Parameter(n, BF16, BF16) for n in (40, 1000, 333, 70)]
    one = ChunkStep(torch.optim.AdamW, parameters, [{"lr": 0.1}])
    live, stored = [p.clone() for p in one.live], {n: a.clone() for n, a in one.stored[0].items()}
    inputs = one.inputs(live)
    pool = UpdatePool(one.rule)
    try:
        keys = StepKeys(one.rule, pool, inputs, may_fuse=False)
        place = HostPlace(pool, keys, inputs, Traffic())
        codes: list[StepCode] = [TakesOnly(taken)]
        if by_kernel:
            kernel = kernel_for(torch.optim.AdamW)
            codes.append(KernelStep(kernel, keys, inputs, place.live, place.gradients))
        codes.append(TorchStep(keys, inputs, place.live, place.gradients))
        ChunkUpdater(one.layout, keys, place, codes).update(0, stored)
    finally:
        pool.close()
    all_stepped = one.taken(None)
    for index, parameter in enumerate(live):
        expected = one.live if index in taken else all_stepped.live
        assert torch.equal(parameter, expected[index]), index
    starts = one.layout.plans[0].arrays["exp_avg"].starts
    for name, values in stored.items():
        for index in range(len(parameters)):
            part = slice(starts[index], starts[index + 1])
            expected_values = one.stored[0] if index in taken else all_stepped.stored[0]
            assert torch.equal(values[part], expected_values[name][part]), (name, index)
