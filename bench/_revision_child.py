"""Child of `bench.revisions`: prints the median time of a step, in seconds.

It is run by its path with another checkout on the path, so it imports nothing of `bench`.
"""

import statistics
import sys
import time

import torch

import offload
from gds import MemoryBackend

_WARM_UP_STEPS = 4
_STEPS = 10

if __name__ == "__main__":
    num_tensors, elements = map(int, sys.argv[1:])
    torch.manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(elements).to(torch.bfloat16)) for _ in range(num_tensors)
    ]
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True)
    seconds = []
    with offload.AdamW(
        parameters, lr=1e-4, weight_decay=0.1, directory="/run", options=options
    ) as optimizer:
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 0.01
        for _ in range(_WARM_UP_STEPS + _STEPS):
            started = time.perf_counter()
            optimizer.step()
            optimizer.synchronize()
            seconds.append(time.perf_counter() - started)
    print(statistics.median(seconds[_WARM_UP_STEPS:]))
