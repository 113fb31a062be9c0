"""`offload push`, `pull`, and `ls`, `verify` and `prune` with the URL of a tier."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from offload.tiers.services.opening import open_objects
from tests.command_line import Run
from tests.stores.files import steps


def test_a_checkpoint_goes_and_comes_back(
    run: Run, store: Path, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)  # which a folder does not need
    status, _, err = run("push", store, "s3://bucket/run")
    assert (status, "or pip install obstore" in err) == (1, True)
    tier = folder
    status, out, _ = run("push", store, tier)
    assert status == 0
    assert "step 3, 6 objects sent with" in out
    status, out, _ = run("push", store, tier)
    assert (status, "has a complete copy of step 3 already" in out) == (0, True)
    status, out, _ = run("ls", tier)
    assert (status, "step 3" in out, "complete" in out) == (0, True, True)
    status, out, _ = run("verify", tier)
    assert (status, "step 3: ok" in out) == (0, True)
    status, out, _ = run("pull", tier, tmp_path / "back")
    assert (status, "step-00000003: fetched" in out) == (0, True)
    assert steps(tmp_path / "back") == [3]
    assert run("verify", tmp_path / "back")[0] == 0
    status, out, _ = run("pull", tier, tmp_path / "back")
    assert (status, "is there already" in out) == (0, True)


def test_json_for_scripts(run: Run, store: Path, s3: str, tmp_path: Path) -> None:
    pushed = json.loads(run("push", store / "step-00000002", s3, "--json")[1])
    assert (pushed["step"], pushed["num_sent"]) == (2, 6)
    (listed,) = json.loads(run("ls", s3, "--json")[1])
    assert (listed["url"], listed["complete"]) == (pushed["url"], True)
    assert listed["metrics"] == {"loss": 1.0}
    verified = json.loads(run("verify", s3, "--json")[1])
    assert (verified["ok"], verified["copies"][0]["problems"]) == (True, [])
    pulled = json.loads(run("pull", listed["url"], tmp_path / "back", "--json")[1])
    assert pulled["path"] == str(tmp_path / "back" / "step-00000002")
    for number in (1, 3):
        run("push", store / f"step-0000000{number}", s3)
    pruned = json.loads(run("prune", s3, "--keep", "1", "--best", "loss", "--json")[1])
    assert [copy["step"] for copy in pruned["kept"]] == [2, 3]


def test_damage_and_unfinished_copies_are_shown(run: Run, store: Path, s3: str) -> None:
    run("push", store / "step-00000002", s3)
    run("push", store / "step-00000003", s3)
    with open_objects(s3) as objects:
        names = [*objects.sizes_below("")]
        (damaged, _) = sorted(name for name in names if name.endswith("state/exp_avg.000000"))
        objects.put(damaged, bytes(objects.size(damaged) or 0))
        (_, marker) = sorted(name for name in names if name.endswith("COMPLETE.json"))
        objects.delete([marker])
    status, out, _ = run("verify", s3)
    assert status == 1
    assert "damaged" in out
    assert "state/exp_avg.000000: bytes" in out
    out = run("ls", s3)[1]
    assert "not complete: its upload has not ended, or was interrupted" in out
    out = run("prune", s3, "--keep", "1")[1]
    assert "left alone" in out
    assert "removed" in run("prune", s3, "--keep", "1", "--unfinished")[1]
    assert len(json.loads(run("ls", s3, "--json")[1])) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["ls", "s3://no-such-bucket/run"], 1, "bucket does not exist"),
        (["verify", "s3://bucket/none"], 1, "no complete copy"),
        (["verify", "s3://bucket/none", "--quarantine"], 2, "a tier has no --all"),
        (["prune", "store", "--unfinished"], 2, "--unfinished is for tiers"),
        (["push", "none", "s3://bucket/none"], 1, "no checkpoint or store here"),
    ],
)
def test_errors_are_one_line(
    run: Run, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], status: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    found, _, err = run(*arguments)
    assert found == status
    assert said in " ".join(err.replace("│", " ").split())
    assert not [*tmp_path.iterdir()]
