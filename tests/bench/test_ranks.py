"""Measurements and campaigns of several ranks run, and notice what they are there to notice."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import _ranks_page, ranks_agreement, ranks_bytes, ranks_campaign, ranks_step, report
from bench._harness import BenchError
from bench._ranks_files import compare_files
from bench._ranks_jobs import KilledJobs
from bench._ranks_model import predicted, rates_for
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


def test_only_what_is_between_the_last_report_and_the_last_handle_counts() -> None:
    ranks: list[dict[str, Any]] = [
        {"reported": [10.0], "ended": 20.0, "durable": [(8.0, 11.0), (13.0, 15.0), (19.0, 30.0)]},
        {"reported": [12.0], "ended": 21.0, "durable": [(12.0, 21.0)]},
    ]
    found = ranks_agreement.agreement(ranks)
    assert found == {"agreement_s": 5.0, "decided_s": 9.0, "durable_s": 4.0}


@pytest.mark.parametrize("part", ["steps", "random", "reshape"])
def test_campaign_of_kills(measured: Measured, part: str) -> None:  # noqa: F811
    facts = campaign(measured, part)
    assert facts[f"{part}: trials"] >= {"steps": 6, "random": 2, "reshape": 12}[part]
    assert facts[f"{part}: restarts"] >= 2
    assert facts[f"{part}: bits compared"] > 0


def test_campaign_of_an_elastic_run(measured: Measured) -> None:  # noqa: F811
    facts = campaign(measured, "elastic")
    assert facts["elastic: trials"] == 1
    assert facts["elastic: bits compared"] > 12


def test_campaign_of_stopped_writers(measured: Measured) -> None:  # noqa: F811
    assert campaign(measured, "stopped")["stopped: others: InDoubtError"] >= 4


def test_campaign_of_model_files(measured: Measured) -> None:  # noqa: F811
    facts = campaign(measured, "files")
    assert facts["files: files compared"] == facts["files: seals"] == 2


def campaign(measured: Measured, part: str) -> dict[str, Any]:  # noqa: F811
    """Run a part of the campaign, small, and look at the page that shows it; return its facts."""
    found = measured(ranks_campaign.main, "--parts", part)
    facts: dict[str, Any] = found["facts"]
    assert facts[f"{part}: problems"] == []
    text = _ranks_page.campaign([(found, "[x](y)")])
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


def test_the_model_of_many_ranks_divides_the_rates_of_one_process() -> None:
    rates = {f"drive_{name}_gbps": 2.0 for name in ("read", "write", "mixed")}
    rates |= {"update_gbps": 20.0, "copy_gbps": 4.0, "sync_s": 1e-4}
    found = [predicted(rates, 1 << 26, 16 << 20, ranks, 2) for ranks in (1, 2, 4)]
    assert [times.step for times in found] == pytest.approx([24 * (1 << 26) / 2e9] * 3)
    assert found[0].seal == pytest.approx(found[1].seal)
    assert found[1].seal < found[2].seal < 1.1 * found[1].seal, "four ranks copy on two cores"
    assert len({times.restore for times in found}) == 1
    assert found[0].restore > 2 * (1 << 26) / 2e9


def test_predictions_have_the_rates_of_the_same_machine() -> None:
    runs = report.read_results(str(ROOT / "bench" / "results"))
    for one in runs:
        if one["bench"] == "ranks_step":
            sizing = rates_for(one, runs)
            assert sizing is not None
            assert sizing["machine"]["cpu"] == one["machine"]["cpu"]
            other = {**one, "machine": {**one["machine"], "cores": 128}}
            assert rates_for(other, runs) is None


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_model_files_have_the_bytes_that_the_library_writes(
    jobs: Jobs, tmp_path: Path, kind: str
) -> None:
    """Rows of 2 to 4,094 bytes on three ranks; the campaign has many more."""
    counts, problems = compare_files(jobs, tmp_path, kind, 6, 1)
    assert problems == []
    assert (counts["models"], counts["files compared"]) == (2, 6)


def test_the_page_about_ranks_has_the_recorded_figures() -> None:
    path = ROOT / "docs" / "ranks.md"
    runs = report.read_results(str(ROOT / "bench" / "results"))
    drawn = _ranks_page.redraw(path.read_text(), runs, path.parent)
    assert drawn == path.read_text(), "python -m bench.report"
