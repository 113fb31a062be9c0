"""What one process of `bench._ranks` does: it trains as a rank, and measures when it is asked to.

The model is parameters only, and their gradients are fixed, so that a step is the optimizer's work
alone. All ranks make the same calls, and begin each of them together.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist

from bench._machine import io_bytes, peak_bytes, reset_peak, resident_bytes
from bench._model import make_gradients, make_parameters
from tests.dying import die_with_parent

Kind = Literal["ddp", "fsdp2", "mixed"]

_TIMEOUT_S = 300.0
_LEARNING_RATE = 1e-4
_WIDTH = 1024


@dataclass(frozen=True)
class RankSetting:
    """What ranks train, and how."""

    directory: str
    """Directory of the store."""

    kind: Kind
    """``ddp``; ``fsdp2`` with 16-bit shards; or ``mixed``, which is FSDP2 with FP32 shards under a
    mixed-precision policy. A single process has the same parameters without a wrapper."""

    parameters: int
    tensors: int
    chunk_bytes: int
    ring_chunks: int
    """Number of chunks in each rank's memory."""

    threads: int
    """Number of reads, and of writes, that each rank has in flight."""

    compute_threads: int
    """Number of threads that each rank computes with."""

    keep: int = 1


class Flat(torch.nn.Module):
    """A model of parameters only."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(parameters)


class Rank:
    """A rank whose methods the script calls; all but the first are collective."""

    def __init__(self, setting: RankSetting, size: int) -> None:
        from bench._ranks_timing import TimedSeals

        self._size = size
        self._setting = setting
        self._model = self._make_model()
        for parameter in self._model.parameters():
            parameter.grad = _gradient_of(parameter)
        self._seals = TimedSeals(setting.threads)
        _give_back_freed_memory()
        self._is_resettable = reset_peak()
        self._base_bytes = resident_bytes()
        self._ring_bytes = 0
        self._optimizer = self._make_optimizer()
        self.step(2)  # these make the state, and write to space that is only reserved

    def _make_model(self) -> torch.nn.Module:
        setting = self._setting
        model = Flat([_as_rows(p) for p in make_parameters(setting.parameters, setting.tensors)])
        if self._size == 1:
            return model.float() if setting.kind == "mixed" else model
        if setting.kind == "ddp":
            return torch.nn.parallel.DistributedDataParallel(model)
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if setting.kind == "mixed":
            model.float()
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mp_policy=policy)
        return model

    def _make_optimizer(self) -> Any:
        import offload

        setting = self._setting
        return offload.AdamW(
            self._model.parameters(),
            lr=_LEARNING_RATE,
            weight_decay=0.1,
            directory=setting.directory,
            model=self._model,
            keep=setting.keep,
            options=offload.Options(
                chunk_bytes=setting.chunk_bytes,
                ring_chunks=setting.ring_chunks,
                backend=self._seals.backend,
                agreement_timeout_s=_TIMEOUT_S,
            ),
        )

    def ready(self) -> None:
        """Do nothing; the answer tells that the rank is ready."""

    def step(self, steps: int) -> float:
        """Return the seconds of one step, as the mean of several steps back to back."""
        self._meet()
        started = time.perf_counter()
        for _ in range(steps):
            self._optimizer.step()
        self._optimizer.synchronize()
        seconds = time.perf_counter() - started
        self._ring_bytes = max(self._ring_bytes, self._optimizer.stats().ring_bytes)
        return seconds / steps

    def seal(self) -> float:
        """Take a step, and return the seconds until its checkpoint is durable."""
        self.step(1)
        self._meet()
        return self.seal_now()

    def seal_now(self) -> float:
        """Return the seconds until a checkpoint of the last step is durable."""
        started = time.perf_counter()
        self._optimizer.checkpoint().result()
        return time.perf_counter() - started

    def restore(self) -> float:
        """Return the seconds of a restore."""
        self._meet()
        started = time.perf_counter()
        self._optimizer.restore()
        return time.perf_counter() - started

    def agreement(self, pause_s: float) -> dict[str, Any]:
        """Take a step, wait, seal, and return when this rank did what; see `TimedSeals.events`."""
        self.step(1)
        self._meet()
        time.sleep(pause_s)
        self._seals.forget()
        self._optimizer.checkpoint().result()
        ended = time.monotonic()
        return {**self._seals.events(), "ended": ended}

    def io_of(self, call: str, *arguments: Any) -> dict[str, int]:
        """Make a call, and return the bytes this process has read and written in it."""
        self._meet()
        before = io_bytes()
        getattr(self, call)(*arguments)
        self._meet()
        read, written = (now - was for now, was in zip(io_bytes(), before, strict=True))
        return {"read": read, "written": written}

    def memory(self) -> dict[str, int]:
        """Return the peak of memory beyond the model and its gradients since the last call.

        The peak begins with the construction of the optimizer.
        """
        found = {
            "above_model": peak_bytes() - self._base_bytes,
            "ring": self._ring_bytes,
            "resettable": int(self._is_resettable),
        }
        reset_peak()
        return found

    def close(self) -> None:
        """Close the optimizer."""
        self._optimizer.close()

    def _meet(self) -> None:
        """Wait until nothing is in flight, and until every rank is as far as this."""
        self._optimizer.synchronize()
        if self._size > 1:
            dist.barrier()


def _as_rows(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a parameter with rows like a layer's; torch takes memory for each row of a DTensor."""
    width = _WIDTH if parameter.numel() % _WIDTH == 0 else 1
    return torch.nn.Parameter(parameter.detach().view(-1, width))


def _give_back_freed_memory() -> None:
    """Let the C library give back what it keeps of freed memory, so that it is not counted."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter.data, DTensor):
        return make_gradients([parameter])[0]
    (own,) = make_gradients([torch.nn.Parameter(parameter.data.to_local())])
    return DTensor.from_local(
        own, parameter.data.device_mesh, parameter.data.placements, run_check=False
    )


def serve(pipe: Connection, setting: RankSetting, rank: int, size: int, port: int) -> None:
    """Make calls for a script until it closes the pipe."""
    die_with_parent(script.pid if (script := parent_process()) else 0)
    torch.set_num_threads(setting.compute_threads)
    warnings.filterwarnings("ignore", message=".*barrier.*")
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
        )
    made: Rank | None = None
    try:
        while True:
            call, arguments = pipe.recv()
            try:
                made = made or Rank(setting, size)
                pipe.send(("", getattr(made, call)(*arguments)))
            except Exception:  # noqa: BLE001  (the script raises it)
                pipe.send((traceback.format_exc(), None))
    except EOFError:
        if made is not None:
            made.close()
        if size > 1:
            dist.destroy_process_group()
