"""DeepSpeed's process of `bench.update_cpu`: its CPUAdam, with the casts that bf16 training needs.

The state is that of `bench._chunk_update`: FP32 master and moments of one bf16 parameter, which has
a bf16 gradient. A step casts the gradient to FP32, steps the master, and casts it into the
parameter. Besides DeepSpeed, it needs only torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from bench._peer_protocol import Reply, serve


def make(settings: Reply) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Return functions that take steps, and that close, for `settings`."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    parameter = torch.randn(settings["parameters"], generator=generator).bfloat16()
    gradient = torch.randn(settings["parameters"], generator=generator).bfloat16()
    master = torch.nn.Parameter(parameter.float())
    upcast = torch.empty_like(master)
    master.grad = upcast
    optimizer = DeepSpeedCPUAdam([master], **settings["hyper"])

    def step(steps: int) -> None:
        """Take steps."""
        for _ in range(steps):
            upcast.copy_(gradient)
            optimizer.step()
            parameter.copy_(master.detach())

    step(2)  # the first step makes the state
    return step, lambda: None


if __name__ == "__main__":
    serve(make)
