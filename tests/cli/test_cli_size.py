"""``offload size``: what it prints, how wide, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import offload
from tests.command_line import Run
from tests.stores.small import make_model, make_optimizer, train

FULL = (
    *("--read", "9.6", "--write", "5", "--card", "80GB", "--tbw", "7000TB", "--gpus", "1024"),
    *("--keep", "3", "--every", "10min"),
    *("--mttf", "7.9h"),
    *(
        part
        for value in (
            *("mixed_gbps=9", "update_gbps=20", "copy_gbps=8", "sync_s=0.5ms", "network_gbps=12"),
            *("staged_read_gbps=4", "staged_write_gbps=3", "new_memory_gbps=0.9", "tp=8", "pp=16"),
            *("link_gbps=25", "host_memory=256 GiB", "storage_gbps=273", "writer_gbps=1"),
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
    assert [fit["times_larger"] for fit in found["fits"]] == [1, 4]
    assert found["typical_steps"] == []
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
    first = run("size", trained, "--card", "L4")[1].splitlines()[0]
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
        (("7B", "--set", "host_memory=24"), 2, "'24' has no unit: write 24GB, or 24B for bytes"),
        (("7B", "--card", "24"), 1, "the card '24' has no unit: write 24GB"),
        (("7B", "--card", "0GB"), 1, "--card is 0, expected a positive number"),
        (
            ("7B", "--card", "A100"),
            1,
            "the card 'A100' is not in the list: give its memory, as 24GB; did you mean A100 40GB",
        ),
        (("7B", "--card", ""), 1, "the card '' is not in the list: give its memory, as 24GB"),
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
    ("arguments", "says"),
    [
        (
            ("1B", "--card", "RTX 4090"),
            "Fits on the RTX 4090 (24 GB): 16.0 GB with all in memory, 8.0 GB left for activations",
        ),
        (
            ("3B", "--card", "RTX 4090"),
            "Fits on the RTX 4090 (24 GB): 12.0 GB with the state on drives, 12.0 GB left for",
        ),
        (
            ("7B", "--card", "RTX 4090"),
            'Fits on the RTX 4090 (24 GB): 14.0 GB with gradients="host" and 14.0 GB of host ',
        ),
        (
            ("10B", "--card", "24GiB"),
            'Fits on a GPU of 25.8 GB: 20.0 GB with gradients="host" and 20.0 GB of host ',
        ),
        (
            ("7B", "--card", "24GB", "--set", "host_memory=8GB"),
            'Fits on a GPU of 24.0 GB: 14.0 GB with overlap="backward", 10.0 GB left for',
        ),
        (
            ("11B", "--card", "24GB"),
            'Tight on a GPU of 24.0 GB: 22.0 GB with gradients="host" and 22.0 GB of host memory, ',
        ),
        (
            ("13B", "--card", "24GB"),
            'Does not fit on a GPU of 24.0 GB: 26.0 GB with gradients="host" and 26.0 GB of host ',
        ),
        (
            ("7B",),
            'Fits on a GPU of 24 GB with gradients="host", 40 GB with the state on drives, 141',
        ),
        (("135M",), "Fits on a GPU of 8 GB with all in memory. A step"),
        (("1T",), 'Fits on no GPU in the list: 2.0 TB with gradients="host".'),
        (
            ("70B", "--card", "H100", "--gpus", "8", "--set", "sharded=true"),
            "Fits on the H100 (80 GB): 35.0 GB each with the state on drives, 45.0 GB left",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_answer_comes_first(run: Run, arguments: tuple[str, ...], says: str) -> None:
    _, out, _ = run("size", *arguments)
    assert " ".join(out.splitlines()[1:5]).startswith(says)


QWEN_32B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}


def test_a_model_beyond_memory_is_trained_with_what_gives_up_least(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_32B))
    arguments = ("size", tmp_path, "--card", "RTX 4090", "--read", "7", "--write", "7")
    code, out, err = run(*arguments, "--tbw", "7PB")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines()[1:])) <= 80
    flat = " ".join(out.split())
    assert (
        'Fits on the RTX 4090 (24 GB): 6.0 GB with parameters="host" and 127.9 GB of host memory, '
        "18.0 GB left for activations. A step takes 56.2 s."
    ) in flat
    assert 'parameters="drive" 975.2 MB 655.3 GB 524.2 GB 93.6 s' in flat
    assert 'With parameters="drive" they last 13,353 steps.' in flat
    flat = " ".join(run(*arguments, "--set", "host_memory=64GB")[1].split())
    assert 'Fits on the RTX 4090 (24 GB): 6.0 GB with parameters="drive" and 975.2 MB of' in flat
    assert "A step takes 93.6 s." in flat
    assert 'parameters="host" 0.184 6.0 GB 18.0 GB no host memory' in flat


def test_the_seconds_of_a_step_come_with_the_rates_that_are_assumed_or_given(run: Run) -> None:
    _, out, _ = run("size", "7B")
    assert " A step takes 7.64 s to 33.6 s with typical drives. " in " ".join(out.split())
    assert "one PCIe 4 NVMe                    168.0 GB     5 GB/s    33.6 s\n" in out
    _, out, _ = run("size", "7B", "--read", "9.6", "--write", "5")
    assert " A step takes 16.8 s. " in " ".join(out.split())
    assert "PCIe" not in out


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("a100-80gb", "A100 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        (" l40s", "L40S"),
        ("24 gib", None),
    ],
)
def test_a_card_is_known_by_the_names_that_people_use(
    run: Run, given: str, name: str | None
) -> None:
    found = json.loads(run("size", "7B", "--card", given, "--json")[1])
    assert found["card"] == name
    assert found["fits"][2]["verdict"] == "fits"


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
