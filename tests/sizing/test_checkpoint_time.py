"""Time of a seal and of a resume, compared with numbers computed by hand."""

from __future__ import annotations

import pytest
import torch

import offload
from gds import File, MemoryBackend, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload.sizing import Machine, Precision, size
from tests.sizing.figures import Row, check

BILLION = {"model": 1_000_000_000}
"""Parameters: 2 GB in 16 bits."""

DRIVES = {**BILLION, "read_gbps": 4.0, "write_gbps": 2.0}
BLOCK_GB = 0.016777216


WRITING = {"writing": 1.0}
READING = {"reading": 0.5}
COPIED = {**DRIVES, "copy_gbps": 8.0, "sync_s": 0.004}
FIRST, LAST = "copying the first block", "copying the last block"

ROWS: dict[str, Row] = {
    "bytes alone": (
        DRIVES,
        {"seal_parts_s": WRITING, "resume_parts_s": READING, "seal_s": 1.0, "resume_s": 0.5},
    ),
    "copies and syncs are added": (
        COPIED,
        {"seal_parts_s": {**WRITING, FIRST: BLOCK_GB / 8, "beginning": 0.002, "syncs": 0.04}}
        | {"resume_parts_s": {**READING, LAST: BLOCK_GB / 8, "beginning": 0.004}}
        | {"seal_s": 1.044097152, "resume_s": 0.506097152, "copies/-1/durable_s": 1.044097152},
    ),
    "copying is slower than the drives": (
        {**BILLION, "read_gbps": 50.0, "write_gbps": 25.0, "copy_gbps": 5.0},
        {
            "seal_parts_s": {"copying": 0.4, "writing the last block": BLOCK_GB / 25}
            | {"beginning": 0.002},
            "resume_parts_s": {"copying": 0.4, "reading the first block": BLOCK_GB / 50}
            | {"beginning": 0.004},
        },
    ),
    "rates measured at the same time replace the slower one alone": (
        {**COPIED, "staged_write_gbps": 1.6, "staged_read_gbps": 3.2},
        {
            "seal_parts_s": {"copying and writing": 1.25, FIRST: BLOCK_GB / 8, "syncs": 0.04}
            | {"beginning": 0.002},
            "resume_parts_s": {
                "reading and copying": 0.625,
                LAST: BLOCK_GB / 8,
                "beginning": 0.004,
            },
            "steps/1/seconds": 6.0,
        },
    ),
    "a resume reads into four blocks of new memory": (
        {**DRIVES, "new_memory_gbps": 0.5},
        {"resume_parts_s": {**READING, "beginning": 0.002, "new memory": 4 * BLOCK_GB / 0.5}}
        | {"seal_parts_s": WRITING},
    ),
    "or less for a small model": (
        {**DRIVES, "model": 1_000_000, "staged_read_gbps": 3.2, "new_memory_gbps": 0.5},
        {
            "resume_parts_s": {"reading and copying": 0.000625, "beginning": 0.002}
            | {"new memory": 0.004}
        },
    ),
    "a seal flushes what the step before it has written": (
        {**DRIVES, "flush_gbps": 3.0},
        {"seal_parts_s": {**WRITING, "flushing the step's writes": 4.0}}
        | {"resume_parts_s": READING},
    ),
    "on each of four ranks": (
        {**BILLION, "staged_write_gbps": 1.6, "flush_gbps": 3.0, "gpus": 4, "sharded": True},
        {"seal_s": 2 / 4 / 1.6 + 0.002 + 12 / 4 / 3},
    ),
    "writes measured with copies are enough": (
        {**BILLION, "staged_write_gbps": 1.6},
        {"seal_s": 1.252, "resume_s": None},
    ),
    "reads as well": (
        {**BILLION, "staged_read_gbps": 3.2},
        {"seal_s": None, "resume_s": 0.629},
    ),
    "a model smaller than a block is copied once": (
        {**DRIVES, "model": 1_000_000, "copy_gbps": 8.0},
        {"seal_s": 0.001 + 0.00025 + 0.002},
    ),
    "no rate of writes": (
        {**BILLION, "read_gbps": 4.0, "copy_gbps": 8.0, "sync_s": 0.004},
        {"seal_parts_s": None, "seal_s": None},
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_time_of_a_seal_and_of_a_resume(name: str) -> None:
    check(ROWS[name])


class CountingBackend(WrapperBackend):
    """Counts the syncs of files and of directories."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.num_syncs = 0

    def wrap_file(self, file: File) -> File:
        return _CountingFile(file, self)

    def sync_dir(self, path: str) -> None:
        self.num_syncs += 1
        super().sync_dir(path)


class _CountingFile(WrapperFile):
    def __init__(self, inner: File, backend: CountingBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def sync(self) -> None:
        self._backend.num_syncs += 1
        super().sync()


@pytest.mark.parametrize("num_drives", [1, 3])
@pytest.mark.parametrize(
    ("torch_class", "name", "form"),
    [
        (torch.optim.AdamW, "AdamW", {}),
        (torch.optim.SGD, "SGD", {}),
        (torch.optim.AdamW, "AdamW", {"master": "split", "state_dtype": "int8"}),
    ],
    ids=["three arrays", "one array", "arrays with scales"],
)
def test_the_syncs_are_those_that_a_seal_makes(
    torch_class: type[torch.optim.Optimizer], name: str, form: dict[str, str], num_drives: int
) -> None:
    backend = CountingBackend()
    parameter = torch.nn.Parameter(torch.ones(50_000, dtype=torch.bfloat16))
    options = offload.Options(
        backend=backend,
        allow_volatile=True,
        chunk_bytes=16 << 10,
        drives=offload.DriveTuning(shares=(1,) * num_drives, calibrate=False),
        **form,  # type: ignore[arg-type]
    )
    counts = []
    with offload.OffloadedOptimizer(
        torch_class,
        [parameter],
        directory=[f"/drive-{number}" for number in range(num_drives)],
        keep=1,
        options=options,
        lr=0.01,
    ) as optimizer:
        for _ in range(5):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.synchronize()
            before = backend.num_syncs
            optimizer.checkpoint().result()
            counts.append(backend.num_syncs - before)
    plan = size(
        BILLION["model"],
        precision=Precision(optimizer=name, **form),  # type: ignore[arg-type]
        machine=Machine(write_gbps=1.0, sync_s=1.0),
        shares=(1,) * num_drives,
    )
    assert plan.seal_parts_s is not None
    assert counts[-2:] == [plan.seal_parts_s["syncs"]] * 2
