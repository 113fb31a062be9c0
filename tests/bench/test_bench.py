"""The measurements run, and what they record can be trusted; no time is compared with anything."""

from __future__ import annotations

import importlib.util
import json
import math
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
    checkpoint,
    digests,
    fio_axes,
    frozen,
    hybrid,
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
from bench._fio import Fio, FioMissingError
from bench._harness import BenchError, Result, scratch
from bench._model import Stack
from bench._peer_protocol import Peer, PeerError
from bench._statistics import MIN_PAIRS, alternate, judge, median_interval
from bench.campaign import CAMPAIGNS
from bench.replay import Plan, Replay
from gds import PosixBackend, probe
from offload.format.digests import ChunkDigests
from offload.update.kernel_check import choose_kernel

ROOT = Path(__file__).parents[2]
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
    assert {name for name, _ in commands} == scripts - by_hand
    assert commands[-1][0] == "report"
    assert all(("--quick --output" in rest) == bool(quick) for _, rest in commands[:-1])


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_campaign_runs_what_is_there(name: str) -> None:
    campaign = CAMPAIGNS[name]
    assert campaign.tests or campaign.commands
    assert [path for path in campaign.tests if not (ROOT / path).exists()] == []
    assert [one for one, *_ in campaign.commands if importlib.util.find_spec(one) is None] == []


@pytest.mark.parametrize("fio", ["with fio", "without fio"])
def test_step(measured: Measured, monkeypatch: pytest.MonkeyPatch, fio: str) -> None:
    if fio == "without fio":
        monkeypatch.setenv("PATH", "")
    elif shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    found = measured(step.main)
    check(found, rounds=3, claims=2 if fio == "with fio" else 1)
    assert found["facts"]["step_read_bytes"] == found["facts"]["state_bytes"]
    assert found["facts"]["step_written_bytes"] == found["facts"]["state_bytes"]
    missing = [reason for reason in found["skipped"] if "fio is not installed" in reason]
    assert len(missing) == (fio == "without fio")


def test_sizing(measured: Measured) -> None:
    found = measured(sizing.main)
    check(found, rounds=3, claims=4)
    facts = found["facts"]
    assert facts["file_bytes"] % facts["predicted_slot_bytes"] == 0
    assert facts["allocated_bytes"] >= facts["file_bytes"] > 0
    for name in ("copy_gbps", "sync_s", "staged_read_gbps", "staged_write_gbps", "new_memory_gbps"):
        assert min(found["samples"][name]) > 0
    for claim in found["claims"][2:]:
        assert 0 < claim["predicted_bytes_alone_s"] < claim["predicted_s"]


def test_step_compared_with_other_settings(measured: Measured) -> None:
    found = measured(step.main, "--sweep", "ring", "--values", "2,8")
    check(found, rounds=3, claims=2)
    assert {claim["bytes_ratio"] for claim in found["claims"]} == {1.0}
    assert {claim["limit"] for claim in found["claims"]} == {None}


def test_step_on_a_drive_that_is_slowed_down(measured: Measured) -> None:
    found = measured(step.main, "--resident", "0.5", "--drive-gbps", "0.5")
    check(found, rounds=3, claims=1)
    assert "drive-0.5-gbps" in found["what"]
    claim = found["claims"][0]
    assert 0 < claim["bytes_ratio"] < 1
    assert claim["limit"] == 1.15


def test_digests(measured: Measured) -> None:
    patched = [(ChunkDigests, "digested"), (offload.format.digests, "leaf_digest")]
    before = [getattr(*where) for where in patched]
    found = measured(digests.main)
    check(found, rounds=3, claims=2)
    assert [getattr(*where) for where in patched] == before, "a wrapper was left behind"
    assert found["facts"]["step_digested_bytes"] == found["facts"]["state_bytes"]
    assert found["facts"]["update_code"].startswith(("kernel", "torch"))


def test_small_tensors(measured: Measured) -> None:
    check(measured(small_tensors.main), rounds=3, claims=1)


def test_ranks_gather(measured: Measured) -> None:
    found = measured(ranks_gather.main, "--tensors", "60")
    check(found, rounds=3, claims=2)
    assert found["facts"]["value_bytes"] == 2 * 60 * ((1 << 20) // 60)
    with pytest.raises(BenchError, match="cannot be dealt"):
        ranks_gather.main(["--quick", "--tensors", "1"])


def test_update_cpu(measured: Measured) -> None:
    if choose_kernel(torch.optim.AdamW, "float32").kernel is None:
        pytest.skip("updates here run torch's code")
    found = measured(update_cpu.main)
    check(found, rounds=3, claims=11)
    assert all(value > 0 for values in found["samples"].values() for value in values)


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


def test_overlap(measured: Measured) -> None:
    found = measured(overlap.main, "--overlap", "none")
    check(found, rounds=3, claims=2)
    assert found["facts"]["bit_identical"] is True


def test_hybrid(measured: Measured) -> None:
    found = measured(hybrid.main, "--rounds", "3")
    check(found, rounds=3, claims=8)
    choices = {name: counts for name, counts in found["facts"].items() if name.endswith("choices")}
    assert set(choices["small-read_choices"]) == {"read buffered: small file"}
    assert set(choices["stream-read_choices"]) == {"read direct: large"}
    assert set(choices["stream-write_choices"]) == {"write direct: large"}
    limits = {claim["claim"].partition(":")[0]: claim["limit"] for claim in found["claims"]}
    assert [text for text, limit in limits.items() if limit is None] == [
        "cold reads, six times over"
    ]
    for claim in found["claims"]:
        fixed = {
            way: found["medians"][claim["numerator"].replace("hybrid", way)]
            for way in ("direct", "buffered")
        }
        better = min(fixed, key=fixed.__getitem__)
        assert claim["denominator"] == claim["numerator"].replace("hybrid", better)
    with pytest.raises(BenchError, match="stream-read"):
        hybrid.main(["--quick", "--scenarios", "nothing"])


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


def test_whole_files(measured: Measured) -> None:
    found = measured(whole_files.main, "--rounds", "3")
    check(found, rounds=3, claims=4)
    operations = [claim["numerator"].partition("_")[0] for claim in found["claims"]]
    assert operations == ["seal", "restore", "export", "import"]


def test_checkpoint(measured: Measured) -> None:
    found = measured(checkpoint.main)
    check(found, rounds=3, claims=17)
    for label in ("128Ki", "256Ki"):
        written = found["facts"][f"torch_save_{label}_written_bytes_per_parameter"]
        assert written == pytest.approx(14, rel=0.1)
        assert found["facts"][f"offload_{label}_written_bytes_per_parameter"] < written / 2


def test_parts_of_checkpoint(measured: Measured, tmp_path: Path) -> None:
    found = measured(checkpoint.main, "--parts", "cost", "--parameters", "128Ki")
    check(found, rounds=3, claims=2)
    assert found["what"] == "cost-128Ki"
    for claim in found["claims"]:
        assert "a checkpoint after every step at 128Ki" in claim["claim"]
    found |= {"quick": False}
    (tmp_path / "one.json").write_text(json.dumps(found))
    page = report.render(report.read_results(str(tmp_path)), tmp_path, {})
    assert "a checkpoint after every step at 128Ki" in page
    assert "stops training" not in page, "that was not measured"


@pytest.mark.parametrize("wrong", [["--parts", "costs"], ["--parts", ""], ["--parameters", "2,1"]])
def test_parts_of_checkpoint_that_do_not_exist(
    wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        checkpoint.main(["--quick", "--directory", str(tmp_path), *wrong])
    assert wrong[0] in capsys.readouterr().err


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


def test_a_peer_that_fails_is_quoted(drive: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such accelerator')"]
    with (
        Peer("other", command, log=str(drive / "log"), environment={}) as peer,
        pytest.raises(PeerError, match="no such accelerator"),
    ):
        peer.answer(timeout_s=240)


def test_memory_is_refused() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    with pytest.raises(BenchError, match="tmpfs"), scratch("/dev/shm"):
        pass


def test_fio_that_is_missing_is_named(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FioMissingError, match="apt-get install fio"):
        Fio(str(drive))


def test_a_replay_moves_every_byte_once_a_pass(drive: Path) -> None:
    plan = Plan(num_files=2, array_bytes=100 << 10, chunk_bytes=16 << 10)
    backend = PosixBackend()
    replay = Replay(backend, str(drive), plan, ring_chunks=3)
    before = backend.counters()
    replay.run(2)
    after = backend.counters()
    ring = 3 * plan.num_files * plan.chunk_bytes
    assert after.bytes_written - before.bytes_written == 2 * plan.state_bytes
    assert after.bytes_read - before.bytes_read == 2 * plan.state_bytes + ring
    replay.close()
    backend.close()


def test_every_element_of_the_model_gets_a_gradient() -> None:
    model = Stack(2, 4096)
    model(torch.zeros(1)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.count_nonzero() > 0.9 * parameter.numel()


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    source = random.Random(1)
    covered = 0
    for _ in range(200):
        low, high = median_interval([source.lognormvariate(0, 0.2) for _ in range(MIN_PAIRS)])
        covered += low <= 1 <= high
    assert 0.83 <= covered / 200 <= 0.97


def test_the_interval_can_be_recomputed() -> None:
    values = [1.0, 1.1, 0.9, 1.3, 1.05]
    assert median_interval(values) == median_interval(values)
    assert median_interval([2.0] * 5) == (2.0, 2.0)
    with pytest.raises(ValueError, match="at least one"):
        median_interval([])


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
    page = drive / "docs" / "performance.md"
    page.parent.mkdir()
    report.main(["--results", str(results), "--page", str(page), "--no-figures"])
    text = page.read_text()
    assert "2 ratios have a limit: 1 are within it" in text
    assert "**Not met:**\n\n- slow step: 1.50, limit 1.15" in text
    assert "| slow step | 1.50 | 1.50 to 1.50 | 1.15 | **NOT MET** | [slow](../results/" in text
    assert "Not measured: fio was not there." in text


def test_the_page_shows_what_seals_of_a_mostly_frozen_model_move(drive: Path) -> None:
    results = drive / "results"
    args = frozen._arguments(["--what", "little", "--output", str(results)])
    found = Result("frozen", args, str(drive))
    found.fact("trained_bytes", 1 << 20)
    found.fact("frozen_bytes", 1 << 30)
    seals = {"written_bytes": [1.0, 3 << 20], "read_bytes": [0.0, 2 << 30], "seal_s": [0.25, 0.75]}
    found.add_samples({f"after_a_resume_{kind}": values for kind, values in seals.items()})
    found.claim("x", [0.5] * 11, numerator="a", denominator="b", limit=1.0)
    found.write()
    text = report.render(report.read_results(str(results)), drive, {})
    assert "1.00 MiB is trained, 1.00 GiB is frozen (little)." in text
    assert "| after a resume | 2 | 3.00 MiB | 2.00 GiB | 0.50 | 0.75 |" in text
    assert "| bytes | ratio |" in text


def test_the_page_without_results_says_so(tmp_path: Path) -> None:
    assert "No run has been recorded yet" in report.render([], tmp_path, {})


def test_a_ratio_to_nothing_is_left_out_rather_than_infinite(drive: Path) -> None:
    found = Result("step", step._arguments(["--output", str(drive)]), str(drive))
    found.claim("x", [1.0, math.inf], numerator="a", denominator="b", limit=None)
    assert found.claims[0]["ratios"] == [1.0]
    with pytest.raises(BenchError, match="no pair"):
        found.claim("x", [math.inf], numerator="a", denominator="b", limit=None)
