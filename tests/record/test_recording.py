"""A run leaves its status and its history in the store, and trains on whatever becomes of them."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gds import PosixBackend
from gds.calibration import Calibration, save_calibration
from gds.probe import mount_of
from offload import OffloadedOptimizer, SealError, list_checkpoints
from offload.format.names import CALIBRATION_NAME
from offload.record import read_lines, read_status
from offload.record.history import MAX_BYTES, add_lines
from tests.dying import dying
from tests.eventually import eventually
from tests.limits import HANG_S
from tests.stores.small import make_model, make_optimizer, step

ROOT = Path(__file__).parents[2]

STEPS_LINE = {"steps": 2, "elapsed_s": 30.0, "seconds": {"step_s": 1.5}, "read_bytes": 7}


def optimizer_in(store: Path, **arguments: Any) -> OffloadedOptimizer:
    return make_optimizer(make_model(), directory=store, **arguments)


def trained(store: Path, *, seals: int = 2, **arguments: Any) -> None:
    """Take steps, each of which is sealed, after those that the store has."""
    with optimizer_in(store, **arguments) as optimizer:
        optimizer.restore()
        for _ in range(seals):
            step(optimizer)
            optimizer.checkpoint(metrics={"loss": 0.5}).result()


def of_kind(store: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(str(store))[0] if line["kind"] == kind]


def test_what_a_run_leaves(tmp_path: Path) -> None:
    trained(tmp_path)
    status = read_status(str(tmp_path))
    assert (status.ended, status.step, status.ranks, status.pid) == (True, 2, 1, os.getpid())
    assert status.totals["steps"] == status.recent["steps"] == 2
    assert [one.step for one in status.checkpoints] == [1, 2]
    assert (status.drives, status.warnings) == ((), ())
    start, *checkpoints, steps = read_lines(str(tmp_path))[0]
    assert (start["kind"], start["step"]) == ("start", 0)
    for number, line in enumerate(checkpoints, 1):
        assert line.keys() == {
            *("kind", "at", "step", "bytes_written", "stall_s", "seal_s", "metrics")
        }
        assert (line["kind"], line["step"], line["metrics"]) == (
            *("checkpoint", number),
            {"loss": 0.5},
        )
        assert line["bytes_written"] > 0
        assert line["seal_s"] > 0
    assert (steps["kind"], steps["step"], steps["steps"]) == ("steps", 2, 2)
    assert steps["seconds"]["step_s"] > 0
    assert steps["written_bytes"] > steps["read_bytes"] > 0


def test_a_checkpoint_is_in_the_history_while_training_goes_on(tmp_path: Path) -> None:
    with optimizer_in(tmp_path) as optimizer:
        step(optimizer)
        optimizer.checkpoint().result()
        history = tmp_path / "history.jsonl"
        assert eventually(lambda: history.exists() and of_kind(tmp_path, "checkpoint"))
        assert eventually((tmp_path / "status.json").exists)
        assert not read_status(str(tmp_path)).ended


def test_a_run_that_goes_on_says_where_it_began(tmp_path: Path) -> None:
    trained(tmp_path)
    with optimizer_in(tmp_path) as optimizer:
        optimizer.restore(1, discard_newer=True)
        step(optimizer)
        optimizer.checkpoint()
    assert [line["step"] for line in of_kind(tmp_path, "start")] == [0, 1]
    assert [line["step"] for line in of_kind(tmp_path, "checkpoint")] == [1, 2, 2]


def test_a_run_that_goes_back_says_so_between_the_steps(tmp_path: Path) -> None:
    with optimizer_in(tmp_path, keep=8) as optimizer:
        for back_to in (1, 2, None):
            for _ in range(2):
                step(optimizer)
                optimizer.checkpoint().result()
            if back_to is not None:
                optimizer.restore(back_to, discard_newer=True)
    lines = [line for line in read_lines(str(tmp_path))[0] if line["kind"] != "steps"]
    assert [(line["kind"][:5], line["step"]) for line in lines] == [
        *(("start", 0), ("check", 1), ("check", 2)),
        *(("start", 1), ("check", 2), ("check", 3)),
        *(("start", 2), ("check", 3), ("check", 4)),
    ]
    assert sum(line["steps"] for line in of_kind(tmp_path, "steps")) == 6


def test_metrics_of_a_checkpoint_that_exists_are_another_line(tmp_path: Path) -> None:
    with optimizer_in(tmp_path) as optimizer:
        step(optimizer)
        optimizer.checkpoint().result()
        optimizer.checkpoint(metrics={"loss": 2.0})
    first, second = of_kind(tmp_path, "checkpoint")
    assert (first["step"], first["metrics"]) == (1, {})
    assert (second["step"], second["metrics"], second["bytes_written"]) == (1, {"loss": 2.0}, 0)


@pytest.mark.parametrize(
    "train",
    [
        lambda store: trained(store, settings={"record": False}),
        lambda store: optimizer_in(store).close(),
        lambda store: trained(store, backend=PosixBackend()),
    ],
    ids=["turned off", "no step", "another backend"],
)
def test_nothing_is_recorded(tmp_path: Path, train: Callable[[Path], None]) -> None:
    train(tmp_path)
    assert not {"status.json", "history.jsonl"} & {path.name for path in tmp_path.iterdir()}


def test_readers_of_the_store_do_not_see_the_files(tmp_path: Path) -> None:
    trained(tmp_path)
    before = list_checkpoints(tmp_path)
    for name in ("status.json", "history.jsonl", ".status.json.new"):
        (tmp_path / name).write_bytes(b"\0 of a torn file")
    assert list_checkpoints(tmp_path) == before
    trained(tmp_path)
    assert [info.step for info in list_checkpoints(tmp_path)] == [3, 4]


def test_a_torn_line_is_left_behind(tmp_path: Path) -> None:
    trained(tmp_path)
    before = read_lines(str(tmp_path))[0]
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(b'{"kind":"checkpoint","at":1')
    trained(tmp_path)
    after = read_lines(str(tmp_path))[0]
    assert after[: len(before)] == before
    assert [line["kind"] for line in after[len(before) :]] == [
        *("start", "checkpoint", "checkpoint", "steps")
    ]


def test_a_copy_by_hard_links_stays_as_it_is(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    subprocess.run(["cp", "-al", tmp_path / "run", tmp_path / "copy"], check=True)
    names = ("status.json", "history.jsonl")
    before = [(tmp_path / "copy" / name).read_bytes() for name in names]
    trained(tmp_path / "run")
    assert [(tmp_path / "copy" / name).read_bytes() for name in names] == before
    assert len(read_lines(str(tmp_path / "run"))[0]) > len(read_lines(str(tmp_path / "copy"))[0])


def link_elsewhere(path: Path) -> None:
    path.symlink_to(path.parent.parent / "of-the-user")


@pytest.mark.parametrize(
    "make", [link_elsewhere, os.mkfifo, Path.mkdir], ids=["symlink", "fifo", "directory"]
)
def test_training_goes_on_where_nothing_can_be_recorded(
    tmp_path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    user, store = tmp_path / "of-the-user", tmp_path / "run"
    user.write_bytes(b"1 2 3")
    store.mkdir()
    (store / "LOCK").touch()  # else a directory that holds other things is refused
    for name in ("status.json", "history.jsonl"):
        make(store / name)
    with caplog.at_level(logging.WARNING, logger="offload"):
        trained(store, seals=3)
    assert user.read_bytes() == b"1 2 3"
    assert sum("is not recorded" in line for line in caplog.messages) == 1
    assert [info.step for info in list_checkpoints(store)] == [2, 3]


def test_a_history_that_is_too_large_is_halved(tmp_path: Path) -> None:
    metrics = {f"metric {number}": number / 3 for number in range(16)}
    lines: list[dict[str, object]] = []
    for number in range(1, 4001):
        lines.append({"kind": "steps", "at": number, "step": 2 * number, **STEPS_LINE})
        lines.append({"kind": "checkpoint", "at": number, "step": 2 * number, "metrics": metrics})
    add_lines(str(tmp_path), lines)
    history = tmp_path / "history.jsonl"
    with history.open("ab") as file:
        file.write((b"not of a run" * 100 + b"\n") * ((MAX_BYTES - history.stat().st_size) // 1201))
    assert len(of_kind(tmp_path, "steps")) == 4000
    starts: list[dict[str, object]] = [{"kind": "start", "at": n, "step": 8000} for n in range(50)]
    add_lines(str(tmp_path), starts)
    assert history.stat().st_size < MAX_BYTES // 2
    steps, checkpoints = of_kind(tmp_path, "steps"), of_kind(tmp_path, "checkpoint")
    assert (len(steps), len(checkpoints)) == (2000, 2000)
    assert sum(line["steps"] for line in steps) == 8000
    assert steps[0]["seconds"] == {"step_s": 3.0}
    assert checkpoints[-1]["at"] == steps[-1]["at"] == 4000
    assert of_kind(tmp_path, "start") == starts


def test_the_same_bits_with_and_without_a_recorder(tmp_path: Path) -> None:
    models = []
    for record in (True, False):
        model = make_model()
        with make_optimizer(
            model, directory=tmp_path / str(record), settings={"record": record}
        ) as optimizer:
            for _ in range(3):
                step(optimizer)
        models.append(model.state_dict())
    assert all(map(torch.equal, models[0].values(), models[1].values()))


def test_each_of_several_drives_is_in_the_status(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    for path, read_gbps in zip(paths, (2.0, 1.0), strict=True):
        os.mkdir(path)
        number, mount = os.stat(path).st_dev, mount_of(path)
        measured = Calibration(
            read_threads=2,
            write_threads=2,
            request_bytes=1 << 20,
            read_gbps=read_gbps,
            write_gbps=1.0,
            mixed_gbps=1.5,
            filesystem=mount.filesystem,
            device=f"{os.major(number)}:{os.minor(number)}",
            source=mount.source,
            measured="2026-11-01T00:00:00+00:00",
        )
        save_calibration(f"{path}/{CALIBRATION_NAME}", measured)
    with make_optimizer(make_model(), directory=paths) as optimizer:
        for _ in range(3):
            step(optimizer)
    status = read_status(paths[0])
    assert [drive.directory for drive in status.drives] == paths
    assert [drive.totals["drive_read_gbps"] for drive in status.drives] == [2.0, 1.0]
    for name in ("bytes_read", "bytes_written"):
        totals = [drive.totals[name] for drive in status.drives]
        assert min(totals) > 0
        assert sum(totals) == status.totals[name]
        assert [drive.recent[name] for drive in status.drives] == totals


def test_a_seal_that_failed_is_a_warning_until_another_succeeds(tmp_path: Path) -> None:
    store = tmp_path / "run"
    with optimizer_in(store) as optimizer:
        step(optimizer)
        (slot,) = store.glob(".slot-*")
        slot.rename(tmp_path / "away")
        with pytest.raises(SealError):
            optimizer.checkpoint().result()
        status = store / "status.json"
        assert eventually(lambda: status.exists() and read_status(str(store)).warnings)
        (warning,) = read_status(str(store)).warnings
        assert re.match(f"sealing step 1 failed: .*{slot.name}", warning)
        with pytest.raises(SealError):
            step(optimizer)
        optimizer.checkpoint().result()
    assert read_status(str(store)).warnings == ()


def test_an_upload_that_failed_is_a_warning_until_another_succeeds(tmp_path: Path) -> None:
    tier, store = tmp_path / "mnt" / "tier", tmp_path / "run"
    (tmp_path / "mnt" / "other").mkdir(parents=True)
    with optimizer_in(store, settings={"tier": tier.as_uri()}) as optimizer:
        shutil.move(tmp_path / "mnt", tmp_path / "unplugged")
        step(optimizer)
        optimizer.checkpoint().result()
        status = store / "status.json"
        assert eventually(lambda: status.exists() and read_status(str(store)).warnings)
        (warning,) = read_status(str(store)).warnings
        assert warning.startswith(f"the upload of step 1 failed: {tier.as_uri()}")
        shutil.move(tmp_path / "unplugged", tmp_path / "mnt")
        step(optimizer)
        optimizer.checkpoint().result()
        assert eventually(lambda: optimizer.stats().tier.newest_step == 2)
    assert read_status(str(store)).warnings == ()


def test_lines_are_json_and_hold_no_other_numbers(tmp_path: Path) -> None:
    trained(tmp_path)
    for line in (tmp_path / "history.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


_RANK = """
import sys, torch, offload
import torch.distributed as dist
rank, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
options = offload.Options(allow_volatile=True, chunk_bytes=4096)
with offload.AdamW(model.parameters(), directory=directory, model=model, options=options) as taken:
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
        taken.step()
        taken.checkpoint(metrics={"loss": 1.0}).result()
dist.destroy_process_group()
print(taken.stats().steps)
"""


def test_one_rank_records_for_all(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    store = tmp_path / "run"
    ranks = [
        subprocess.Popen(
            dying([sys.executable, "-c", _RANK, str(rank), port, str(store)]),
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=HANG_S)[0] for rank in ranks] == [b"3\n"] * 2
    status = read_status(str(store))
    assert (status.ranks, status.pid, status.step) == (2, ranks[0].pid, 3)
    assert [line["step"] for line in of_kind(store, "checkpoint")] == [1, 2, 3]
    found = {path.name for path in store.rglob("*") if path.suffix in (".json", ".jsonl")}
    assert {"status.json", "history.jsonl"} <= found
    assert len([*store.rglob("status.json"), *store.rglob("history.jsonl")]) == 2


def test_uploads_are_in_the_status(tmp_path: Path) -> None:
    url = (tmp_path / "tier").as_uri()
    with optimizer_in(tmp_path / "run", settings={"tier": url}) as optimizer:
        step(optimizer)
        optimizer.checkpoint().result()
        assert eventually(lambda: optimizer.stats().tier.newest_step == 1)
    status = read_status(str(tmp_path / "run"))
    assert (status.tier["url"], status.tier["newest_step"]) == (url, 1)
    assert status.tier["bytes_sent"] > 0
    assert (status.tier["choice"], status.tier["outcome"]) == ("upload", "complete")
    assert not [*(tmp_path / "tier").rglob("status.json")]
