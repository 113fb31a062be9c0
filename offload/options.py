"""Settings that belong to the machine, not to the model or to torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

from gds import ALIGNMENT, Backend
from offload.format.arrays import MasterFormat, StateDtype, StateFormat
from offload.format.train_state import MAX_CAPACITY_BYTES

Overlap: TypeAlias = Literal["forward", "backward"]
"""Part of the model's work that a step may run beside."""

Gradients: TypeAlias = Literal["host", "drive"]
Parameters: TypeAlias = Literal["host", "drive"]
"""Place of the parameters of blocks that are not in use."""

Placement: TypeAlias = Literal["auto", "host", "device"]
Verify: TypeAlias = Literal["restored", "at_restore", "always"]

_MIN_CHUNK_BYTES = ALIGNMENT


@dataclass(frozen=True, slots=True)
class Tier:
    """A place for copies of checkpoints, and how much may be spent on it; see ``docs/tiers.md``.

    Raises:
        ValueError: A value is not possible. The message says why.
    """

    url: str
    """URL of the tier: ``s3://bucket/folder``, ``gs://...``, ``az://...`` or ``file:///folder``."""

    max_slowdown: float = 0.05
    """Largest share by which uploads may slow training down, as measured on its steps. If they slow
    it down by more, a checkpoint is uploaded only if the newest in the tier would else become older
    than `max_age_s`."""

    max_age_s: float | None = None
    """Age in seconds that the newest checkpoint in the tier should not exceed: no more checkpoints
    are uploaded than this needs. None uploads as many as the link can take."""

    check: Literal["read", "size"] = "read"
    """How an object is checked after it was sent: it is read back and compared with its digests, or
    only its size is compared, which takes half of the traffic and less processor time."""

    finish_s: float = 60.0
    """Longest time in seconds that ``close()`` waits for an upload. If it is not complete by then,
    it ends after the part that it is sending; ``offload push`` goes on with it."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for values that are not possible."""
        if not self.max_slowdown >= 0:
            raise ValueError(f"max_slowdown must not be negative, got {self.max_slowdown}")
        if self.max_age_s is not None and not self.max_age_s > 0:
            raise ValueError(f"max_age_s must be positive, got {self.max_age_s}")
        if self.check not in ("read", "size"):
            raise ValueError(f"check must be 'read' or 'size', got {self.check!r}")
        if not self.finish_s >= 0:
            raise ValueError(f"finish_s must not be negative, got {self.finish_s}")


@dataclass(frozen=True, slots=True)
class MemoryDirectory:
    """A directory whose files are memory, in which state may stay between steps.

    The kernel does not count that memory as anonymous memory of the process. It is returned when
    the optimizer is closed, or the process ends. No checkpoint depends on it.

    Raises:
        ValueError: The size is not possible. The message says why.
    """

    path: str | os.PathLike[str]
    """Directory on a DAX device (CXL or persistent memory, mounted with ``-o dax``), on hugetlbfs,
    or on tmpfs."""

    size: int | str | None = None
    """Most memory that is taken, by each rank: a number of bytes, or a string such as ``"64GiB"``.
    None for as much as is free when the first step begins, but for 1/64 of it. A size is required
    with several ranks, on tmpfs, and on hugetlbfs that was mounted without ``size=``."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a size that is not possible."""
        if self.size_bytes == 0:
            raise ValueError(
                f"size of {os.fsdecode(self.path)} must be positive, got {self.size!r}"
            )

    @property
    def size_bytes(self) -> int | None:
        """`size` in bytes; None if the free space decides."""
        return None if self.size is None else parse_bytes(self.size, "size")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveTuning:
    """Settings for using the drives; every default is measured, or found out by trying.

    No setting changes any bit of parameters or stored state.

    Raises:
        ValueError: A value is not possible. The message says why.
    """

    threads: int | None = None
    """Number of reads, and of writes, that run at once. None for the number that was measured to
    suit the drive; 3 if nothing was measured."""

    request_bytes: int | None = None
    """Most bytes in one request to the drive, a multiple of 4096. None for the size that was
    measured to suit the drive; if nothing was measured, a chunk of one state array is one
    request."""

    shares: tuple[int, ...] | None = None
    """Proportions of the state on each drive with ``directory=[a, b, ...]``: whole numbers of at
    least 1, one for each directory, and at most 1024 in total. None for the proportions of the
    drives' measured bandwidths. The value is fixed when a store is made; a resume keeps the store's
    own."""

    direct: bool | None = None
    """Whether to bypass the page cache: True requires it, False never does it, None does it if it
    works."""

    calibrate: bool = True
    """Measure the drive for a second or two before the first step of a store of 1 GiB or more, and
    each drive when a store on several drives is made. The result is kept in the store's directory,
    as ``calibration.json``."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for values that are not possible."""
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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Options:
    """Settings for streaming and storing state; every default is right for most machines.

    Results depend on `master`, `state_dtype`, `rounding_seed` (with ``state_dtype="bfloat16"``),
    `reencode` (with ``state_dtype="int8"``) and `placement`. All other options change no bit of
    parameters or stored state.

    Raises:
        ValueError: A value is not possible. The message says why.
        TypeError: `drives` is not a `DriveTuning`.
    """

    chunk_bytes: int = 32 << 20
    """Bytes of one FP32 state array that are streamed at a time, rounded down to 4 KiB. The value
    is fixed when a store is made; a resume keeps the store's own value."""

    ring_chunks: int | None = None
    """Number of chunks in memory at once (being read, updated or written), at least 2. The ring
    takes ``ring_chunks * chunk_bytes * number of state arrays`` bytes of host memory, or of device
    memory if state is updated on the device. None for the number that the drive was measured to
    need; 6 if nothing was measured."""

    host_memory: int | str | os.PathLike[str] | MemoryDirectory = 0
    """Host memory in which state may stay between steps, in addition to the ring: a number of
    bytes, or a string such as ``"8GiB"``. A step neither reads nor writes the chunks that fit in
    it. They are written only when a checkpoint is sealed. A directory on a DAX device, on hugetlbfs
    or on tmpfs takes the memory there: a path with a ``/``, or a `MemoryDirectory`, which has a
    size."""

    device_memory: int | str = 0
    """Device memory in which state may stay between steps, if state is updated on the device (see
    `placement`): a number of bytes, or a string such as ``"8GiB"``."""

    master: MasterFormat = "float32"
    """``"split"``: for bf16 parameters, store only the lower 16 bits of each FP32 master; the live
    parameter is the upper half. This saves 2 bytes per parameter of reading and of writing, and
    loses no bit. But the parameter is then rounded half away from zero rather than half to even, so
    results differ from torch's in that."""

    state_dtype: StateDtype = "float32"
    """Format in which state other than masters is stored: ``"float32"``, ``"bfloat16"`` (rounded
    stochastically) or ``"int8"`` (in blocks of 32 with a common scale, as FlashOptim does). The
    last two take fewer bytes, and give results that differ from FP32 state. These results are
    reproducible, and the same after a resume. The result for a parameter depends on its own name
    and elements, and not on anything else in the store."""

    overlap: Overlap | None = None
    """Part of the model's work that hides the step; needs ``model=``. None: ``step()`` returns when
    the parameters are updated. ``"forward"``: ``step()`` moves the gradients out and returns at
    once. The next forward waits, module by module, for the parameters that it uses, and any other
    use of a parameter through torch waits as well. ``"backward"``: parameters are updated as soon
    as their gradients are final, so nothing can be done to gradients between ``backward()`` and
    ``step()``. If a backward goes on through the model to something else (a GAN's generator, an
    input), ``step()`` applies its gradients, and returns when that is done."""

    gradients: Gradients | None = None
    """Where gradients are between backward and ``step()``. None: where backward has made them.
    ``"host"``: in host memory, so that a device needs no memory for them. ``"drive"``: in files
    without a name on the drives of the store, so that hosts need no memory for them either; small
    ones stay in host memory. ``p.grad`` stays a tensor of its shape, dtype and device on which
    clipping, loss scaling, accumulation and ``zero_grad`` work as always. Parameters are then
    updated on the CPU. A gradient stays where it is if your program has other references to its
    memory, such as one buffer for all gradients, or if it is sparse or part of a graph."""

    parameters: Parameters | None = None
    """Where the parameters of repeated blocks are while they are not used; needs ``model=``. None:
    where the model has them. ``"host"``: in page-locked host memory. ``"drive"``: in the
    ``model.safetensors`` of the slot, which steps write together with the state, so that a
    checkpoint writes no trained parameter; frozen ones are read from the newest checkpoint. A
    block's parameters are in one of three buffers on the
    device only while the block runs, or is read ahead. Any other use through torch loads them as
    well, and an edit counts. Parameters are then updated on the CPU."""

    blocks: str | Sequence[str] | None = None
    """Names of the modules that are blocks, with `parameters`: patterns such as
    ``"encoder.layer.*"``. None: the members of every ``ModuleList`` whose modules have one
    class."""

    placement: Placement = "auto"
    """Place where parameters on a device are updated. ``"host"``: on the CPU, next to the drive.
    The gradients cross to the host, and the parameters cross both ways, chunk by chunk, while other
    chunks are updated. State never crosses. ``"device"``: on the device. State moves between the
    drive and device memory (by GPUDirect Storage if that works), the ring is in device memory, and
    only digests cross to the host. This needs the extra ``gpu``, and all parameters on one device
    at the first step. ``"auto"``: the place where a step takes less time, according to measurements
    of the drive, the CPU and the link; the CPU if the difference is small, or if parameters are in
    host memory when the optimizer is made. The two places round differently in the last bit."""

    rounding_seed: int = 0
    """Seed of the stochastic rounding of ``state_dtype="bfloat16"``. It is not stored. Pass the
    same seed when resuming, to get the same bits as without the interruption."""

    reencode: bool = False
    """Whether a checkpoint with ``state_dtype="int8"`` may be continued by another number of ranks,
    or in another sharding, if blocks of 32 elements with one scale are divided by that. Their
    values are then encoded anew, with one more rounding, and a warning says so. False refuses it.
    ``restore(reencode=True)`` allows it once; this option allows it also in what calls `restore`
    for the user (`load_state_dict`, the Trainer, accelerate, Lightning)."""

    verify: Verify = "restored"
    """Time at which state that is read is compared with the digests taken when it was written.
    ``"restored"``: in the first step after a `restore`. ``"at_restore"``: in the `restore` itself,
    and whenever a checkpoint is loaded in another way (`load_state_dict`, the Trainer, Lightning).
    With Adam this reads 12 more bytes per parameter, and finds damage before a step is taken.
    ``"always"``: in every step, which costs the CPU another digest of all state."""

    drives: DriveTuning = DriveTuning()
    """Settings for using the drives, which are measured by default; see `DriveTuning`."""

    allow_volatile: bool = False
    """Whether to accept a directory whose content is lost at power-off (tmpfs). Meant for tests."""

    allow_remote: bool = False
    """Whether to accept a directory on a file system that another machine or a program serves (NFS,
    SMB, FUSE, ...). The server then decides whether locks hold and whether data is durable, so
    nothing in docs/guarantees.md is promised."""

    train_state_bytes: int = 256 << 10
    """Bytes reserved in every checkpoint for `train_state`: a multiple of 4096, at least 8192."""

    reader_timeout_s: float = 60.0
    """Seconds to wait, after a warning, until readers close an expired checkpoint."""

    agreement_timeout_s: float = 300.0
    """Seconds without a sign of progress after which another rank counts as lost. A rank that reads
    or writes gives signs, so a slow drive does not count."""

    trace: str | os.PathLike[str] | None = None
    """Path of a Chrome trace to write when the optimizer is closed, with lanes for the training
    thread, updates, reads and writes. Perfetto can open it. None for no trace."""

    record: bool = True
    """Whether to leave two small files in the first directory for ``offload top`` and ``offload
    report``: ``status.json``, replaced once a second, and ``history.jsonl``. A thread writes them,
    on one rank for all; steps do nothing for it, and a failure is only logged. Nothing else depends
    on these files. With a `backend` of your own there are none."""

    tier: Tier | str | None = None
    """Place to which sealed checkpoints are copied in the background, or the URL of the place. None
    copies nothing. With several ranks, each of them copies the part that it stores; give the same
    tier on every rank. In a directory without checkpoints, `restore` takes the newest complete one
    of the tier. On several hosts it must have been made by as many ranks, in the same sharding."""

    backend: Backend | None = None
    """Storage backend to use instead of the built-in choice. The optimizer does not close it."""

    def __repr__(self) -> str:
        """Show what differs from the defaults: signatures have this text as well."""
        values = [(one, getattr(self, one.name)) for one in fields(self)]
        changed = [f"{one.name}={value!r}" for one, value in values if value != one.default]
        return f"{type(self).__name__}({', '.join(changed)})"

    @property
    def tier_settings(self) -> Tier | None:
        """The tier with its limits; None if there is none."""
        return Tier(self.tier) if isinstance(self.tier, str) else self.tier

    def __post_init__(self) -> None:
        """Raise `ValueError` for values that are not possible."""
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
            ("gradients", self.gradients, (None, *get_args(Gradients))),
            ("parameters", self.parameters, (None, *get_args(Parameters))),
            ("placement", self.placement, get_args(Placement)),
            ("verify", self.verify, get_args(Verify)),
        ):
            if value not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(str, known))}, got {value!r}"
                )
        self._require_outside_possible()
        # Both are read whatever the placement, so that a wrong value is refused here.
        host_memory_bytes, device_memory_bytes = self.host_memory_bytes, self.device_memory_bytes
        if self.placement == "device" and (host_memory_bytes or self.memory_directory):
            raise ValueError(
                'host_memory has no effect with placement="device": state stays in device_memory'
            )
        if self.parameters == "drive" and (self.placement == "device" or device_memory_bytes):
            raise ValueError(
                'parameters="drive" needs steps on the CPU so far: leave out placement="device" '
                "and device_memory"
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
        if self.agreement_timeout_s <= 0:
            raise ValueError(
                f"agreement_timeout_s must be positive, got {self.agreement_timeout_s}"
            )
        drives = self.drives
        if self.backend is not None and drives.direct is not None:
            raise ValueError("direct has no effect on a backend that is passed in: set one of them")
        if self.backend is not None and (drives.threads or drives.request_bytes):
            raise ValueError(
                "threads and request_bytes have no effect on a backend that is passed in: set them "
                "there"
            )

    @property
    def block_patterns(self) -> tuple[str, ...]:
        """The patterns of `blocks`; none if blocks are to be found."""
        return (self.blocks,) if isinstance(self.blocks, str) else tuple(self.blocks or ())

    def _require_outside_possible(self) -> None:
        """Refuse values of `gradients`, `parameters` and `blocks` that exclude others."""
        if self.gradients is not None and self.placement == "device":
            raise ValueError(
                f'gradients={self.gradients!r} does not go with placement="device": gradients are '
                'outside of the device then; use placement="host", or leave gradients out'
            )
        if self.gradients is not None and self.overlap == "backward":
            raise ValueError(
                f'gradients={self.gradients!r} has no effect with overlap="backward", which '
                "applies gradients at once: leave one of them out"
            )
        if self.blocks is not None and self.parameters is None:
            raise ValueError("blocks has no effect without parameters: set parameters as well")
        patterns: tuple[object, ...] = self.block_patterns
        if not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise ValueError(f"blocks must be names or patterns of modules, got {self.blocks!r}")

    @property
    def memory_directory(self) -> MemoryDirectory | None:
        """The directory that `host_memory` names; None if it is a number of bytes."""
        named = self.host_memory
        if isinstance(named, MemoryDirectory):
            return named
        if isinstance(named, bytes | os.PathLike) or (isinstance(named, str) and "/" in named):
            return MemoryDirectory(os.fsdecode(named))
        return None

    @property
    def host_memory_bytes(self) -> int:
        """`host_memory` in bytes; 0 if it is a directory."""
        if self.memory_directory is not None:
            return 0
        return parse_bytes(self.host_memory, "host_memory")

    @property
    def device_memory_bytes(self) -> int:
        """`device_memory` in bytes."""
        return parse_bytes(self.device_memory, "device_memory")

    @property
    def state_format(self) -> StateFormat:
        """Encoding of the state in a new store."""
        return StateFormat(self.master, self.state_dtype)

    @property
    def chunk_elements(self) -> int:
        """Number of elements in one chunk; a multiple of 1024."""
        return self.chunk_bytes // ALIGNMENT * (ALIGNMENT // 4)


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_UNITS |= {f"{unit}i": 1 << 10 * power for power, unit in enumerate("kmgtp", start=1)}


def parse_bytes(value: object, name: str) -> int:
    """Return a number of bytes, given as a number or as text such as ``"8GiB"`` or ``"500 MB"``.

    Args:
        value: The number or the text.
        name: Name of the setting, for the message.

    Raises:
        ValueError: The value is neither. The message names the setting.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(
            r"\s*(\d{1,30}(?:\.\d+)?)\s*([kmgtp]?i?)b?\s*", value.lower(), re.ASCII
        )
        if match and match[2] in _UNITS:
            return int(float(match[1]) * _UNITS[match[2]])
    raise ValueError(f'{name} must be a number of bytes, or text such as "8GiB", got {value!r}')
