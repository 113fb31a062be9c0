"""Time of a seal and of a resume, compared with numbers computed by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import offload
from gds import File, MemoryBackend, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload.sizing import Cluster, Machine, Precision, size

BILLION = 1_000_000_000
"""Parameters: 2 GB in 16 bits."""

DRIVES = {"read_gbps": 4.0, "write_gbps": 2.0}
BLOCK_GB = 0.016777216


def test_bytes_alone_count_if_nothing_else_is_known() -> None:
    plan = size(BILLION, machine=Machine(**DRIVES))
    assert plan.seal_parts_s == {"writing": 1.0}
    assert plan.resume_parts_s == {"reading": 0.5}
    assert (plan.seal_s, plan.resume_s) == (1.0, 0.5)


def test_copies_and_syncs_are_added_to_the_bytes() -> None:
    plan = size(BILLION, machine=Machine(**DRIVES, copy_gbps=8.0, sync_s=0.004))
    assert plan.seal_parts_s == pytest.approx(
        {
            "writing": 1.0,
            "copying the first block": BLOCK_GB / 8,
            "beginning": 0.002,
            "syncs": 0.04,
        }
    )
    assert plan.seal_s == pytest.approx(1.044097152)
    assert plan.resume_parts_s == pytest.approx(
        {"reading": 0.5, "copying the last block": BLOCK_GB / 8, "beginning": 0.004}
    )
    assert plan.resume_s == pytest.approx(0.506097152)


def test_copying_counts_instead_of_the_drives_if_it_is_slower() -> None:
    plan = size(BILLION, machine=Machine(read_gbps=50.0, write_gbps=25.0, copy_gbps=5.0))
    assert plan.seal_parts_s == pytest.approx(
        {"copying": 0.4, "writing the last block": BLOCK_GB / 25, "beginning": 0.002}
    )
    assert plan.resume_parts_s == pytest.approx(
        {"copying": 0.4, "reading the first block": BLOCK_GB / 50, "beginning": 0.004}
    )


def test_rates_measured_at_the_same_time_replace_the_slower_one_alone() -> None:
    alone = Machine(**DRIVES, copy_gbps=8.0, sync_s=0.004)
    together = dataclasses.replace(alone, staged_write_gbps=1.6, staged_read_gbps=3.2)
    plan = size(BILLION, machine=together)
    assert plan.seal_parts_s == pytest.approx(
        {
            "copying and writing": 1.25,
            "copying the first block": BLOCK_GB / 8,
            "beginning": 0.002,
            "syncs": 0.04,
        }
    )
    assert plan.resume_parts_s == pytest.approx(
        {
            "reading and copying": 0.625,
            "copying the last block": BLOCK_GB / 8,
            "beginning": 0.004,
        }
    )
    assert plan.steps == size(BILLION, machine=alone).steps


def test_a_resume_reads_into_four_blocks_of_new_memory() -> None:
    plan = size(BILLION, machine=Machine(**DRIVES, new_memory_gbps=0.5))
    assert plan.resume_parts_s == pytest.approx(
        {"reading": 0.5, "beginning": 0.002, "new memory": 4 * BLOCK_GB / 0.5}
    )
    assert plan.seal_parts_s == {"writing": 1.0}
    plan = size(1_000_000, machine=Machine(**DRIVES, staged_read_gbps=3.2, new_memory_gbps=0.5))
    assert plan.resume_parts_s == pytest.approx(
        {"reading and copying": 0.000625, "beginning": 0.002, "new memory": 0.004}
    )


def test_a_seal_flushes_what_the_step_before_it_has_written() -> None:
    plan = size(BILLION, machine=Machine(**DRIVES, flush_gbps=3.0))
    assert plan.seal_parts_s == pytest.approx(
        {"writing": 1.0, "flushing the step's writes": 12.0 / 3.0}
    )
    assert plan.resume_parts_s == {"reading": 0.5}
    plan = size(
        BILLION,
        machine=Machine(staged_write_gbps=1.6, flush_gbps=3.0),
        cluster=Cluster(gpus=4, sharded=True),
    )
    assert plan.seal_s == pytest.approx(2 / 4 / 1.6 + 0.002 + 12 / 4 / 3)


def test_rates_measured_at_the_same_time_are_enough() -> None:
    plan = size(BILLION, machine=Machine(staged_write_gbps=1.6))
    assert plan.seal_s == pytest.approx(1.252)
    assert plan.resume_s is None
    plan = size(BILLION, machine=Machine(staged_read_gbps=3.2))
    assert plan.resume_s == pytest.approx(0.629)
    assert plan.seal_s is None


def test_a_model_smaller_than_a_block_is_copied_once() -> None:
    plan = size(1_000_000, machine=Machine(**DRIVES, copy_gbps=8.0))
    assert plan.seal_s == pytest.approx(0.001 + 0.00025 + 0.002)


def test_the_checkpoint_in_place_is_durable_after_the_seal() -> None:
    plan = size(BILLION, machine=Machine(**DRIVES, copy_gbps=8.0, sync_s=0.004))
    assert plan.copies[-1].durable_s == plan.seal_s


def test_a_seal_without_a_rate_of_writes_has_no_time() -> None:
    plan = size(BILLION, machine=Machine(read_gbps=4.0, copy_gbps=8.0, sync_s=0.004))
    assert (plan.seal_parts_s, plan.seal_s) == (None, None)


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


@pytest.mark.parametrize("num_drives", [1, 2, 3])
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
        BILLION,
        precision=Precision(optimizer=name, **form),  # type: ignore[arg-type]
        machine=Machine(write_gbps=1.0, sync_s=1.0),
        shares=(1,) * num_drives,
    )
    assert plan.seal_parts_s is not None
    assert counts[-2:] == [plan.seal_parts_s["syncs"]] * 2
