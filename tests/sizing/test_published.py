"""Published figures, and worked examples, to the digit.

Each row names the place where the figure was published, or is arithmetic that was done by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offload.sizing import Cluster, Precision, size
from tests.sizing.figures import Row, check

HOUR = 3600.0
BIG: dict[str, Any] = {
    "model": 1e12,
    "each": 13.8,
    "gpus": 3072,
    "tp": 8,
    "pp": 64,
    "storage_gbps": 273.0,
    "interval_s": 4 * HOUR,
    "budget": 0.05,
}
"""The published 1 T model on 3072 GPUs of which 512 write 273 GB/s."""

GPT3: dict[str, Any] = {"model": 175e9}
SEVEN: dict[str, Any] = {"model": 7e9}
FEW = {**SEVEN, "gpus": 24, "tp": 2, "pp": 3}
"""4 replicas, 6 writers: no two factors are equal, and none is 1."""

DRIVES = {**SEVEN, "read_gbps": 10.0, "write_gbps": 5.0, "link_gbps": 25.0, "host_memory": 98e9}

SIZES: dict[str, Row] = {
    "SK hynix: 175 B": (GPT3, {"parameter_bytes": 350e9, "checkpoint_bytes": 2.45e12}),
    "SK hynix: 544 B": (
        {"model": 544e9},
        {"parameter_bytes": 1088e9, "checkpoint_bytes": 7.616e12},
    ),
    "SK hynix: 13.77 bytes": ({"model": 1e12, "each": 13.77}, {"checkpoint_bytes": 13.77e12}),
    "in-mem state size by 7x, 9 with FP32 gradients": (
        {**GPT3, "gradient_bytes": 4},
        {"checkpoint_bytes": 7 * 350e9}
        | {"fits/0/bytes_per_parameter": 18, "fits/1/times_larger": 4.5},
    ),
    "GPU memory saving -> larger model": (
        {**SEVEN, "gpu_memory": 80e9},
        {f"fits/{n}/times_larger": times for n, times in enumerate((1, 4, 8, 8))}
        | {f"fits/{n}/largest": 4e9 * times for n, times in enumerate((1, 4, 8, 8))}
        | {f"fits/{n}/left_bytes": left for n, left in enumerate((-32e9, 52e9, 66e9, 66e9))},
    ),
    "GPUs that share a model": (
        {**FEW, "gpu_memory": 20e9},
        {"fits/0/gpu_bytes": 112e9 / 6, "fits/0/verdict": "tight", "fits/0/largest": 6e9}
        | {"fits/1/gpu_bytes": 28e9 / 6, "fits/1/least_gpu_bytes": 8e9},
    ),
    "GPUs that share all of it": (
        {**FEW, "gpu_memory": 4e9, "sharded": True},
        {"fits/0/gpu_bytes": 112e9 / 24, "fits/0/verdict": "does not fit"}
        | {"fits/1/gpu_bytes": 28e9 / 24, "fits/1/verdict": "fits"},
    ),
    "save PCIe + network B/W": (
        {**GPT3, "link_gbps": 25.0, "network_gbps": 12.5},
        {f"steps/{n}/bytes_per_parameter": each for n, each in enumerate((24, 6, 4))}
        | {"steps/0/link_bytes": 4.2e12, "steps/2/link_bytes": 0.7e12}
        # Of a checkpoint 14 bytes are copied, 2 sealed, 0 next to the storage.
        | {f"copies/{n}/link_bytes": each * 175e9 for n, each in enumerate((14, 14, 14, 2))}
        | {f"steps/{n}/seal_link_bytes": each * 175e9 for n, each in enumerate((2, 2, 0))}
        | {f"steps/{n}/seal_link_s": each for n, each in enumerate((14, 14, 0))}
        | {f"steps/{n}/resume_link_bytes": 350e9 for n in range(3)}
        | {f"steps/{n}/resume_link_s": each for n, each in enumerate((14, 14, 28))},
    ),
    "a checkpoint of several ranks": (
        {**GPT3, "link_gbps": 25.0, "gpus": 16, "tp": 2, "pp": 2},
        {"steps/1/seal_link_bytes": 350e9, "steps/1/resume_link_bytes": 1400e9}
        | {"steps/1/seal_link_s": 350 / 16 / 25, "steps/1/resume_link_s": 350 / 4 / 25},
    ),
    "keep 2": (
        {"model": "7B"},
        {"state_bytes": 84e9, "parameter_bytes": 14e9, "disk/slots": 3, "disk/total_bytes": 294e9},
    ),
    "slots with a remote tier": (
        {**SEVEN, "keep": 2, "upload_s": 250.0, "interval_s": 100.0},
        {"disk/slots": 2 + 1 + 3},
    ),
}

STEPS: dict[str, Row] = {
    "fast drives": (
        {**SEVEN, "read_gbps": 9.6, "write_gbps": 5.0},
        {"steps/1/seconds": "16.8", "steps/1/limited_by": "the drives"},
    ),
    "two of them": ({**SEVEN, "read_gbps": 27.0, "write_gbps": 11.0}, {"steps/1/seconds": "7.6"}),
    "the mixed rate": (
        {**SEVEN, "read_gbps": 9.6, "write_gbps": 5.0, "mixed_gbps": 8.4},
        {"steps/1/seconds": 20},
    ),
    "reads alone": ({**SEVEN, "read_gbps": 9.6}, {"steps/1/seconds": None}),
    "writes alone": ({**SEVEN, "write_gbps": 5.0}, {"steps/1/seconds": None}),
    "the slowest part": (
        {**SEVEN, "mixed_gbps": 16.8, "update_gbps": 8.4, "link_gbps": 1.0, "network_gbps": 0.5},
        {"steps/0/seconds": 84, "steps/0/limited_by": "the link to the host"}
        | {"steps/1/seconds": 28, "steps/1/limited_by": "the link to the host"}
        | {"steps/2/seconds": 28, "steps/2/limited_by": "the network"}
        | {"steps/1/parts_s/the CPU": 20, "steps/1/parts_s/the link to the device": 14},
    ),
    "life of the drives": (
        {**SEVEN, "drive_tbw": 98e12, "iteration_s": 86.4},
        {"steps_of_life": 1000, "days_of_life": 1},
    ),
    "the drives of all ranks wear": ({**FEW, "drive_tbw": 98e12}, {"steps_of_life": 24000}),
    "drives that nobody measured": (
        SEVEN,
        {f"typical_steps/{n}/seconds": 168 / gbps for n, gbps in enumerate((5, 10, 22))},
    ),
    "no faster than what was measured": (
        {**FEW, "read_gbps": 3.0, "link_gbps": 0.2},
        {"typical_steps/0/seconds": 28 / 24 / 0.2, "typical_steps/2/seconds": 28 / 24 / 0.2},
    ),
    "per rank": (
        {**SEVEN, "read_gbps": 10.0, "write_gbps": 10.0, "gpus": 4},
        {"steps/1/seconds": 84 / 4 / 10, "gathered_bytes": 14e9 * 3 / 4}
        | {"disk/on_each_drive": (294e9 / 4,), "disk/total_bytes": 294e9},
    ),
    "a rank receives what it holds": (BIG, {"gathered_bytes": 2e12 / 512 * 5 / 6}),
    "all of it is held by one": ({**SEVEN, "gpus": 8, "tp": 8}, {"gathered_bytes": 0}),
    "300+ years on one A100 is the figure of a V100; here 71 years": (
        {**GPT3, "tokens": 300e9, "tflops": 140},
        {"training_s": 6 * 175e9 * 300e9 / 140e12},
    ),
    "all GPUs compute": (
        {**FEW, "tokens": 1e9, "tflops": 50},
        {"training_s": 6 * 7e9 * 1e9 / (50e12 * 24)},
    ),
}

WRITERS: dict[str, Row] = {
    "VAST: 50 seconds, 0.53, 4.3, 0.3 %": (
        BIG,
        {"copies/0/stall_s": "50.55", "writers": 512, "writer_gbps": "0.533"}
        | {"node_gbps": "4.27", "intervals/0/overhead": "0.00351", "least_gbps": "19.17"}
        | {"writer_bytes": "26.95e9"},
    ),
    "contradicts 50 seconds for GPT-3": (
        {"model": 2.4e12 / 13.77, "each": 13.77, "storage_gbps": 273.0},
        {"copies/0/stall_s": "8.79"},
    ),
    "VAST, DDN: peak": ({**BIG, "efficiency": 0.4}, {"peak_gbps": 682.5}),
    "all ranks write": ({**BIG, "sharded": True}, {"writer_bytes": "4.49e9"}),
    "DDN: direct I/O": ({**BIG, "storage_gbps": 273 * 1.7}, {"copies/0/stall_s": "29.7"}),
    "each DGX ~8 GB/s as only 8 threads": (
        {**BIG, "storage_gbps": 682.5, "writer_gbps": 1.0},
        {"copies/0/stall_s": 13.8e12 / 512e9},
    ),
    "fewer writers than a node has": (
        {**SEVEN, "gpus": 16, "tp": 4, "storage_gbps": 8.0},
        {"writer_gbps": 2, "node_gbps": 8},
    ),
    "more of them": (
        {**SEVEN, "gpus": 32, "tp": 16, "storage_gbps": 32.0},
        {"writer_gbps": 2, "node_gbps": 16},
    ),
    "one replica copies to its own drives": ({**DRIVES, "gpus": 8}, {"copies/0/stall_s": 98 / 5}),
    "of four ranks": (
        {**DRIVES, "gpus": 8, "tp": 4},
        {"copies/0/stall_s": 98 / 20, "copies/2/durable_s": 98 / 100 + 2 * 98 / 20},
    ),
    "a sharded optimizer": (
        {**DRIVES, "gpus": 8, "sharded": True},
        {"copies/0/stall_s": 98 / (8 * 5)},
    ),
    "a copy is not faster than the link": (
        {**SEVEN, "write_gbps": 50.0, "link_gbps": 7.0},
        {"copies/0/stall_s": 14, "copies/1/stall_s": 14},
    ),
}

RESTORES: dict[str, Row] = {
    "VAST: 1638 GB/s": (
        {**BIG, "storage_read_gbps": 1638.0},
        {"restores/equal_time_gbps": 1638, "restores/each_s": "50.55"},
    ),
    "1 TB/s": (
        {**BIG, "storage_read_gbps": 1000.0},
        {"restores/each_s": 82.8, "restores/once_s": 13.8, "restores/each_bytes": 6.9 * 12e12}
        | {"restores/parameters_bytes": 12e12, "restores/parameters_s": 12},
    ),
    "DDN: reads 1.6 times as fast": (
        {**BIG, "storage_read_gbps": 1600.0},
        {"restores/each_s": 82.8 / 1.6},
    ),
    "slides": (
        {**GPT3, "gpus": 1024, "tp": 8, "pp": 16},
        {"writers": 128, "restores/replicas": 8, "restores/each_bytes": 19.6e12},
    ),
    "blog": (
        {**GPT3, "gpus": 1024, "tp": 8, "pp": 8},
        {"writers": 64, "restores/replicas": 16, "restores/each_bytes": 39.2e12},
    ),
    "drives of the writer": (
        {**DRIVES, "gpus": 8},
        {"restores/each_s": 8 * 98 / 10, "restores/once_s": 98 / 10},
    ),
    "drives of six writers": (
        {**FEW, "read_gbps": 5.0},
        {"restores/once_s": 98 / 30, "restores/each_s": 4 * 98 / 30}
        | {"restores/parameters_s": 4 * 14 / (24 * 5)},
    ),
    "a resume reads the drives of all ranks": (
        {**DRIVES, "gpus": 8, "tp": 2, "pp": 2, "storage_gbps": 3.0},
        {"restores/parameters_s": 2 * 14 / 80, "resume_s": 2 * 14 / 80}
        | {"seal_s": 14 / 40, "copies/-1/durable_s": 14 / 40},
    ),
    "of a sharded optimizer as well": (
        {**DRIVES, "gpus": 8, "tp": 2, "pp": 2, "sharded": True},
        {"restores/parameters_s": 2 * 14 / 80, "seal_s": 14 / 40},
    ),
}


def failing(hours: float, **settings: Any) -> dict[str, Any]:
    return {"model": 1e12, "each": 13.8, "mttf_s": hours * HOUR, **settings}


INTERVALS: dict[str, Row] = {
    **{
        f"a full copy, a failure in {hours} h": (
            failing(hours, storage_gbps=273.0),
            {"intervals/0/optimal_s": best, "intervals/0/waste": lost},
        )
        for hours, best, lost in (
            *((7.9, "1696", "0.060"), (1.8, "809", "0.125")),
            (0.233, "291", "0.347"),
        )
    },
    **{
        f"in place, a failure in {hours} h": (
            failing(hours, stall_s=0.02),
            {"intervals/-1/optimal_s": best, "intervals/-1/waste": lost},
        )
        for hours, best, lost in ((7.9, "34", "0.0012"), (0.233, "5.8", "0.0069"))
    },
    "a share of all time": (
        {**SEVEN, "interval_s": 10.0, "stall_s": 2.5},
        {"intervals/-1/overhead": 0.25, "intervals/-1/wall_share": 0.2},
    ),
    "GPT2-2B: copies fill the memory": (
        {"model": 2e9, "write_gbps": 3.0, "host_memory": 256e9, "interval_s": 5.0},
        {"copies/1/fills_memory_s": 256 / 2.6, "copies/-1/host_bytes": 0},
    ),
    "waiting copies are in the memory of writers": (
        {**DRIVES, "gpus": 8, "storage_gbps": 1.0, "interval_s": 49.0},
        {"copies/1/fills_memory_s": 98},  # 98 GB of memory, 1 GB/s of growth
    ),
    "of six writers": (
        {**FEW, "write_gbps": 2.0, "host_memory": 100e9, "interval_s": 4.0},
        {"copies/1/fills_memory_s": 6 * 100 / (98 / 4 - 6 * 2)},
    ),
}
ALL = SIZES | STEPS | WRITERS | RESTORES | INTERVALS


@pytest.mark.parametrize("name", ALL)
def test_a_figure(name: str) -> None:
    check(ALL[name])


def test_contradictions_have_remarks() -> None:
    for model, words in ((175e9, "8.8 s for 2.4 TB"), (544e9, "530 B"), (1e12, "13.77")):
        assert any(words in text for text in size(model).remarks)
    assert any("82.8 s" in text for text in size(1e12).remarks)
    assert size(7e9).remarks == []


def test_a_file_gives_the_bytes_that_a_number_gives(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(300, 7), "b": torch.zeros(11)}, tmp_path / "m.safetensors")
    for dtype in ("bfloat16", "float32"):
        for optimizer in ("AdamW", "Adam amsgrad", "SGD momentum", "SGD"):
            for state_dtype in ("float32", "bfloat16"):
                given = {"optimizer": optimizer, "dtype": dtype, "state_dtype": state_dtype}
                read = size(tmp_path / "m.safetensors", precision=Precision(**given))
                number = size(2111, precision=Precision(**given))
                assert read.num_parameters == 2111
                assert read.fits == number.fits
                assert read.checkpoint_bytes == number.checkpoint_bytes


def test_the_drives_of_a_rank_have_the_shares_that_are_given(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000, 1000)}, tmp_path / "model.safetensors")
    disk = size(tmp_path, cluster=Cluster(gpus=2), shares=(1, 2)).disk
    assert disk.on_each_drive == (3 * 1e6 * (2 + 4) / 2, 3 * 1e6 * 8 / 2)
    assert disk.total_bytes == 42e6
    assert not disk.exact
