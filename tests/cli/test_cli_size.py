"""``offload size``: what it prints, how wide, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import offload
from tests.command_line import Run
from tests.stores.small import make_model, make_optimizer, train

FULL = (
    *("--read", "9.6", "--write", "5", "--link", "25", "--tbw", "7000TB", "--gpus", "1024"),
    *("--keep", "3", "--every", "10min"),
    *("--mttf", "7.9h"),
    *(
        part
        for value in (
            *("mixed_gbps=9", "update_gbps=20", "copy_gbps=8", "sync_s=0.5ms", "network_gbps=12"),
            *("staged_read_gbps=4", "staged_write_gbps=3", "new_memory_gbps=0.9", "tp=8", "pp=16"),
            *("gpu_memory=80GB", "host_memory=256 GiB", "storage_gbps=273", "writer_gbps=1"),
            *("storage_read_gbps=500", "efficiency=0.4", "budget=0.05", "stall_s=0.02s"),
            *("iteration_s=20s", "forward_s=3", "backward_s=6s", "tokens=300e9", "tflops=140"),
            *("upload_s=90s", "shares=1,1"),
        )
        for part in ("--set", value)
    ),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the checkpoints of steps 2 and 4."""
    store = tmp_path_factory.mktemp("trained") / "store"
    with make_optimizer(make_model(64, 128, 8), directory=store, keep=2) as optimizer:
        train(optimizer, 4, seal_at=(2, 4))
    return store


@pytest.mark.parametrize("model", ["175e9", "12"])
@pytest.mark.parametrize("arguments", [(), FULL], ids=["plain", "all"])
def test_lines_fit_80_columns(run: Run, model: str, arguments: tuple[str, ...]) -> None:
    code, out, err = run("size", model, *arguments)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "None" not in out
    assert "nan" not in out


def test_the_figures_of_seven_billion(run: Run) -> None:
    code, out, _ = run("size", "7B", "--read", "9.6", "--write", "5")
    assert code == 0
    rows = {line.split("  ")[0].strip(): line for line in out.splitlines()}
    assert rows["optimizer state (a step)"].split()[-3:] == ["12", "84.0", "GB"]
    assert rows["disk, 3 slots"].split()[-2:] == ["294.0", "GB"]
    assert "16.8 s  the drives" in rows["the host"]


def test_json_has_the_same_figures(run: Run) -> None:
    code, out, _ = run("size", "175e9", *FULL, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["writers"] == 128
    assert found["restores"]["each_bytes"] == 19.6e12
    assert found["memory"]["ratio"] == 4
    assert len(found["disk"]["on_each_drive"]) == 2
    assert any("slides give TP 8 and PP 16" in text for text in found["remarks"])


def test_contradictions_are_printed_with_the_side_that_is_taken(run: Run) -> None:
    out = " ".join(run("size", "1T")[1].split())
    assert '"50 seconds" to restore cannot be at the cited 1 TB/s' in out
    assert "This tool computes the time from the rate." in out


def test_a_store_has_the_figures_of_its_newest_checkpoint(run: Run, trained: Path) -> None:
    found = json.loads(run("size", trained, "--json")[1])
    newest = offload.list_checkpoints(trained)[-1]
    assert found["disk"]["exact"]
    assert found["disk"]["slot_bytes"] == newest.bytes
    assert found["num_parameters"] == newest.num_parameters
    first = run("size", trained)[1].splitlines()[0]
    assert first.endswith(f"step 4, {newest.num_parameters:,} parameters")


def test_the_life_of_drives_and_the_rates_of_storage_are_said(run: Run) -> None:
    out = run("size", "7B", "--tbw", "7PB", "--set", "iteration_s=20s")[1]
    assert "The drives last 71,429 steps with a seal each, 16.5 d." in out
    out = " ".join(run("size", "175e9", *FULL)[1].split())
    assert "writers write 19.1 GB each at 1 GB/s, 8 GB/s for a node of 8 GPUs." in out
    assert "Storage that reaches 40 % of its peak needs a peak of 320 GB/s." in out


def test_intervals_that_cannot_be_kept_are_named(run: Run) -> None:
    out = " ".join(run("size", "1T", "--write", "1", "--mttf", "60s")[1].split())
    assert "checkpoints would pile up" in out
    assert "such a run makes no progress" in out
    out = run("size", "7B", "--write", "5", "--mttf", "7.9h")[1]
    assert "pile up" not in out
    assert "no progress" not in out


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("nothere",), 1, "nothere: neither a number of parameters, such as 7B"),
        (
            ("7B", "--gpus", "6", "--set", "tp=4"),
            1,
            "6 GPUs cannot be divided into replicas of 4 x 1",
        ),
        (("7B", "--optimizer", "Lion"), 1, "--optimizer is 'Lion', known are Adadelta"),
        (("7B", "--read", "-1"), 1, "--read is -1.0, expected a positive number"),
        (("7B", "--set", "backward_s=3"), 1, "--set backward_s needs --set forward_s: a step that"),
        (("7B", "--set", "upload_s=3"), 1, "--set upload_s needs --every: the seconds"),
        (
            ("7B", "--set", "writer_gbps=3"),
            1,
            "--set writer_gbps is about shared storage and needs its rate: give ",
        ),
        (("7B", "--drives-from", "nothere"), 1, "nothere: No such file"),
        (("7B", "--every", "4x"), 2, "not a time"),
        (("7B", "--tbw", "much"), 2, "must be a number of bytes"),
        (("7B", "--set", "shares=1,x"), 2, "expected whole numbers such as 1,1"),
        (("7B", "--gpus", "two"), 2, "a valid integer"),
        (("7B", "--set", "gpu_memory=24"), 2, "'24' has no unit: write 24GB, or 24B for bytes"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_what_is_not_possible_or_wrong_is_refused(
    run: Run, arguments: tuple[str, ...], status: int, says: str
) -> None:
    code, out, err = run("size", *arguments)
    assert (code, out) == (status, "")
    assert says in " ".join(err.replace("│", " ").split())
    if status == 1:
        assert err.startswith(f"error: {says}")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("1B", "The model fits on one GPU with its state: no drive is needed"),
        ("3B", "The model fits on one GPU with its state on drives, and not with all in memory"),
        ("8B", "does not fit on one GPU, even with its state on drives: it needs 32.0 GB."),
    ],
)
def test_whether_a_model_fits_is_said_in_so_many_words(run: Run, model: str, says: str) -> None:
    _, out, _ = run("size", model, "--set", "gpu_memory=24GB")
    assert says in " ".join(out.split())


def test_names_may_be_short_and_in_small_letters(run: Run) -> None:
    for short, name in {"bf16": "bfloat16", "fp16": "float16", "FP32": "float32"}.items():
        found = run("size", "7B", "--dtype", short, "--optimizer", "sgd momentum")
        assert found == run("size", "7B", "--dtype", name, "--optimizer", "SGD momentum")
        assert found[0] == 0


def test_several_files_with_rates_are_taken_together(run: Run, tmp_path: Path) -> None:
    options: list[str | Path] = []
    for rw, gbps, staged in (("read", 2.0, False), ("write", 2.5, False), ("write", 1.6, True)):
        rates = {"bytes_per_s": gbps * 1e9, "durable_bytes_per_s": gbps * 1e9}
        workload = {"rw": rw, "path": "direct", "mix": 50, "staged": staged}
        path = tmp_path / f"{len(options)}.json"
        path.write_text(json.dumps({"results": [{"workload": workload, "median": rates}]}))
        options += ["--drives-from", path]
    found = json.loads(run("size", "1e9", *options, "--json")[1])
    machine = found["machine"]
    assert (machine["read_gbps"], machine["write_gbps"]) == (2.0, 2.5)
    assert found["seal_parts_s"] == {"copying and writing": 1.25, "beginning": 0.002}
    found = json.loads(run("size", "1e9", *options, "--set", "staged_write_gbps=2", "--json")[1])
    assert found["seal_parts_s"] == {"copying and writing": 1.0, "beginning": 0.002}


def test_the_parts_of_a_seal_and_a_resume_are_printed_if_they_are_known(run: Run) -> None:
    arguments = (
        "128e6",
        "--read",
        "2",
        "--write",
        "2.5",
        "--set",
        "copy_gbps=8",
        "--set",
        "sync_s=0.5ms",
    )
    out = " ".join(run("size", *arguments)[1].split())
    assert "A seal takes 0.111 s beside training: writing 0.102 s, copying the first block " in out
    assert "A resume takes 0.134 s: reading 0.128 s, copying the last block 0.0021 s," in out
