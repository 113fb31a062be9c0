"""`offload du`: what a store takes now, by kind, and can take at most."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import offload
from tests.command_line import Run
from tests.ranks_store.job import made
from tests.stores.files import flip_on_disk, tree
from tests.stores.small import make_model, make_optimizer, train

MOMENTS = ("exp_avg.safetensors", "exp_avg_sq.safetensors")


def bytes_of(*directories: Path) -> int:
    return sum(path.stat().st_size for path in tree(*directories))


def measured(run: Run, *arguments: str | Path) -> dict:
    code, out, _ = run("du", *arguments, "--json")
    assert code == 0
    return json.loads(out)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which three steps have been sealed, and two are kept."""
    store = tmp_path_factory.mktemp("du") / "store"
    with make_optimizer(make_model(64, 128, 8), directory=store, keep=2) as optimizer:
        train(optimizer, 4)
    return store


def test_every_byte_is_of_one_kind(run: Run, trained: Path) -> None:
    found = measured(run, trained)
    kept = [trained / f"step-{number:08}" for number in (3, 4)]
    expected = Counter[str]()
    for path in (p for directory in kept for p in directory.iterdir()):
        kind = {
            "model.safetensors": "parameters",
            "train_state.safetensors": "train_state",
            "manifest.json": "manifests",
        }.get(path.name, "state")
        expected[kind] += path.stat().st_size
    expected["free_slots"] = bytes_of(*trained.glob(".slot-*"))
    assert {kind: num for kind, num in found["kinds"].items() if kind in expected} == expected
    assert found["kinds"]["not_usable"] == 0
    assert found["total_bytes"] == sum(found["kinds"].values()) == bytes_of(trained)
    assert (found["num_checkpoints"], found["num_pinned"], found["num_free"]) == (2, 0, 1)
    listed = json.loads(run("ls", trained, "--json")[1])
    assert found["slot_bytes"] == listed[-1]["bytes"]


def test_a_store_grows_to_what_it_can_take_at_most_and_no_further(run: Run, tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = {"record": False}  # the files of a record may have any length
    with make_optimizer(make_model(), directory=store, keep=3, settings=settings) as optimizer:
        train(optimizer, 1)
        optimizer.pin("best", 1)
        early = measured(run, store, "--keep", "3")
        train(optimizer, 8)
        late = measured(run, store, "--keep", "3")
    assert early["total_bytes"] < early["at_most_bytes"]
    assert early["num_slots"] == 5, "those that are kept, the pinned one, and one to write"
    assert len([*store.glob("step-*"), *store.glob(".slot-*")]) == 5
    assert late["total_bytes"] == late["at_most_bytes"] == early["at_most_bytes"]


def test_parts_on_other_drives_are_counted(run: Run, tmp_path: Path) -> None:
    drives = [tmp_path / name for name in "abc"]
    with make_optimizer(make_model(64, 128, 8), directory=drives, keep=1) as optimizer:
        train(optimizer, 3)
    (drives[1] / "other.bin").write_bytes(b"of the user")
    found = measured(run, drives[0])
    parts = [part for drive in drives[1:] for part in drive.glob("part-*")]
    assert found["total_bytes"] == bytes_of(drives[0], *parts)
    assert {*found["directories"]} == {*map(str, drives)}
    assert found["at_most_bytes"] == found["total_bytes"] + found["slot_bytes"], "keep=2"
    assert measured(run, drives[0], "--keep", "1")["at_most_bytes"] == found["total_bytes"]


@pytest.mark.parametrize("sharded", [False, True], ids=["common file", "shard files"])
def test_parts_of_other_ranks_are_counted(run: Run, tmp_path: Path, sharded: bool) -> None:
    store = made(tmp_path / "run", tmp_path / "run", sharded=sharded)
    found = measured(run, store)
    assert found["total_bytes"] == bytes_of(store)
    listed = json.loads(run("ls", store, "--json")[1])
    shown = [json.loads(run("show", info["path"], "--json")[1])["files"] for info in listed]
    files = [(Path(name).name, size) for one in shown for name, size in one.items()]
    model = sum(size for name, size in files if "model" in name)
    assert found["kinds"]["parameters"] == model > 0
    state = sum(size for name, size in files if name in ("master.safetensors", *MOMENTS))
    assert found["kinds"]["state"] == state > 0
    assert found["slot_bytes"] == listed[-1]["bytes"]


def test_what_is_not_usable_is_a_kind_of_its_own(run: Run, store: Path) -> None:
    offload.pin(store / "step-00000003", "good")
    flip_on_disk(store / "step-00000004" / "manifest.json", 100)
    found = measured(run, store)
    assert found["kinds"]["not_usable"] == bytes_of(store / "step-00000004")
    assert (found["num_checkpoints"], found["num_pinned"]) == (1, 1)
    assert found["total_bytes"] == bytes_of(store)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_text_has_a_line_for_each_kind(
    run: Run, trained: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(trained.parent)
    code, out, err = run("du", trained)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= columns
    kinds = ["state", "parameters", "train state", "manifests", "free slots", "other"]
    for line, begins in zip(out.splitlines(), [*kinds, "now", "at most"], strict=False):
        assert line.startswith(f"{begins} ")
    assert "with keep=2: 3 slots of " in out
    assert "not usable" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["missing"], 1, "there is no store here"),
        (["."], 1, "not a store"),
        (["s3://bucket/run"], 2, "offload ls lists"),
        ([".", "--keep", "0"], 2, "keep"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    found, _, err = run("du", *arguments)
    assert found == code
    assert says in err
    assert "Traceback" not in err
