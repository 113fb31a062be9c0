"""The measurements run, and what they record can be trusted; no time is compared with anything."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload.format.digests
from bench import (
    blocks,
    checkpoint,
    digests,
    fio_axes,
    frozen,
    hybrid,
    near,
    overlap,
    peers,
    ranks_gather,
    report,
    resume,
    revisions,
    same_bits,
    sizing,
    small_tensors,
    step,
    update_cpu,
    whole_files,
)
from bench._harness import BenchError, Result, scratch
from bench._peer_protocol import Peer
from bench._statistics import MIN_PAIRS, alternate, judge, median_interval
from bench.campaign import CAMPAIGNS
from gds import probe
from offload.format.digests import ChunkDigests
from offload.update.kernel_check import choose_kernel
from tests.campaigns import FULL

ROOT = Path(__file__).parents[2]
in_full = pytest.mark.skipif(not FULL, reason="takes minutes; FULL_TESTS=1 runs it")
Measured = Callable[..., dict[str, Any]]


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    if not probe.direct_io(str(tmp_path)).supported:
        pytest.skip("the temporary directory is not on a drive")
    return tmp_path


@pytest.fixture
def measured(drive: Path) -> Measured:
    def measure(main: Callable[[list[str]], None], *arguments: str) -> dict[str, Any]:
        output = drive / "results"
        main(["--quick", "--directory", str(drive), "--output", str(output), *arguments])
        assert [path.name for path in drive.iterdir()] == ["results"], "scratch was left behind"
        (path,) = output.iterdir()
        found: dict[str, Any] = json.loads(path.read_text())
        assert path.name == f"{found['date']}-{found['bench']}-{found['what']}.json"
        assert str(drive) not in path.read_text(), "a user's path was recorded"
        return found

    return measure


def check(found: dict[str, Any], *, rounds: int, claims: int) -> None:
    assert found["quick"] is True
    assert found["command"].startswith(f"python -m bench.{found['bench']} ")
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory_bytes"] > 0
    assert found["storage"]["direct"] is True
    assert {"python", "torch", "ssd-offload"} <= found["versions"].keys()
    assert found["settings"]["rounds"] == rounds
    assert len(found["claims"]) == claims
    for claim in found["claims"]:
        assert len(claim["ratios"]) == rounds
        low, high = claim["interval90"]
        assert low <= claim["median"] <= high
        assert claim["met"] is None, "three pairs are no verdict"
        for name in (claim["numerator"], claim["denominator"]):
            if " " not in name:
                assert len(found["samples"][name]) >= rounds


@pytest.mark.parametrize("quick", [[], ["QUICK=1"]], ids=["full", "quick"])
def test_make_bench_runs_every_script_that_needs_nothing_special(quick: list[str]) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    told = subprocess.run(
        ["make", "--dry-run", "--always-make", "bench", *quick],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    commands = re.findall(r"-m bench\.(\w+)(.*)", told.stdout)
    scripts = {
        path.stem
        for path in (ROOT / "bench").glob("[!_]*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    by_hand = {"peers", "finetune", "kernel", "device", "gpu", "crossings", "revisions", "fio_axes"}
    by_hand |= {"update_cpu", "same_bits", "device_calls", "campaign", "ranks_campaign"}
    by_hand |= {"tier_kills", "tier_costs", "tier_rank_kills", "gpu_training", "beside_training"}
    by_hand |= {"near_kills", "beyond_kills"}
    assert {name for name, _ in commands} == scripts - by_hand
    assert commands[-1][0] == "report"
    assert all(("--quick --output" in rest) == bool(quick) for _, rest in commands[:-1])


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_campaign_runs_what_is_there(name: str) -> None:
    campaign = CAMPAIGNS[name]
    assert campaign.tests or campaign.commands
    assert [path for path in campaign.tests if not (ROOT / path).exists()] == []
    assert [one for one, *_ in campaign.commands if importlib.util.find_spec(one) is None] == []


SCRIPTS: dict[str, tuple[Callable[[list[str]], None], list[str], int]] = {
    "step": (step.main, [], 1),
    "step with other settings": (step.main, ["--sweep", "ring", "--values", "2,8"], 2),
    "step with and without a record": (step.main, ["--record", "--resident", "1"], 1),
    "step on a slow drive": (step.main, ["--resident", "0.5", "--drive-gbps", "0.5"], 1),
    "sizing": (sizing.main, [], 4),
    "small_tensors": (small_tensors.main, [], 1),
    "ranks_gather": (ranks_gather.main, ["--tensors", "60"], 2),
    "overlap": (overlap.main, ["--overlap", "none"], 2),
    "near": (near.main, [], 1),
    "blocks": (blocks.main, [], 1),
    "hybrid": (hybrid.main, ["--rounds", "3"], 8),
    "whole_files": (whole_files.main, ["--rounds", "3"], 4),
    "checkpoint": (checkpoint.main, [], 17),
}
"""Scripts, arguments, and how many ratios they claim something of; fio is not there."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(measured: Measured, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("PATH", "")
    main, arguments, claims = SCRIPTS[name]
    found = measured(main, *arguments)
    check(found, rounds=3, claims=claims)
    facts = found["facts"]
    if name == "step":
        assert any("fio is not installed" in reason for reason in found["skipped"])
        assert facts["step_read_bytes"] == facts["step_written_bytes"] == facts["state_bytes"]
    elif name == "step on a slow drive":
        assert 0 < found["claims"][0]["bytes_ratio"] < 1
    elif name == "overlap":
        assert facts["bit_identical"] is True
    elif name == "blocks":
        assert facts["bit_identical"] is True
        assert facts["block_loads_ahead"] == facts["block_loads"] > 0
        assert facts["block_loads_unused"] == 0
    elif name == "near":
        assert facts["bit_identical"] is True
        for label in ("128Ki", "512Ki"):  # with chunks of 1,024 elements
            assert 4 <= facts[f"step_link_{label}_bytes_per_parameter"] < 4.2
            assert 2 <= facts[f"restore_link_{label}_bytes_per_parameter"] < 2.2
            sealed = facts[f"checkpoint_link_{label}_bytes"]
            assert 0 < sealed - facts["train_state_bytes"] < 4096
    elif name == "hybrid":
        assert set(facts["stream-read_choices"]) == {"read direct: large"}
    elif name == "checkpoint":
        for label in ("128Ki", "256Ki"):
            written = facts[f"torch_save_{label}_written_bytes_per_parameter"]
            assert written == pytest.approx(14, rel=0.1)
            assert facts[f"offload_{label}_written_bytes_per_parameter"] < written / 2


def test_digests(measured: Measured) -> None:
    patched = [(ChunkDigests, "digested"), (offload.format.digests, "leaf_digest")]
    before = [getattr(*where) for where in patched]
    found = measured(digests.main)
    check(found, rounds=3, claims=2)
    assert [getattr(*where) for where in patched] == before, "a wrapper was left behind"
    assert found["facts"]["step_digested_bytes"] == found["facts"]["state_bytes"]
    assert found["facts"]["update_code"].startswith(("kernel", "torch"))


@in_full
def test_update_cpu(measured: Measured) -> None:
    if choose_kernel(torch.optim.AdamW, "float32").kernel is None:
        pytest.skip("updates here run torch's code")
    found = measured(update_cpu.main)
    check(found, rounds=3, claims=11)
    assert all(value > 0 for values in found["samples"].values() for value in values)


@in_full
def test_same_bits(measured: Measured) -> None:
    if choose_kernel(torch.optim.AdamW, "float32").kernel is None:
        pytest.skip("updates here run torch's code")
    found = measured(same_bits.main)
    facts, compared = found["facts"], []
    for name in ("AVX2", "AVX512"):
        if f"{name}_num_values" not in facts:
            assert any(reason.startswith(f"{name}: ") for reason in found["skipped"])
            continue
        compared.append(name)
        assert facts[f"{name}_num_values"] >= 1 << 19
        assert facts[f"{name}_update_code"] == f"kernel ({name})"
        assert facts[f"{name}_differences"] == {}
        assert "value" not in facts[f"{name}_tails"]
    assert compared


def test_fio_axes(measured: Measured) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    found = measured(fio_axes.main, "--points", "mixed,write-64K")
    check(found, rounds=3, claims=2)
    for claim in found["claims"]:
        assert claim["agrees"] is None
        assert claim["agreement"] == "too few pairs to say (3 of 11)"
        rates = zip(
            found["samples"][claim["numerator"]],
            found["samples"][claim["denominator"]],
            strict=True,
        )
        assert claim["ratios"] == pytest.approx([fio / gds for fio, gds in rates])
    with pytest.raises(BenchError, match="randread"):
        fio_axes.main(["--quick", "--points", "nothing"])


def test_revisions(measured: Measured) -> None:
    found = measured(revisions.main, "--rounds", "1", "--before", str(ROOT))
    assert [claim["numerator"] for claim in found["claims"]] == ["large_after_s", "small_after_s"]
    assert all(claim["ratios"][0] > 0 for claim in found["claims"])
    assert found["settings"]["before"] == "(before)"  # the path is not recorded


def test_frozen(measured: Measured) -> None:
    found = measured(frozen.main)
    check(found, rounds=3, claims=2)
    assert found["facts"]["frozen_bytes"] > 10 * found["facts"]["trained_bytes"]
    samples = found["samples"]
    slots = samples["each_slot_for_the_first_time_written_bytes"]
    assert min(slots[:1]) > found["facts"]["frozen_bytes"]
    for phase in ("from_the_fourth_seal_on", "after_a_resume"):
        assert len(samples[f"{phase}_written_bytes"]) == 3
        assert max(samples[f"{phase}_written_bytes"]) < found["facts"]["frozen_bytes"]
    for claim in found["claims"]:
        assert claim["largest"] <= claim["limit"] == 1.0


def test_resume(measured: Measured) -> None:
    found = measured(resume.main)
    check(found, rounds=1, claims=4)
    read = found["facts"]
    assert read["offload_read_bytes_per_parameter"] < 4
    assert read["torch_load_read_bytes_per_parameter"] == pytest.approx(14, rel=0.1)


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("", "--deepspeed-python is not given"),
        ("/nowhere/python", "No such file or directory"),
        (sys.executable, "has no DeepSpeed"),
    ],
)
def test_peers_without_deepspeed_say_so(drive: Path, python: str, message: str) -> None:
    with pytest.raises(BenchError, match=message) as error:
        peers.main(["--quick", "--directory", str(drive), "--deepspeed-python", python])
    assert "bench.peers --help" in str(error.value)


def test_a_peer_takes_iterations_and_reports(drive: Path) -> None:
    command = [sys.executable, "-m", "bench._peer_offload"]
    settings = {
        "layers": 2,
        "layer_parameters": 1 << 18,
        "threads": 1,
        "hyper": {"lr": 1e-3},
        "directory": str(drive / "store"),
        "options": {"chunk_bytes": 1 << 18},
    }
    with Peer("offload", command, log=str(drive / "log"), environment={}) as peer:
        peer.ask("make", **settings)
        peer.ask("iterate", iterations=1)
        reply = peer.ask("iterate", iterations=2)
        state = 12 * settings["layers"] * settings["layer_parameters"]
        assert reply["read_bytes"] == 2 * state
        assert reply["seconds"] > 0
        assert reply["peak_bytes"] > 0
        peer.close()


def test_memory_is_refused() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    with pytest.raises(BenchError, match="tmpfs"), scratch("/dev/shm"):
        pass


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    source = random.Random(1)
    covered = 0
    for _ in range(200):
        low, high = median_interval([source.lognormvariate(0, 0.2) for _ in range(MIN_PAIRS)])
        covered += low <= 1 <= high
    assert 0.83 <= covered / 200 <= 0.97


@pytest.mark.parametrize(
    ("values", "words", "met"),
    [
        ([1.0] * 11, "met", True),
        ([1.0, 1.3] * 6, "met within noise", True),
        ([1.3] * 11, "NOT MET", False),
    ],
    ids=["within", "noisy", "beyond"],
)
def test_a_verdict(values: list[float], words: str, met: bool) -> None:
    verdict = judge(values, 1.15)
    assert (verdict.words, verdict.met) == (words, met)
    assert judge(values, None).met is None


def test_pairs_are_adjacent_and_their_order_alternates() -> None:
    taken: list[str] = []

    def sample(name: str) -> Callable[[], float]:
        return lambda: float(not taken.append(name))

    samples = alternate({name: sample(name) for name in "abc"}, 3)
    assert taken == list("abccbaabc")
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys("abc", 3)


def test_the_page_says_what_was_not_met(drive: Path) -> None:
    results = drive / "results"
    for what, ratio in (("slow", 1.5), ("fast", 1.0)):
        args = step._arguments(["--what", what, "--output", str(results), "--rounds", "11"])
        found = Result("step", args, str(drive))
        found.add_samples({"a_s": [ratio] * 11, "b_s": [1.0] * 11})
        found.claim(f"{what} step", [ratio] * 11, numerator="a_s", denominator="b_s", limit=1.15)
        found.skip("fio was not there")
        found.write()
    (results / "2026-01-01-demo-x.json").write_text('{"command": "something else"}')
    page, tables = drive / "docs" / "performance.md", results / "README.md"
    page.parent.mkdir()
    places = ["--page", str(page), "--tables", str(tables), "--figures", str(page.parent)]
    report.main(["--results", str(results), *places])
    assert "![" not in page.read_text(), "no run has the times of a figure"
    text = tables.read_text()
    assert "2 ratios have a limit: 1 are within it" in text
    assert "**Not met:**\n\n- slow step: 1.50, limit 1.15" in text
    assert "| slow step | 1.50 | 1.50 to 1.50 | 1.15 | **NOT MET** | [slow](" in text
    assert "Not measured: fio was not there." in text
