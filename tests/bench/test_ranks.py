"""Measurements and campaigns of several ranks run, and notice what they are there to notice."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import (
    _performance_page,
    _ranks_tables,
    ranks_agreement,
    ranks_bytes,
    ranks_campaign,
    ranks_step,
    report,
)
from bench._harness import BenchError
from bench._ranks_files import compare_files
from bench._ranks_jobs import KilledJobs
from tests.bench.test_bench import Measured, check, drive, measured  # noqa: F401  (fixtures)
from tests.limits import AGREEMENT_S
from tests.ranks_training.rank_server import Jobs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    server = Jobs()
    yield server
    server.close()


def test_step(measured: Measured) -> None:  # noqa: F811
    found = measured(ranks_step.main, "--kinds", "ddp")
    check(found, rounds=3, claims=3)
    assert [claim["limit"] for claim in found["claims"]] == [1.15, None, None]
    assert found["facts"]["state_bytes"] == 12 << 16
    with pytest.raises(BenchError, match="at least 2 ranks"):
        ranks_step.main(["--quick", "--ranks", "1"])


def test_bytes(measured: Measured) -> None:  # noqa: F811
    found = measured(ranks_bytes.main, "--kinds", "ddp,mixed")
    check(found, rounds=3, claims=10)
    for kind, state_bytes, model_bytes in (("ddp", 12, 2), ("mixed", 8, 4)):
        samples = {key: min(values) / (1 << 20) for key, values in found["samples"].items()}
        assert samples[f"{kind}_step_read_bytes"] == state_bytes / 2
        assert samples[f"{kind}_step_written_bytes"] == pytest.approx(state_bytes / 2, rel=0.01)
        assert samples[f"{kind}_seal_written_bytes"] >= model_bytes
        assert samples[f"{kind}_restore_read_bytes"] == pytest.approx(model_bytes, rel=0.01)
        assert found["facts"][f"{kind}_large_ring_bytes"] > 0


def test_agreement(measured: Measured) -> None:  # noqa: F811
    found = measured(ranks_agreement.main)
    check(found, rounds=3, claims=1)
    samples = found["samples"]
    for total, durable, left in zip(
        samples["decided_s"], samples["durable_s"], samples["agreement_s"], strict=True
    ):
        assert left == pytest.approx(total - durable)
        assert left > 0
        assert durable > 0


@pytest.mark.parametrize(
    ("part", "what", "least"),
    [
        ("steps", "bits compared", 1),
        ("elastic", "bits compared", 13),
        ("stopped", "others: InDoubtError", 4),
        ("files", "files compared", 2),
    ],
)
def test_campaign_of_kills(measured: Measured, part: str, what: str, least: int) -> None:  # noqa: F811
    assert campaign(measured, part)[f"{part}: {what}"] >= least


def campaign(measured: Measured, part: str) -> dict[str, Any]:  # noqa: F811
    """Run a part of the campaign, small, and look at the page that shows it; return its facts."""
    found = measured(ranks_campaign.main, "--parts", part)
    facts: dict[str, Any] = found["facts"]
    assert facts[f"{part}: problems"] == []
    text = _ranks_tables.campaign([(found, "[x](y)")])
    assert ("0 differ ([x](y))" if part == "files" else "| 0 | 0 | [x](y) |") in text
    return facts


def test_a_campaign_notices_what_is_lost_and_what_differs(jobs: Jobs, tmp_path: Path) -> None:
    killed = KilledJobs(jobs, tmp_path / "all", "fsdp2", 2, 6, AGREEMENT_S)
    folder = tmp_path / "lost"
    shutil.copytree(tmp_path / "all/prepared/run", folder / "run")
    shutil.rmtree(folder / "run/step-00000003")
    killed._bits[1][4] = "others"
    killed.restart(folder, 3, [], "removed")
    assert dict(killed.tally.counts) == {
        "restarts": 1,
        "resumed": 1,
        "bits compared": 6,
        "checkpoints verified": 2,
        "lost": 1,
        "other bits": 1,
    }
    assert killed.tally.problems == [
        "lost: removed: step 3 was durable, not [2, 2]",
        "other bits: removed: rank 1 at step 4",
    ]


def test_model_files_have_the_bytes_that_the_library_writes(jobs: Jobs, tmp_path: Path) -> None:
    """Rows of 2 to 4,094 bytes on three ranks; the campaign has many more."""
    counts, problems = compare_files(jobs, tmp_path, "fsdp2", 6, 1)
    assert problems == []
    assert (counts["models"], counts["files compared"]) == (2, 6)


def test_the_page_of_all_ratios_has_the_recorded_figures() -> None:
    folder = ROOT / "bench" / "results"
    losses = ROOT / "docs" / "figures" / "performance-finetune.svg"
    page = report.render_tables(report.read_results(str(folder)), folder, losses)
    for part in ("| 2 ranks, FSDP2 |", "The median agreement took", "| fault | trials |"):
        assert part in page
    assert page == (folder / "README.md").read_text(), "python -m bench.report"


def test_the_page_on_performance_has_the_recorded_times(tmp_path: Path) -> None:
    docs, runs = ROOT / "docs", report.read_results(str(ROOT / "bench" / "results"))
    figures = tmp_path / "docs" / "figures"
    figures.mkdir(parents=True)
    _performance_page.render(runs, docs, figures)
    drawn = sorted(path.name for path in figures.iterdir())
    assert drawn == [f"performance-{number}.svg" for number in range(1, 6)]
    text = (docs / "performance.md").read_text()
    for name in drawn:
        assert (figures / name).read_text() == (docs / "figures" / name).read_text(), name
        assert f"(figures/{name})" in text
    (losses,) = [one["facts"] for one in runs if one["bench"] == "finetune"]
    for name, most in (("split-int8", 0.003), ("int8", 0.003), ("fp32-rate-x1.1", 0.065)):
        assert losses[f"{name}_largest_difference"] <= most
        assert f"{most:.3f}" in text
