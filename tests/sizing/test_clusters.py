"""Runs on several GPUs: which figures are those of one rank, and which are those of all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offload.sizing import Cluster, Machine, Plan, Precision, Run, SizingError, size

DRIVES = Machine(read_gbps=10.0, write_gbps=5.0, link_gbps=25.0, host_memory=98e9)


def stalls(plan: Plan) -> dict[str, float | None]:
    """Return the stall of each way of making checkpoints by the first word of its name."""
    return {copies.name.split()[0]: copies.stall_s for copies in plan.copies}


def test_one_replica_copies_to_its_own_drives_only() -> None:
    plan = size(7e9, machine=DRIVES, cluster=Cluster(gpus=8))
    assert stalls(plan)["full"] == pytest.approx(98 / 5)
    plan = size(7e9, machine=DRIVES, cluster=Cluster(gpus=8, tp=4))
    assert stalls(plan)["full"] == pytest.approx(98 / (4 * 5))
    hierarchical = plan.copies[2]
    assert hierarchical.durable_s == pytest.approx(98 / (4 * 25) + 2 * 98 / (4 * 5))


def test_all_ranks_of_a_sharded_optimizer_copy() -> None:
    plan = size(7e9, machine=DRIVES, cluster=Cluster(gpus=8, sharded=True))
    assert stalls(plan)["full"] == pytest.approx(98 / (8 * 5))


def test_waiting_copies_are_in_the_memory_of_writers() -> None:
    cluster, run = Cluster(gpus=8, storage_gbps=1.0), Run(interval_s=49.0)
    plan = size(7e9, machine=DRIVES, cluster=cluster, run=run)
    assert plan.copies[1].fills_memory_s == pytest.approx(98)  # 98 GB of memory, 1 GB/s of growth


def test_a_full_copy_is_not_faster_than_the_link() -> None:
    machine = Machine(write_gbps=50.0, link_gbps=7.0)
    found = stalls(size(7e9, machine=machine))
    assert found["full"] == found["asynchronous"] == pytest.approx(14)


def test_a_restore_of_copies_reads_the_drives_of_the_writers() -> None:
    restores = size(7e9, machine=DRIVES, cluster=Cluster(gpus=8)).restores
    assert restores.each_s == pytest.approx(8 * 98 / 10)
    assert restores.once_s == pytest.approx(98 / 10)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("storage", [None, 3.0])
def test_a_resume_reads_the_drives_of_all_ranks(storage: float | None, *, sharded: bool) -> None:
    cluster = Cluster(gpus=8, tp=2, pp=2, sharded=sharded, storage_gbps=storage)
    plan = size(7e9, machine=DRIVES, cluster=cluster)
    assert plan.restores.parameters_s == pytest.approx(2 * 14 / (8 * 10))
    assert plan.resume_s == pytest.approx(plan.restores.parameters_s)
    assert plan.seal_s == pytest.approx(14 / (8 * 5))
    assert plan.copies[-1].durable_s == pytest.approx(plan.seal_s)


def test_a_rank_receives_the_parameters_that_it_holds() -> None:
    cluster = Cluster(gpus=3072, tp=8, pp=64)
    assert size(1e12, cluster=cluster).gathered_bytes == pytest.approx(2e12 / 512 * 5 / 6)
    assert size(1e12, cluster=Cluster(gpus=8, tp=8)).gathered_bytes == 0


def test_a_node_has_no_more_writers_than_there_are() -> None:
    few = size(7e9, cluster=Cluster(gpus=16, tp=4, storage_gbps=8.0))
    assert (few.writer_gbps, few.node_gbps) == (2, 8)
    many = size(7e9, cluster=Cluster(gpus=32, tp=16, storage_gbps=32.0))
    assert (many.writer_gbps, many.node_gbps) == (2, 16)


def test_the_drives_of_a_rank_have_the_shares_that_are_given(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000, 1000)}, tmp_path / "model.safetensors")
    disk = size(tmp_path, cluster=Cluster(gpus=2), shares=(1, 2)).disk
    assert disk.on_each_drive == (3 * 1e6 * (2 + 4) / 2, 3 * 1e6 * 8 / 2)
    assert disk.total_bytes == 42e6
    assert not disk.exact


def test_time_in_checkpoints_as_a_share_of_all_time() -> None:
    interval = size(7e9, run=Run(interval_s=10.0, stall_s=2.5)).intervals[-1]
    assert (interval.overhead, interval.wall_share) == (0.25, 0.2)


class TestSeveralRanks:
    """Each figure beside the same arithmetic by hand; no two factors are equal, and none is 1."""

    cluster = Cluster(gpus=24, tp=2, pp=3)  # 4 replicas, 6 writers

    def test_the_drives_of_all_ranks_wear(self) -> None:
        plan = size(7e9, machine=Machine(drive_tbw=98e12), cluster=self.cluster)
        assert plan.steps_of_life == 24 * 98e12 / 98e9

    def test_all_gpus_compute(self) -> None:
        plan = size(7e9, cluster=self.cluster, run=Run(tokens=1e9, tflops=50))
        assert plan.training_s == pytest.approx(6 * 7e9 * 1e9 / (50e12 * 24))

    def test_writers_bound_the_rate(self) -> None:
        cluster = Cluster(gpus=24, tp=2, pp=3, storage_gbps=1000.0, writer_gbps=0.5)
        assert cluster.write_gbps == 6 * 0.5

    def test_copies_are_restored_from_the_drives_of_the_writers(self) -> None:
        restores = size(7e9, machine=Machine(read_gbps=5.0), cluster=self.cluster).restores
        assert restores.once_s == pytest.approx(98 / (6 * 5))
        assert restores.each_s == pytest.approx(4 * 98 / (6 * 5))
        assert restores.parameters_s == pytest.approx(4 * 14 / (24 * 5))

    def test_copies_fill_the_memory_of_the_writers(self) -> None:
        plan = size(
            7e9,
            machine=Machine(write_gbps=2.0, host_memory=100e9),
            cluster=self.cluster,
            run=Run(interval_s=4.0),
        )
        growth = 98e9 / 4 - 6 * 2e9
        assert plan.copies[1].fills_memory_s == pytest.approx(6 * 100e9 / growth)

    @pytest.mark.parametrize(("tp", "pp"), [(2, 16), (16, 2), (5, 1)])
    def test_gpus_that_are_no_whole_replicas_are_refused(self, tp: int, pp: int) -> None:
        with pytest.raises(SizingError, match=f"24 GPUs cannot be divided .* {tp} x {pp} GPUs"):
            Cluster(gpus=24, tp=tp, pp=pp)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("optimizer", ["AdamW", "Adam amsgrad", "SGD momentum", "SGD"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_file_gives_the_bytes_on_the_gpu_that_a_number_gives(
    dtype: str, optimizer: str, state_dtype: str, tmp_path: Path
) -> None:
    save_file({"a": torch.zeros(300, 7), "b": torch.zeros(11)}, tmp_path / "m.safetensors")
    precision = Precision(optimizer=optimizer, dtype=dtype, state_dtype=state_dtype)  # type: ignore[arg-type]
    read = size(tmp_path / "m.safetensors", precision=precision)
    assert read.num_parameters == 2111
    assert read.memory == size(2111, precision=precision).memory
    assert read.checkpoint_bytes == size(2111, precision=precision).checkpoint_bytes
