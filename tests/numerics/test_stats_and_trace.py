"""What a run says about itself: statistics, a trace, and ranges in torch's profiler."""

from __future__ import annotations

import json
import math
import re
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
    optimizer, plain = trained(tmp_path / "run", trace=path), trained(tmp_path / "plain")
    stats = optimizer.stats()
    found = [o.param_groups[0]["params"][0].detach() for o in (plain, optimizer)]
    assert torch.equal(*found), "a trace changes no bit"
    optimizer.close()
    plain.close()
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


def shares(summary: str) -> list[float]:
    return [float(share) for share in re.findall(r"([\d.]+)%", summary)]


@pytest.mark.parametrize("overlap", [None, "forward", "backward"])
def test_shares_of_a_step_are_of_that_step_and_add_up_to_all_of_it(overlap):
    """Seals, and reading the whole state, take many times as long as these small steps."""
    model = torch.nn.Linear(30, 30)
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True, overlap=overlap)
    optimizer = offload.AdamW(
        model.parameters(), directory="/nowhere/at/all", model=model, options=options
    )
    for _ in range(5):
        model(torch.ones(1, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for number in range(3):
            optimizer.checkpoint({"number": number}).result()
        optimizer.load_state_dict(optimizer.full_state_dict())
        optimizer.checkpoint()
        optimizer.synchronize()
    stats = optimizer.stats()
    assert stats.outside_s > 0
    assert stats.drive_writes == 0.0, "a store that is no directory has no size"
    parts = stats.compute_s + stats.wait_read_s + stats.wait_write_s + stats.wait_seal_s
    assert 0 < parts <= stats.beside_s + stats.step_s
    assert bool(stats.beside_s) == (overlap is not None)
    found = shares(stats.summary())
    assert len(found) == 5
    assert 99 < sum(found) < 101  # each is rounded
    assert "outside steps: " in stats.summary()
    assert "beside the model" in stats.summary() or overlap is None
    optimizer.close()


def test_scalars_are_a_few_numbers_or_every_one_of_the_statistics_as_a_flat_dict(tmp_path):
    optimizer = trained(tmp_path / "run")
    stats = optimizer.stats()
    few, scalars = stats.scalars(), stats.scalars(all=True)
    optimizer.close()
    assert list(few) == [
        "offload/step_seconds",
        "offload/read_gb_per_s",
        "offload/write_gb_per_s",
        "offload/io_wait_fraction",
        "offload/bytes_written",
    ]
    assert few["offload/step_seconds"] == stats.step_s / STEPS
    assert few["offload/write_gb_per_s"] == pytest.approx(stats.write_gbps)
    assert 0 <= few["offload/io_wait_fraction"] <= 1
    assert stats.scalars("", since=stats) == {"bytes_written": stats.bytes_written}
    shown = {name for name in dir(stats) if not name.startswith("_")} - {"summary", "scalars"}
    assert stats.drive_bytes > 0
    assert stats.drive_writes == stats.bytes_written / stats.drive_bytes
    shown -= {"update_code", "tier"}  # words, and a record of its own
    assert set(scalars) == {f"offload/{name}" for name in shown} | few.keys()
    assert few.items() <= scalars.items()
    assert {type(value) for value in scalars.values()} == {float}
    assert all(math.isfinite(value) for value in scalars.values())
    assert scalars["offload/steps"] == STEPS
    assert scalars["offload/seal_bytes"] == stats.seal_bytes > 0
    assert scalars["offload/read_gbps"] == stats.read_gbps > 0
