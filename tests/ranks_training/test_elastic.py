"""torchrun restarts the elastic example by itself: the end has the bits of a run without restarts.

The campaign `bench/ranks_campaign.py --parts elastic` has more kills.
"""

from __future__ import annotations

from pathlib import Path

from bench._elastic_job import ElasticJob, contents
from bench._ranks_elastic import kill_elastic


def test_an_elastic_run_whose_ranks_are_killed_has_the_bits_of_one_without(tmp_path: Path) -> None:
    tally = kill_elastic(tmp_path / "all", 2, seed=5)
    assert tally.problems == []
    assert tally.counts["trials"] == 2
    assert tally.counts["resumed"] > 0
    assert tally.counts["bits compared"] > 12


def test_a_run_goes_on_with_the_nodes_that_are_left(tmp_path: Path) -> None:
    """Two nodes see the same files; one of them is lost, and the other trains on with half."""
    steps = 200
    job = ElasticJob(tmp_path / "run", steps=steps, every=3, ranks=1, nodes=2, lost_after_s=5.0)
    try:
        assert job.until(lambda line: line.startswith("starting 2 ranks")), job.errors()
        assert job.until(lambda line: line.startswith("step 7 ")), job.errors()
        newest = job.newest()
        job.lose_node(1)
        assert job.until(lambda line: line.startswith("starting 1 ranks")), job.errors()
        assert 0 in job.wait(), job.errors()
    finally:
        job.close()
    _, num_ranks, continued = job.starts()[-1]
    assert num_ranks == 1
    assert continued is not None
    assert continued >= newest
    assert job.newest() == steps
    values, problems = contents(tmp_path / "run")
    assert problems == []
    assert len(values) > 12
