"""Program: steps parameters of every short length by a library that was built with sanitizers.

Every array is memory of its own, and as long as its values: the address sanitizer ends the program
if one byte beside them is read or written, and the other one if an operation is not defined.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from offload.update.kernel import UpdateKernel
from offload.update.kernel.loading import Library
from tests.update_kernel.chunk_steps import ChunkStep, Parameter

FORMS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
]
GROUPS = [
    (torch.optim.AdamW, {"maximize": True}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
]


def main(path: str, instructions: str, last: int) -> None:
    """Step every length to `last`, and some longer ones, in every form."""
    library = Library(Path(path), instructions)
    num = 0
    for length in [*range(1, last + 1), 4095, 4096, 4097, 4129]:
        for place, (optimizer, group) in enumerate(GROUPS):
            for state_dtype in ("float32", "bfloat16", "int8"):
                given, gradient = FORMS[(length + place) % len(FORMS)]
                for master in ("float32", "split"):
                    one = ChunkStep(
                        optimizer,
                        [Parameter(length, given, gradient)],
                        [group],
                        master,
                        state_dtype,
                        "bits",
                        seed=length,
                    )
                    one.taken(UpdateKernel(library, 0, optimizer))
                    num += 1
    parameters = [Parameter(n, *FORMS[n % len(FORMS)]) for n in (300_001, 7, 262_144, 33, 100_000)]
    for state_dtype in ("float32", "bfloat16", "int8"):
        one = ChunkStep(
            torch.optim.AdamW, parameters, [{}], "split", state_dtype, chunk_elements=1 << 18
        )
        one.taken(UpdateKernel(library, 0, torch.optim.AdamW), threads=2)
        num += 1
    for length in (16, 32, 160):
        for kind in (0, 1, 2):
            library.roots(kind, torch.rand(length))
    print(f"{num} steps")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
