"""The update of chunks: one order of calls, whichever place they run in and whichever code steps.

A step has one `ChunkUpdater`, and the engine knows nothing else of the arithmetic. Behind it are:

- A `Place`, which is where chunks are updated: the CPU or a device (`places`). It brings parameters
  and gradients there, and runs the calls.
- Implementations of `StepCode` (`step_code`), which step elements: a kernel, and torch's own code.
  A piece of a chunk goes to the first one that can step it.
- `StepKeys` (`step_keys`), the hyper-parameters and scalar state.

`host_updater` and `device_updater` put them together. In one place, every implementation gives the
same bits.

In all of them, the live parameter wins. If it differs from its rounded master, it has been edited
since the last step (clamped, loaded, or replaced by an average). The edited elements then replace
those of the master, as if the parameter had been FP32 all along. If the live parameter *is* the
upper half of the master (``master="split"``), no comparison is needed. An edited value then keeps
the lower half of the old master, which is less than half a step of bf16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from offload.device.compute import Compute
from offload.device.staging import Traffic
from offload.format.arrays import MASTER_LOW
from offload.format.digests import Digests
from offload.format.layout import Layout
from offload.update.device_step import DeviceStep
from offload.update.kept_state import Scalars
from offload.update.kernel import KernelStep, UpdateKernel
from offload.update.places import DevicePlace, HostPlace, Place
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule
from offload.update.step_code import Call, StepCode
from offload.update.step_keys import StepInputs, StepKeys
from offload.update.steppable import require_steppable
from offload.update.torch_step import TorchStep


class ChunkUpdater:
    """Updates the chunks of one step; made by `host_updater` and `device_updater`.

    Args:
        layout: Layout of the state.
        keys: Keys of the parameters.
        place: Where the chunks are updated.
        codes: Implementations that step them. Each is offered the pieces that those before it have
            left. The last one must take all.
        doubts: How the results of `codes` differ from torch's own step, in words.
    """

    def __init__(
        self,
        layout: Layout,
        keys: StepKeys,
        place: Place,
        codes: Sequence[StepCode],
        *,
        doubts: Sequence[str] = (),
    ) -> None:
        self._doubts = doubts
        self._layout = layout
        self._keys = keys
        self._place = place
        self._codes = codes
        self.device = place.device
        """Device on which chunks are updated."""

    def set_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Set the gradient of a parameter that had none, before any of its chunks is updated.

        If the gradient is on a device, its values are those that the work queued on the current
        stream so far computes.
        """
        self._place.set_gradient(index, gradient)
        self._keys.add_gradient(index)
        for code in self._codes:
            code.add_gradient(index)

    def touched(self, chunk: int) -> bool:
        """Return whether any parameter in the chunk has a gradient."""
        pieces, keys = self._layout.plans[chunk].pieces, self._keys.of
        return any(keys[piece.parameter].has_gradient for piece in pieces)

    def prepare(self, chunk: int) -> bool:
        """Begin to bring the data that a chunk needs to the place where the chunk is updated.

        The caller then waits for the chunk's state, and then calls `arrive` and `update`.

        Returns:
            Whether anything crosses, so that `arrive` must be called.
        """
        return self._place.prepare(chunk)

    def arrive(self, chunk: int) -> None:
        """Wait until the data that `prepare` requested has arrived."""
        self._place.arrive(chunk)

    def update(
        self, chunk: int, arrays: Mapping[str, torch.Tensor], digests: Digests | None = None
    ) -> None:
        """Step one chunk. On return, the memory of `arrays` is free for other uses.

        Args:
            chunk: Index of the chunk.
            arrays: The chunk's range of each state array, flat, in the stored dtype; updated in
                place. Ranges of parameters that have no state yet may hold anything, and are
                initialised.
            digests: Digests that are told of the bytes that are final.
        """
        with self._place.loaded(chunk, arrays, digests) as loaded:
            numbers = np.arange(len(self._layout.plans[chunk].pieces))
            calls: list[Call] = []
            for code in self._codes:
                taken, numbers = code.calls(loaded, numbers)
                calls += taken
            self._place.run(calls)
            for code in self._codes:
                code.done(loaded)

    def fence(self) -> None:
        """Make the calling thread's current streams wait for the parameters updated so far."""
        self._place.fence()

    def finish(self) -> list[Scalars | None]:
        """Return the scalar state of each parameter after the step."""
        return self._keys.finish()

    def code(self, chosen: str) -> str:
        """Return which code takes this step, in words.

        Args:
            chosen: Code that was chosen for the class, as `ChosenCode.code`.
        """
        if self._doubts:
            chosen = f"{chosen}, although {'; '.join(self._doubts)}"
        found = [self._codes[0].why_not(group) for group in range(len(self._keys.groups))]
        reasons = [reason for reason in found if reason]
        if not reasons:
            return chosen
        torchs = f"torch ({'; '.join(dict.fromkeys(reasons))})"
        return torchs if len(reasons) == len(found) else f"{chosen}, {torchs}"


def host_updater(
    rule: UpdateRule,
    pool: UpdatePool,
    inputs: StepInputs,
    *,
    kernel: UpdateKernel | None = None,
    traffic: Traffic | None = None,
) -> ChunkUpdater:
    """Return an updater that updates chunks on the CPU: by the kernel, the rest by torch's code.

    Args:
        rule: Update rule of the optimizer.
        pool: Threads that update.
        inputs: Everything that the step computes with.
        kernel: Kernel that steps the parameters that it can; None for torch's code only.
        traffic: Counter of the bytes that cross between the host and the parameters' device.
    """
    # State that is stored exactly needs the bits of torch's default step; see `UpdateRule.fused`.
    keys = StepKeys(rule, pool, inputs, may_fuse=inputs.layout.state_dtype != "float32")
    place = HostPlace(pool, keys, inputs, traffic or Traffic())
    codes: list[StepCode] = [TorchStep(keys, inputs, place.live, place.gradients)]
    if kernel is not None:
        codes.insert(0, KernelStep(kernel, keys, inputs, place.live, place.gradients))
    return ChunkUpdater(inputs.layout, keys, place, codes)


def device_updater(
    rule: UpdateRule, pool: UpdatePool, inputs: StepInputs, *, compute: Compute
) -> ChunkUpdater:
    """Return an updater that updates chunks on a device: by its kernels, the rest by torch's code.

    Args:
        rule: Update rule of the optimizer.
        pool: Pool whose stepper counts the steps of kernels.
        inputs: Everything that the step computes with.
        compute: Compute of the device that holds parameters, gradients and frames.

    Raises:
        UnsupportedOptimizerError: A parameter group cannot be stepped on a device; says why.
        UnsupportedParameterError: A parameter or gradient is on another device by now; names the
            parameter.
    """
    layout = inputs.layout
    keys = StepKeys(rule, pool, inputs, may_fuse=False)
    place = DevicePlace(compute, rule, inputs)
    split = MASTER_LOW in layout.array_names
    require_steppable(rule, keys.groups, layout.state_dtype, split=split)
    kernels = DeviceStep(compute, rule, keys, inputs, place.live, place.gradients)
    torchs = TorchStep(keys, inputs, place.live, place.gradients)
    return ChunkUpdater(layout, keys, place, [kernels, torchs], doubts=kernels.doubts)
