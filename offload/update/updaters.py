"""The updaters of a step: for each place, the code that steps chunks there, in order of preference.

This is the only module that knows all implementations of `Place` and of `StepCode`.
"""

from __future__ import annotations

from offload.device.compute import Compute
from offload.device.staging import Traffic
from offload.format.arrays import MASTER_LOW
from offload.update.device_place import DevicePlace
from offload.update.device_step import DeviceStep
from offload.update.host_place import HostPlace
from offload.update.kernel import KernelStep, UpdateKernel
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule
from offload.update.step_code import StepCode
from offload.update.step_inputs import StepInputs
from offload.update.step_keys import StepKeys
from offload.update.steppable import require_steppable
from offload.update.torch_step import TorchStep
from offload.update.updater import ChunkUpdater


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
