"""Screens of `gds bench` at 80 and 120 columns: every number is whole, and no line is too long."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest

from tests.command_line import Run

QUICK = ("--file-size", "1M", "--allow-small", "--seconds", "0", "--ramp", "0", "--repeat", "2")
SWEEPS = {
    "one-row": ("--size", "64K"),
    "mixed-beside-reads": ("--sweep", "size=64K..256K", "--sweep", "rw=read,mixed"),
    "many": (
        *("--sweep", "size=64K,128K", "--sweep", "rw=randread,randmixed"),
        *("--sweep", "threads=1,2", "--sweep", "depth=1,16", "--sweep", "path=direct,buffered"),
        *("--sweep", "mix=30,70", "--sweep", "cache=cold,as-is"),
    ),
}


def tables(out: str) -> list[tuple[list[str], list[list[str]]]]:
    """The titles and the rows of each table, cut at the rules under the titles."""
    lines = out.splitlines()
    found = []
    for number, line in enumerate(lines):
        if number and re.fullmatch(r"-+( +-+)+", line):
            spans = [match.span() for match in re.finditer("-+", line)]
            rows = []
            for row in lines[number + 1 :]:
                if not row or row.startswith(("Latency", "row ")) or row == lines[number - 1]:
                    break
                rows.append([row[start:end].strip() for start, end in spans])
                gaps = [row[end : end + 2] for _, end in spans]
                assert not "".join(gaps).strip(), f"a cell is wider than its column: {row}"
            found.append(([lines[number - 1][a:b].strip() for a, b in spans], rows))
    return found


def columns(out: str, title: str) -> list[str]:
    """All cells under a title, of whatever table it is in."""
    return [
        cell
        for titles, rows in tables(out)
        if title in titles
        for cell in (row[titles.index(title)] for row in rows)
    ]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("sweep", SWEEPS)
def test_nothing_is_cut_and_no_line_is_too_long(
    sweep: str, width: int, run: Run, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(drive)
    status, out, err = run("bench", ".", *QUICK, *SWEEPS[sweep])
    assert status == 0, err
    assert "…" not in out
    assert max(len(line) for line in out.splitlines()) <= width
    for title in ("GB/s", "IOPS", "mean", "p50", "p99", "p99.9", "max", "sd"):
        cells = columns(out, title)
        assert cells, f"no column {title}"
        assert all(re.fullmatch(r"\d+(\.\d+)?", cell) for cell in cells), cells
    assert all(re.fullmatch(r"[\d.]+-[\d.]+", cell) for cell in columns(out, "from-to"))
    if sweep == "mixed-beside-reads":
        sizes = ["64K", "64K", "64K", "64K", "128K", "128K", "128K", "128K"]
        assert columns(out, "size")[:8] == sizes
        assert columns(out, "rw")[:4] == ["read", "mixed", "- reads", "- writes"]
    assert re.search(r"^All of it took [\d.]+ s\.$", out, re.MULTILINE)


def test_both_directions_of_a_mixed_row_add_up(run: Run, drive: Path) -> None:
    status, out, err = run("bench", drive, *QUICK, "--size", "64K", "--rw", "mixed", "--json")
    assert status == 0, err
    for one in json.loads(out)["results"][0]["runs"]:
        reads, writes = one["reads"], one["writes"]
        for name in ("num_requests", "num_bytes", "bytes_per_s", "iops"):
            assert reads[name] + writes[name] == pytest.approx(one[name])
        assert reads["num_bytes"] == one["bytes_read"] == 1 << 19
        assert max(reads["latency_max_s"], writes["latency_max_s"]) == one["latency_max_s"]
        for part in (one, reads, writes):
            assert sum(count for _, count in part["latency_histogram"]) == part["num_requests"]
            last = part["latency_histogram"][-1][0]
            assert part["latency_max_s"] <= last < part["latency_max_s"] * 1.19 + 1e-6
        moved = [each["num_reads"] + each["num_writes"] for each in one["series"]]
        assert sum(moved) == one["num_requests"]


def test_results_as_csv(run: Run, drive: Path) -> None:
    status, out, err = run(
        "bench", drive, *QUICK, "--size", "64K", "--sweep", "rw=read,mixed", "--csv"
    )
    assert status == 0, err
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["rw"], row["requests"]) for row in rows] == [
        ("read", "total"), ("mixed", "total"), ("mixed", "reads"), ("mixed", "writes"),
    ]  # fmt: skip
    for row in rows:
        assert float(row["lowest_bytes_per_s"]) <= float(row["bytes_per_s"])
        assert float(row["bytes_per_s"]) <= float(row["highest_bytes_per_s"])
        assert row["num_runs"] == "2"
        assert row["verdict"] in ("too short", "unstable")
        assert row["verdict_reasons"].startswith(f"{row['verdict']}: ")


def test_a_histogram_on_the_screen(run: Run, drive: Path) -> None:
    _, out, _ = run("bench", drive, *QUICK, "--size", "64K", "--histogram")
    shares = re.findall(r"^  <= +[\d.]+ ms +([\d.]+)%(?:  #+)?$", out, re.MULTILINE)
    assert sum(map(float, shares)) == pytest.approx(100, abs=0.05)


def test_a_row_is_measured_three_times_unless_told_otherwise(run: Run, drive: Path) -> None:
    arguments = ("--file-size", "1M", "--size", "64K", "--allow-small")
    _, out, err = run("bench", drive, *arguments, "--seconds", "0.01", "--ramp", "0.01", "--json")
    (result,) = json.loads(out)["results"]
    assert len(result["runs"]) == 3
    assert all(one["ramp_s"] >= 0.01 and one["elapsed_s"] >= 0.01 for one in result["runs"])
    assert result["verdict"] in ("too short", "unstable")
    assert any(reason.startswith("too short: ") for reason in result["verdict_reasons"])
    assert "1 row of 3 runs: about " in err
