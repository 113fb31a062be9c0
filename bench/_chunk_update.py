"""Update of one chunk in memory by `HostUpdater`, ready to be timed: no drive, no ring."""

from __future__ import annotations

import time

import torch

from offload.format.arrays import MASTER, StateFormat
from offload.format.digests import ChunkDigests, DigestContext
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.update.dtypes import DTYPES
from offload.update.kept_state import Scalars
from offload.update.kernel import UpdateKernel
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule
from offload.update.step_keys import StepInputs
from offload.update.updater import HostUpdater

FORMS = {
    "exact": StateFormat(),
    "split": StateFormat("split"),
    "int8": StateFormat("float32", "int8"),
    "split-int8": StateFormat("split", "int8"),
}
"""Stored forms of the state of a bf16 parameter, by the name used in results."""


class ChunkUpdate:
    """AdamW on one bf16 parameter that fills one chunk, with a bf16 gradient.

    Args:
        form: Stored form of the state.
        num_elements: Elements of the parameter; several times what the caches hold.
    """

    def __init__(self, form: StateFormat, num_elements: int) -> None:
        self.rule = UpdateRule(torch.optim.AdamW, {"lr": 1e-4, "weight_decay": 0.1})
        kept = self.rule.rule(self.rule.defaults).arrays
        spec = ParameterSpec("p", "BF16", (num_elements,), 0, form.stored_arrays("BF16", kept))
        model = (ModelTensor("p", "BF16", (num_elements,)),)
        chunk_elements = -(-num_elements // 1024) * 1024
        self.layout = Layout((spec,), model, chunk_elements, form.state_dtype)
        generator = torch.Generator().manual_seed(1)
        self.parameter = torch.randn(num_elements, generator=generator).bfloat16()
        self.gradient = torch.randn(num_elements, generator=generator).bfloat16()
        self.arrays = {
            name: torch.zeros(
                share.nbytes // self.layout.formats[name].nbytes,
                dtype=DTYPES[self.layout.formats[name].dtype],
            )
            for name, share in self.layout.plans[0].arrays.items()
        }
        if MASTER in self.arrays:
            self.arrays[MASTER].copy_(self.parameter)
        self._views = {n: a.view(torch.uint8).numpy().data for n, a in self.arrays.items()}
        self._pool = UpdatePool(self.rule)
        self._scalars: Scalars | None = None
        self._step = 0
        for _ in range(2):  # the first step makes the state
            self.seconds(None)

    def close(self) -> None:
        """End the update threads."""
        self._pool.close()

    def seconds(
        self, kernel: UpdateKernel | None, *, digests: bool = False, threads: int = 1
    ) -> tuple[float, float]:
        """Take a step, and return its wall time and the processor time of all threads, in seconds.

        Args:
            kernel: Kernel that takes the step; None for torch's code.
            digests: Whether the stored values are digested.
            threads: Number of threads, at most those of torch.
        """
        self._step += 1
        inputs = StepInputs(
            layout=self.layout,
            groups=[self.rule.defaults],
            parameters=[self.parameter],
            gradients=[self.gradient],
            scalars=[self._scalars],
            step=self._step,
        )
        self._pool.num_threads = threads
        found = ChunkDigests(self._views) if digests else None
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        updater = HostUpdater(self.rule, self._pool, inputs, kernel=kernel)
        updater.update(0, self.arrays, found)
        (self._scalars,) = updater.finish()
        if found is not None:
            found.finish(DigestContext("bench", 0), 0, self._pool.map)
        return time.perf_counter() - wall_s, time.process_time() - cpu_s
