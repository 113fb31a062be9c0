"""Ways of other libraries to save the same state to the same disk, each durably."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.serialization import get_crc32_options, set_crc32_options

from bench._machine import io_bytes, peak_bytes, reset_peak, resident_bytes

State = dict[str, torch.Tensor]
"""Parameters, masters and moments by name; 14 bytes per parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Costs of one save."""

    stall_s: float
    """Seconds until the call returned; for synchronous ways, until the data was durable."""

    still_s: float
    """Seconds during which the state had to stay unchanged."""

    durable_s: float
    """Seconds until the data was durable."""

    written_bytes: int
    """Bytes that the kernel wrote to storage for this process."""

    memory_bytes: int
    """Peak of additional memory in bytes; -1 if the kernel does not tell."""


@dataclass(frozen=True, slots=True)
class _Times:
    """The first three fields of `Saved`."""

    stall_s: float
    still_s: float
    durable_s: float


def make_state(parameters: list[torch.nn.Parameter]) -> State:
    """Return the content of a torch checkpoint of these parameters, with AdamW's state."""
    state: State = {}
    for number, parameter in enumerate(parameters):
        data = parameter.detach()
        state[f"{number}.parameter"] = data
        state[f"{number}.master"] = data.float()
        for name, scale in (("exp_avg", 0.01), ("exp_avg_sq", 1e-4)):
            state[f"{number}.{name}"] = data.float().mul_(scale)
    return state


class Savers:
    """All ways of saving, by name. Call `close` at the end.

    Args:
        directory: Directory for the files. They are removed after each save.
    """

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, "saved")
        self._ways: dict[str, Callable[[State], _Times]] = {
            "torch_save": lambda state: self._torch_save(state, checksums=False),
            "torch_save_crc32": lambda state: self._torch_save(state, checksums=True),
            "safetensors": self._safetensors,
            "dcp_save": self._dcp_save,
            "dcp_async": lambda state: self._dcp_async(state, None),
            "dcp_async_reused": self._dcp_async_reused,
        }
        self._stager: DefaultStager | None = None
        self._group: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all ways."""
        return tuple(self._ways)

    def save(self, name: str, state: State) -> Saved:
        """Save `state` in the way called `name`, remove the files, and return the costs."""
        before, written = resident_bytes(), io_bytes()[1]
        can_reset = reset_peak()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP says that there is one process: it is meant
            times = self._ways[name](state)
        saved = Saved(
            stall_s=times.stall_s,
            still_s=times.still_s,
            durable_s=times.durable_s,
            written_bytes=io_bytes()[1] - written,
            memory_bytes=max(0, peak_bytes() - before) if can_reset else -1,
        )
        self.remove()
        return saved

    def write_torch(self, state: State, path: str) -> None:
        """Write `state` with `torch.save`, durably."""
        torch.save(state, path)
        _sync(path)

    def remove(self) -> None:
        """Remove the files of the last save durably, so that this does not slow the next sample."""
        if os.path.isdir(self._path):
            shutil.rmtree(self._path)
        elif os.path.exists(self._path):
            os.remove(self._path)
        _sync(os.path.dirname(self._path))

    def close(self) -> None:
        """Remove the files, and release copies and the process group."""
        self.remove()
        if self._stager is not None:
            self._stager.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _torch_save(self, state: State, *, checksums: bool) -> _Times:
        before = get_crc32_options()
        set_crc32_options(checksums)
        try:
            return _timed(lambda: self.write_torch(state, self._path))
        finally:
            set_crc32_options(before)

    def _safetensors(self, state: State) -> _Times:
        def save_durably() -> None:
            """Write the file, and sync it."""
            save_file(state, self._path)
            _sync(self._path)

        return _timed(save_durably)

    def _dcp_save(self, state: State) -> _Times:
        return _timed(lambda: save(state, storage_writer=self._writer(), no_dist=True))

    def _dcp_async(self, state: State, stager: DefaultStager | None) -> _Times:
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        writer = self._writer()
        started = time.perf_counter()
        response: Any = async_save(state, storage_writer=writer, async_stager=stager)
        called = time.perf_counter() - started
        staging = getattr(response, "staging_completion", None)
        if staging is not None:
            staging.result()
        staged = time.perf_counter() - started
        getattr(response, "upload_completion", response).result()
        return _Times(called, staged if staging is not None else called, _since(started))

    def _dcp_async_reused(self, state: State) -> _Times:
        if self._stager is None:
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=False,
                    use_async_staging=True,
                    use_non_blocking_copy=False,
                )
            )
        return self._dcp_async(state, self._stager)

    def _writer(self) -> FileSystemWriter:
        return FileSystemWriter(self._path, sync_files=True)


def _timed(save: Callable[[], None]) -> _Times:
    started = time.perf_counter()
    save()
    seconds = _since(started)
    return _Times(seconds, seconds, seconds)


def _since(started: float) -> float:
    return time.perf_counter() - started


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
