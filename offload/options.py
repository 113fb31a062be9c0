"""Settings that belong to the machine, not to the model or to torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from gds import ALIGNMENT, Backend
from offload.format.arrays import MasterFormat, StateDtype, StateFormat
from offload.format.train_state import MAX_CAPACITY_BYTES

Overlap: TypeAlias = Literal["forward", "backward"]
"""What of the model's work a step may run beside."""

Placement: TypeAlias = Literal["auto", "host", "device"]
Verify: TypeAlias = Literal["restored", "at_restore", "always"]

_MIN_CHUNK_BYTES = ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveTuning:
    """How the drives are used, if that is not to be measured; nothing of it changes any bit.

    What is None here is measured on the drives of the store, or found out by trying it.
    """

    threads: int | None = None
    """Reads, and writes, that run at once. None for what was measured to suit the drive, or 3."""

    request_bytes: int | None = None
    """Most bytes to ask of the drive at once, a multiple of 4096. None for what was measured to
    suit the drive; where nothing was, a chunk of one state array is one request."""

    shares: tuple[int, ...] | None = None
    """With ``directory=[a, b, ...]``: how much of the state each of them holds, as whole numbers in
    proportion to each other. None means in proportion to their bandwidth, which is measured. Fixed
    when a store is made: a resume keeps the store's own."""

    direct: bool | None = None
    """Bypass the page cache: True insists, False never does, None does wherever it works."""

    calibrate: bool = True
    """Measure the drive for a second or two before the first step of a store of 1 GiB or more, and
    each drive when a store on several is made; remember it there, as ``calibration.json``."""

    def __post_init__(self) -> None:
        """Refuse values that could not work, saying why."""
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")
        if self.request_bytes is not None and (
            self.request_bytes < ALIGNMENT or self.request_bytes % ALIGNMENT
        ):
            raise ValueError(
                f"request_bytes must be a multiple of {ALIGNMENT}, got {self.request_bytes}"
            )
        if self.shares is not None and (
            not all(type(share) is int and share >= 1 for share in self.shares)
            or not 1 <= sum(self.shares) <= 1024
        ):
            raise ValueError(
                "shares must be whole numbers of at least 1, one for each directory, and at most "
                f"1024 together, got {self.shares}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How state is streamed and stored; every default is right for most machines.

    Results depend on `master`, `state_dtype`, `rounding_seed` (with ``state_dtype="bfloat16"``) and
    `placement`. All others change no bit, neither of parameters nor of what is stored of them.
    There is one exception: in stores that were made with compressed state by version 2 of the
    format, results depend on `chunk_bytes` with ``state_dtype="int8"``. Such a store keeps its own.
    """

    chunk_bytes: int = 32 << 20
    """Bytes of one FP32 state array that are streamed at a time. Rounded down to 4 KiB. Fixed when
    a store is made: a resume keeps the store's own value."""

    ring_chunks: int | None = None
    """Chunks in memory at once: those being read, updated and written. At least 2. The ring takes
    ``ring_chunks * chunk_bytes * number of state arrays`` of memory: of the host, or of the device
    where state is updated there. None for what the drive needs, as measured, or 6."""

    host_memory: int | str = 0
    """Bytes, or a string such as ``"8GiB"``, of host memory in which state may stay between steps,
    besides the ring. Chunks that fit in it are neither read nor written by a step, only written
    when a checkpoint is sealed."""

    device_memory: int | str = 0
    """Likewise of a device's memory, where state is updated there: see `placement`."""

    master: MasterFormat = "float32"
    """``"split"``: for bf16 parameters, store only the lower 16 bits of each FP32 master; the live
    parameter is the upper half. 2 bytes per parameter less to read and write, and no bit is lost;
    but the parameter is then rounded half away from zero rather than half to even, so results
    differ from torch's in that."""

    state_dtype: StateDtype = "float32"
    """How state other than masters is stored: ``"bfloat16"`` (rounded stochastically) or
    ``"int8"`` (in blocks of 32 with a common scale, as FlashOptim does). Fewer bytes, and results
    that differ from FP32 state. Reproducible, and the same after a resume. What becomes of a
    parameter depends on its own name and elements, and on nothing else that is in the store."""

    overlap: Overlap | None = None
    """Hide the step behind the model's work; needs ``model=``. None: ``step()`` returns when the
    parameters are updated. ``"forward"``: it returns at once, having moved the gradients out, and
    the next forward waits, module by module, for the parameters that it uses, and so does whoever
    else reads one through torch. ``"backward"``: parameters are updated as soon as their gradients
    are final, so that nothing can be done to gradients between ``backward()`` and ``step()``. A
    backward that goes on through the model to something else (a GAN's generator, an input) is
    applied by ``step()``, which waits for it."""

    placement: Placement = "auto"
    """Where parameters on a device are updated. ``"host"``: on the CPU, next to the drive; their
    gradients cross to the host, and the parameters both ways, chunk by chunk, while others are
    updated. State never crosses. ``"device"``: where they are; state goes between the drive and
    device memory (GPUDirect Storage where that works), the ring is there, and nothing but digests
    crosses. Needs the extra ``gpu``, and all parameters on one device at the first step.
    ``"auto"``: where a step takes less time, from what the drive, the CPU and the link were
    measured to do; on the CPU if there is not much in it, and for parameters that are in host
    memory when the optimizer is made. The two round differently in the last bit."""

    rounding_seed: int = 0
    """Seed of the stochastic rounding of ``state_dtype="bfloat16"``. Not stored: give a resume the
    same one if it is to go on to the same bits."""

    verify: Verify = "restored"
    """When state that is read is compared with the digests taken as it was written. ``"restored"``:
    in the first step after a `restore`. ``"at_restore"``: in the `restore` itself, and wherever
    else a checkpoint is loaded (`load_state_dict`, the Trainer, Lightning); with Adam this reads 12
    bytes per parameter more, and damage is found before a step is taken. ``"always"``: in every
    step, which costs the CPU another digest of all state."""

    drives: DriveTuning = DriveTuning()
    """How the drives are used: see `DriveTuning`. All of it is measured by default."""

    allow_volatile: bool = False
    """Accept a directory whose content is lost at power-off (tmpfs). Meant for tests."""

    allow_remote: bool = False
    """Accept a directory on a file system that another machine or a program serves (NFS, SMB, FUSE,
    ...). What a lock keeps out, and what has become durable, is then decided there: nothing in
    docs/guarantees.md is promised."""

    train_state_bytes: int = 256 << 10
    """Bytes reserved in every checkpoint for `train_state`."""

    reader_timeout_s: float = 60.0
    """Seconds to wait, after a warning, for readers to let go of an expired checkpoint."""

    trace: str | os.PathLike[str] | None = None
    """File to write a Chrome trace to when the optimizer is closed, with lanes for the training
    thread, updates, reads and writes. Open it in Perfetto."""

    backend: Backend | None = None
    """Storage backend to use instead of the built-in choice. The optimizer does not close it."""

    def __post_init__(self) -> None:
        """Refuse values that could not work, saying why."""
        if self.chunk_bytes < _MIN_CHUNK_BYTES:
            raise ValueError(
                f"chunk_bytes must be at least {_MIN_CHUNK_BYTES} (the alignment of direct I/O), "
                f"got {self.chunk_bytes}"
            )
        if not isinstance(self.drives, DriveTuning):
            raise TypeError(
                f"drives must be an offload.DriveTuning, got {type(self.drives).__name__}: write "
                "Options(drives=offload.DriveTuning(...))"
            )
        if self.ring_chunks is not None and self.ring_chunks < 2:
            raise ValueError(
                "ring_chunks must be at least 2, so that one chunk can be read while another is "
                f"written, got {self.ring_chunks}"
            )
        for name, value, known in (
            ("master", self.master, get_args(MasterFormat)),
            ("state_dtype", self.state_dtype, get_args(StateDtype)),
            ("overlap", self.overlap, (None, *get_args(Overlap))),
            ("placement", self.placement, get_args(Placement)),
            ("verify", self.verify, get_args(Verify)),
        ):
            if value not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(str, known))}, got {value!r}"
                )
        host_memory_bytes, device_memory_bytes = self.host_memory_bytes, self.device_memory_bytes
        if self.placement == "device" and host_memory_bytes:
            raise ValueError(
                'host_memory has no effect with placement="device": state stays in device_memory'
            )
        if self.placement == "host" and device_memory_bytes:
            raise ValueError(
                'device_memory has no effect with placement="host": state stays in host_memory'
            )
        if (
            self.train_state_bytes % ALIGNMENT
            or not 2 * ALIGNMENT <= self.train_state_bytes <= MAX_CAPACITY_BYTES
        ):
            raise ValueError(
                f"train_state_bytes must be a multiple of {ALIGNMENT} from {2 * ALIGNMENT} to "
                f"{MAX_CAPACITY_BYTES}, got {self.train_state_bytes}"
            )
        if self.reader_timeout_s < 0:
            raise ValueError(f"reader_timeout_s must not be negative, got {self.reader_timeout_s}")
        drives = self.drives
        if self.backend is not None and drives.direct is not None:
            raise ValueError("direct has no effect on a backend that is passed in: set one of them")
        if self.backend is not None and (drives.threads or drives.request_bytes):
            raise ValueError(
                "threads and request_bytes have no effect on a backend that is passed in: set them "
                "there"
            )

    @property
    def host_memory_bytes(self) -> int:
        """`host_memory` as a number."""
        return parse_bytes(self.host_memory, "host_memory")

    @property
    def device_memory_bytes(self) -> int:
        """`device_memory` as a number."""
        return parse_bytes(self.device_memory, "device_memory")

    @property
    def state_format(self) -> StateFormat:
        """How the state of a new store is encoded."""
        return StateFormat(self.master, self.state_dtype)

    @property
    def chunk_elements(self) -> int:
        """Elements of element space in one chunk; a multiple of 1024."""
        return self.chunk_bytes // ALIGNMENT * (ALIGNMENT // 4)


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1 << 10 * power for power, unit in enumerate("kmgt", start=1)}


def parse_bytes(value: int | str, name: str) -> int:
    """Return a number of bytes, given as one or as text such as ``"8GiB"`` or ``"500 MB"``.

    Raises `ValueError` naming the setting `name`.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", value.lower())
        if match and match[2] in _UNITS:
            return int(float(match[1]) * _UNITS[match[2]])
    raise ValueError(f'{name} must be a number of bytes, or text such as "8GiB", got {value!r}')
