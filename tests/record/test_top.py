"""``offload top``: what it says of a run that goes on, has ended or was killed, or is none."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.cli import main
from offload.record import read_status
from tests.command_line import Run, runner
from tests.dying import dying
from tests.eventually import eventually
from tests.test_docs import ROOT

AT = 1_790_000_000.5

TOTALS = {
    "steps": 1200,
    "seals": 12,
    "bytes_read": 98 * 2**40,
    "bytes_written": 99 * 2**40,
    "read_s": 4e4,
    "write_s": 9e4,
    "drive_read_gbps": 2.5,
    "drive_write_gbps": 1.1,
    "drive_mixed_gbps": 2.2,
    "drive_bytes": 4e12,
    "drive_writes": 27.2,
}
RECENT = {
    "steps": 4,
    "step_s": 8.4,
    "compute_s": 2.44,
    "wait_read_s": 1.24,
    "wait_write_s": 4.6,
    "bytes_read": 9.24e9,
    "bytes_written": 8.4e9,
    "read_s": 4.0,
    "write_s": 8.0,
}
CHECKPOINT = {
    "step": 1200,
    "at": AT - 60,
    "bytes_written": 2_700_000_000,
    "stall_s": 0.021,
    "seal_s": 3.25,
    "metrics": {"val_loss": 2.3125, "tokens": 123456789.0},
}
TIER = {
    "url": "s3://bucket/run",
    "bytes_sent": 10**10,
    "num_complete": 3,
    "newest_step": 1000,
    "bytes_per_s": 1.5e8,
    "slowdown": 0.021,
    "last_step": 1200,
    "choice": "upload",
    "reason": "the link is free",
    "outcome": "",
}
STATUS: dict[str, Any] = {
    "version": 1,
    "at": AT,
    "started": AT - 7650,
    "ended": False,
    "pid": 4711,
    "host": "node3",
    "ranks": 4,
    "step": 1234,
    "totals": TOTALS,
    "recent_s": 12.8,
    "recent": RECENT,
    "drives": [
        {"directory": "/a", "totals": TOTALS, "recent": RECENT},
        {
            "directory": "/mnt/nvme1/a-run",
            "totals": {"bytes_read": 7, "read_s": 2.0},
            "recent": {"bytes_read": 1e9, "read_s": 1.6, "bytes_written": 1, "write_s": 0.0},
        },
    ],
    "checkpoints": [CHECKPOINT],
    "update_code": "kernel (AVX512)",
    "tier": TIER,
    "warnings": ["step-00000007 is not usable: its manifest is damaged"],
}

AT_80 = """\
run          {store}
state        running for 2 h 07 min, step 1,234; process 4711 on node3, rank ...
steps        0.312 a second, over the last 13 s
waits for    writes
each step    2.100 s, 65.6% of the time
             updating             610.0 ms    29.0%
             waiting for reads    310.0 ms    14.8%
             waiting for writes    1.150 s    54.8%
             everything else       30.0 ms     1.4%
drives       reads 2.31 GB/s of 2.50 GB/s, writes 1.05 GB/s of 1.10 GB/s; bot...
             reads 2.31 of 2.5, writes 1.05 of 1.1 GB/s  /a
             reads 0.625, writes 0 GB/s  /mnt/nvme1/a-run
written      99.00 TiB, 98.00 TiB read; 27.2 full drive writes
checkpoints  12 sealed by this process
             step 1200    {time}   2.51 GiB  stalled 21.0 ms  val_loss=2.31...
uploads      s3://bucket/run: 3 complete, 9.31 GiB sent, 150.00 MB/s, newest ...
             step 1200: upload, going on: the link is free
warning      step-00000007 is not usable: its manifest is damaged
"""
AT_120 = (  # how those go on that are cut at 80 columns
    "process 4711 on node3, rank 0 of 4",
    "writes 1.05 GB/s of 1.10 GB/s; both at once 2.20 GB/s",
    "stalled 21.0 ms  val_loss=2.312, tokens=1.235e+08",
    "150.00 MB/s, newest step 1000, steps take 2.1% longer",
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.delenv("COLUMNS", raising=False)
    return runner("offload", main, monkeypatch, capsys)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a short name, so that the first line has the same length everywhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s").mkdir()
    return tmp_path / "s"


def write(store: Path, **changes: Any) -> None:
    (store / "status.json").write_text(json.dumps({**STATUS, **changes}))


def now_running(**changes: Any) -> dict[str, Any]:
    """Return the times of a status that has just been written."""
    now = time.time()
    return {"at": now, "started": now - 7650, **changes}


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def test_at_80_columns(store: Path, run: Run) -> None:
    write(store, **now_running())
    status, out, err = run("top", store, "--once")
    first, *lines = out.splitlines()
    assert (status, err, first[:13]) == (0, "", "run          ")
    assert lines == AT_80.format(store="", time=clock(AT - 60)).splitlines()[1:]
    assert max(map(len, lines)) == 80


def test_at_120_columns(store: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write(store, **now_running())
    narrow = run("top", store, "--once")[1].splitlines()[1:]
    monkeypatch.setenv("COLUMNS", "120")
    wide = run("top", store, "--once")[1].splitlines()[1:]
    assert max(map(len, wide)) <= 120
    longer = [line for line, short in zip(wide, narrow, strict=True) if line != short]
    for line, end in zip(longer, AT_120, strict=True):
        assert line.endswith(end)


def test_a_pipe_gets_the_same_bytes_as_once(store: Path, run: Run) -> None:
    write(store, ended=True)
    shown = run("top", store, "--once")[1]
    assert run("top", store)[1] == shown, "standard output is no terminal here"
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    command = [sys.executable, "-m", "offload", "top", store, "--once"]
    for more in ({}, {"TERM": "xterm-256color", "FORCE_COLOR": "1"}):
        piped = subprocess.run(
            command, stdout=subprocess.PIPE, env={**environment, **more}, check=True, cwd=ROOT
        )
        assert piped.stdout.decode() == shown


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "not running since 2026-09-21 "),
        ({"ended": True}, "ended at 2026-09-21 "),
        (now_running(at=4e9), "not known: written "),
        (now_running(at=0.0), "not running since 1970-01-01 "),
    ],
    ids=["killed", "closed", "another clock", "1970"],
)
def test_a_run_that_does_not_go_on(
    store: Path, run: Run, changes: dict[str, Any], said: str
) -> None:
    write(store, **changes)
    status, out, _ = run("top", store, "--once")
    assert status == 0
    assert out.splitlines()[1].startswith(f"state        {said}")
    assert "offload_up{" in (text := run("top", store, "--prometheus")[1])
    assert re.search(r"^offload_up\{.*\} 0$", text, re.MULTILINE)


def test_a_run_without_recent_steps_waits_for_nothing(store: Path, run: Run) -> None:
    write(store, **now_running(recent={}, recent_s=300.0, checkpoints=[], tier={}, warnings=[]))
    out = run("top", store, "--once")[1]
    assert "steps        none in the last 5 min 00 s\n" in out
    assert "waits for" not in out


@pytest.mark.parametrize(
    ("phase", "word"),
    [
        *(("compute_s", "update"), ("wait_read_s", "reads"), ("wait_write_s", "writes")),
        *(("wait_seal_s", "seals"), ("wait_device_s", "device")),
    ],
)
def test_what_a_step_waits_for_is_one_word(store: Path, run: Run, phase: str, word: str) -> None:
    write(store, recent={**RECENT, phase: 6.0})
    assert f"waits for    {word}\n" in run("top", store, "--once")[1]


def test_metrics_of_prometheus(store: Path, run: Run) -> None:
    write(store, **now_running(checkpoints=[{**CHECKPOINT, "metrics": {'a"\\b': -0.5}}]))
    status, out, err = run("top", store, "--prometheus")
    assert (status, err) == (0, "")
    told = set[str]()
    for line in out.splitlines():
        if found := re.fullmatch(r"# (HELP|TYPE) (offload_[a-z_]+) (.+)", line):
            told.add(found[2])
            assert found[1] == "HELP" or found[3] in ("gauge", "counter")
            continue
        found = re.fullmatch(r'(offload_[a-z_]+)\{([a-z]+="(?:[^"\\\n]|\\.)*",?)+\} (\S+)', line)
        assert found, line
        assert found[1] in told
        float(found[3])
    directory = f'directory="{store}"'
    assert f"offload_up{{{directory}}} 1\n" in out
    assert f"offload_written_bytes_total{{{directory}}} {99 * 2**40}\n" in out
    drive = f'{directory},drive="/mnt/nvme1/a-run"'
    assert f"offload_drive_read_bytes_total{{{drive}}} 7\n" in out
    assert f"offload_drive_written_bytes_total{{{drive}}} 0\n" in out
    assert f'offload_checkpoint_metric{{{directory},metric="a\\"\\\\b"}} -0.5\n' in out


def test_the_dashboard_asks_for_metrics_that_there_are(store: Path, run: Run) -> None:
    write(store)
    printed = {line.partition("{")[0] for line in run("top", store, "--prometheus")[1].split("\n")}
    text = (ROOT / "docs" / "grafana-dashboard.json").read_text()
    assert {*re.findall(r"offload_\w+", text)} <= printed
    for panel in json.loads(text)["panels"]:
        assert all("offload_" in target["expr"] for target in panel["targets"])


def nothing(path: Path) -> None:
    """Leave the file out."""


def torn(path: Path) -> None:
    path.write_text(json.dumps(STATUS)[:-40])


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def linked(path: Path) -> None:
    (path.parent / "real").write_text(json.dumps(STATUS))
    path.symlink_to("real")


def other(**changes: Any) -> Callable[[Path], None]:
    return lambda path: write(path.parent, **changes)


FORGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (nothing, "there is no such file: no run has been recorded"),
    "torn": (torn, "this is not the status of a run"),
    "empty": (lambda path: path.write_bytes(b""), "this is not the status of a run"),
    "zeros": (lambda path: path.write_bytes(b"\x00" * 4096), "this is not the status of a run"),
    "deep": (lambda path: path.write_bytes(b"[" * 100_000), "about 100000 values"),
    "a list": (lambda path: path.write_bytes(b"[]"), "not an object"),
    "no keys": (lambda path: path.write_bytes(b"{}"), "no 'version'"),
    "huge": (huge, "more than 262144 bytes"),
    "symlink": (linked, "a symbolic link"),
    "fifo": (os.mkfifo, "a FIFO"),
    "directory": (Path.mkdir, "a directory"),
    "another version": (other(version=2), "version 2, expected 1"),
    "a time beyond all": (other(at=1e300), "at is no time"),
    "a boolean": (other(step=True), "step is not a whole number"),
    "text for a number": (other(step="7"), "step is not a whole number"),
    "a list of totals": (other(totals=[1]), "totals is not an object"),
    "text in recent": (other(recent={"steps": "many"}), "recent is not a number"),
    "too many": (
        other(recent={str(n): n for n in range(1000)}),
        "recent is not an object of at",
    ),
    "a nested warning": (other(warnings=[["deep"]]), "warnings is not text"),
    "text in tier": (other(tier={"bytes_sent": "x"}), "bytes_sent is not a whole number"),
    "text as drive": (other(drives=["/a"]), "a drive is not an object"),
    "a number as checkpoint": (other(checkpoints=[7]), "a checkpoint is not an object"),
}


@pytest.mark.parametrize(("make", "said"), FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("how", ["--once", "--prometheus"])
def test_a_file_that_no_run_has_written_is_refused_in_one_line(
    store: Path, run: Run, make: Callable[[Path], None], said: str, how: str
) -> None:
    make(store / "status.json")
    status, out, err = run("top", store, how)
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {store / 'status.json'}: ")
    assert said in err
    assert err.count("\n") == 1
    assert len(err.split()) <= 40


def test_a_directory_that_is_missing_is_refused(store: Path, run: Run) -> None:
    status, out, err = run("top", store / "missing", "--once")
    assert (status, out) == (1, "")
    assert "there is no such directory" in err


def test_text_of_a_run_does_not_control_the_terminal(store: Path, run: Run) -> None:
    evil = "\x1b]0;owned\x07\r\n\u202eevil\x9b[bold]"
    write(store, host=evil, warnings=[evil], tier={**TIER, "url": evil, "reason": evil})
    out = run("top", store, "--once")[1]
    assert all(character.isprintable() or character == "\n" for character in out)
    assert len(out.splitlines()) == len(AT_80.splitlines())


@pytest.mark.parametrize("number", [0, -1e308, 1e308, 5e-324])
def test_any_number_is_shown(store: Path, run: Run, number: float) -> None:
    totals, recent = dict.fromkeys(TOTALS, number), dict.fromkeys(RECENT, number)
    checkpoint = {**CHECKPOINT, "stall_s": number, "seal_s": number, "metrics": {"m": number}}
    write(store, totals=totals, recent=recent, recent_s=number, checkpoints=[checkpoint])
    status, out, err = run("top", store, "--once")
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= max(80, len(str(store)) + 13)
    assert run("top", store, "--prometheus")[0] == 0


_TRAINS = """
import sys, time, torch, offload
p = torch.nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
options = offload.Options(allow_volatile=True, chunk_bytes=4096)
optimizer = offload.AdamW([p], directory=sys.argv[1], options=options)
while True:
    p.grad = torch.ones_like(p)
    optimizer.step()
    time.sleep(0.01)
"""


def test_a_run_that_is_killed(store: Path, run: Run) -> None:
    child = subprocess.Popen(dying([sys.executable, "-c", _TRAINS, str(store)]), cwd=ROOT)
    try:
        assert eventually((store / "status.json").exists)
        first = read_status(str(store))
        assert eventually(lambda: read_status(str(store)).step > first.step)
        assert "state        running for" in run("top", store, "--once")[1]
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    status = read_status(str(store))
    assert (status.pid, status.ended) == (child.pid, False)
    body = json.loads((store / "status.json").read_text())
    write(store, **{**body, "at": body["at"] - 11})  # 11 seconds later
    assert "state        not running since" in run("top", store, "--once")[1]
