"""What a run says about itself: statistics, a trace, and ranges in torch's profiler."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import offload
from gds import MemoryBackend, StorageError

NUM_ELEMENTS = 40_000
STEPS = 5


def trained(directory: Path, **options: object) -> offload.AdamW:
    parameter = torch.nn.Parameter(torch.ones(NUM_ELEMENTS).bfloat16())
    settings = offload.Options(chunk_bytes=16384, ring_chunks=3, **options)
    optimizer = offload.AdamW([parameter], directory=directory, options=settings)
    for _ in range(STEPS):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    optimizer.checkpoint().result()
    return optimizer


def test_a_trace_has_every_transfer_and_update(tmp_path):
    path = tmp_path / "trace.json"
    optimizer = trained(tmp_path / "run", trace=path)
    stats = optimizer.stats()
    optimizer.close()
    document = json.loads(path.read_text())
    lanes = {
        e["pid"]: e["args"]["name"]
        for e in document["traceEvents"]
        if e["ph"] == "M" and e["name"] == "process_name"
    }
    events = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            events[lanes[event["pid"]]].append(event)
    num_chunks = -(-NUM_ELEMENTS * 4 // 16384)
    assert len(events["update"]) == STEPS * num_chunks
    assert {e["args"]["chunk"] for e in events["update"]} == set(range(num_chunks))
    assert [e["name"] for e in events["training"]].count("step") == STEPS
    assert len(events["seal"]) == 1
    assert sum(e["args"]["nbytes"] for e in events["read"]) >= stats.bytes_read > 0
    assert sum(e["args"]["nbytes"] for e in events["write"]) == stats.bytes_written > 0
    assert {e["name"] for e in events["write"]} == {"master", "exp_avg", "exp_avg_sq", "model"}
    assert not document["otherData"]["dropped_events"]
    for lane in ("read", "write", "update"):
        for row in {e["tid"] for e in events[lane]}:
            inside = sorted((e["ts"], e["dur"]) for e in events[lane] if e["tid"] == row)
            for (start, length), (following, _) in pairwise(inside):
                assert following >= start + length - 0.2  # microseconds, each rounded


def test_a_trace_changes_no_bit(tmp_path):
    plain, traced = trained(tmp_path / "a"), trained(tmp_path / "b", trace=tmp_path / "t")
    found = [o.param_groups[0]["params"][0].detach() for o in (plain, traced)]
    assert torch.equal(*found)
    plain.close()
    traced.close()


def test_a_trace_that_cannot_be_written_is_refused_before_training(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(10))
    options = offload.Options(trace=tmp_path / "missing" / "t.json")
    with pytest.raises(StorageError, match="no directory to write to"):
        offload.AdamW([parameter], directory=tmp_path / "run", options=options)
    assert not (tmp_path / "run").exists()


def test_torchs_profiler_shows_ranges(tmp_path):
    with torch.profiler.profile() as profile:
        trained(tmp_path / "run").close()
    counts = {e.key: e.count for e in profile.key_averages()}
    assert counts["offload.step"] == STEPS
    assert counts["offload.compute"] >= STEPS


def test_the_parts_of_a_step_do_not_exceed_it(tmp_path):
    optimizer = trained(tmp_path / "run")
    stats = optimizer.stats()
    parts = stats.compute_s + stats.wait_read_s + stats.wait_write_s
    assert 0 < parts <= stats.step_s
    assert stats.drive_bytes > 0
    assert stats.drive_writes == stats.bytes_written / stats.drive_bytes
    summary = stats.summary()
    for words in ("5 steps", "waiting for reads", "waiting for writes", "updating", "GB written"):
        assert words in summary
    optimizer.close()


def test_a_store_that_is_no_directory_has_no_size():
    parameter = torch.nn.Parameter(torch.ones(10))
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True)
    with offload.AdamW([parameter], directory="/nowhere/at/all", options=options) as optimizer:
        stats = optimizer.stats()
    assert (stats.drive_bytes, stats.drive_writes) == (0, 0.0)
    assert "times the size" not in stats.summary()


def test_scalars_are_every_number_of_the_statistics_as_a_flat_dict(tmp_path):
    optimizer = trained(tmp_path / "run")
    stats = optimizer.stats()
    scalars = stats.scalars()
    optimizer.close()
    shown = {name for name in dir(stats) if not name.startswith("_")} - {"summary", "scalars"}
    assert set(scalars) == {f"offload/{name}" for name in shown}
    assert {type(value) for value in scalars.values()} == {float}
    assert all(math.isfinite(value) for value in scalars.values())
    assert scalars["offload/steps"] == STEPS
    assert scalars["offload/seal_bytes"] == stats.seal_bytes > 0
    assert scalars["offload/read_gbps"] == stats.read_gbps > 0
    assert stats.scalars(prefix="")["steps"] == STEPS
