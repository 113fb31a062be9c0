"""`offload ls` on terminals of different widths: one line for each checkpoint, whatever it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import offload
from offload.cli.listing import fit_notes
from tests.command_line import Run
from tests.stores.small import make_model, make_optimizer, train

EVALUATED = {
    "eval_loss": 3.92308,
    "eval_accuracy": 0.25,
    "eval_f1": 0.125,
    "eval_runtime": 0.7023,
    "eval_samples_per_second": 91.133,
    "eval_steps_per_second": 5.696,
    "epoch": 0.24,
}
"""Metrics as versions before this one took them from the Trainer."""

LIGHTNING = "lightning-epoch-2-step-30-8887fbe20f"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with checkpoints of both libraries, one without notes, and a damaged one."""
    store = tmp_path_factory.mktemp("trained") / "store"
    with make_optimizer(make_model(), directory=store, keep=9) as optimizer:
        for pin, metrics in (
            ("transformers-1", EVALUATED),
            (LIGHTNING, {"val_loss": 1.2345}),
            (None, None),
            ("best", {"loss": 2.0}),
        ):
            train(optimizer, 1)
            sealed = optimizer.checkpoint(metrics=metrics).result()
            if pin is not None:
                optimizer.pin(pin, sealed)
    (store / "step-00000004/master.safetensors").unlink()
    return store


def screen(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int, *options: str | Path) -> dict:
    """Return the line of each checkpoint by its name, after checking that it has only one."""
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run("ls", *options)
    header, rule, *table = out.splitlines()[:6]
    assert (code, header.split()[0], set(rule)) == (0, "checkpoint", {"─"})
    assert [line[:13] for line in table] == [f"step-{n:08}" for n in (1, 2, 3, 4)]
    return {line[:13]: line.rstrip() for line in (header, *table)}


def notes(lines: dict[str, str]) -> list[str]:
    """Return what the last column says of each checkpoint."""
    header, *table = lines.values()
    at = header.index("pins, metrics")
    return [line[at:] for line in table]


def test_screens_of_80_and_120_columns_have_the_same_lines_but_for_the_notes(
    run: Run, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = screen(run, monkeypatch, 80, trained)
    middle = screen(run, monkeypatch, 120, trained)
    wide = screen(run, monkeypatch, 80, trained, "--wide")
    assert max(map(len, narrow.values())) <= 80
    assert 80 < max(map(len, middle.values())) <= 120
    at = narrow["checkpoint   "].index("pins, metrics")
    for name, line in narrow.items():
        assert line[:at].rstrip() == middle[name][:at].rstrip() == wide[name][:at].rstrip()
    assert notes(narrow) == [
        "tr…-1, eval_loss=3.923 +6",
        "ligh…e20f, val_loss=1.234",
        "",
        "best",
    ]
    assert notes(middle) == [
        "transformers-1, eval_loss=3.923, eval_accuracy=0.25 +5",
        f"{LIGHTNING}, val_loss=1.2345",
        "",
        "best",
    ]
    assert notes(wide)[0] == (
        "transformers-1, eval_loss=3.92308, eval_accuracy=0.25, eval_f1=0.125, eval_runtime=0.7023,"
        " eval_samples_per_second=91.133, eval_steps_per_second=5.696, epoch=0.24"
    )
    assert notes(wide)[1:] == notes(middle)[1:]


@pytest.mark.parametrize("columns", range(54, 200, 7))
def test_each_checkpoint_has_one_line_at_any_width(
    run: Run, trained: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    lines = screen(run, monkeypatch, columns, trained)
    assert max(map(len, lines.values())) <= columns


def test_the_metric_of_the_model_is_shown_before_those_of_the_run() -> None:
    metrics = {"epoch": 2.0, "eval_runtime": 0.5, "eval_loss": 1.5}
    assert fit_notes([], metrics, 20) == "eval_loss=1.5 +2"
    assert fit_notes(["best"], metrics, 19) == "best +3"
    assert fit_notes(["best"], metrics, 22) == "best, eval_loss=1.5 +2"
    assert fit_notes(["best"], metrics, 80) == "best, epoch=2, eval_runtime=0.5, eval_loss=1.5"


def test_names_of_pins_are_cut_in_the_middle() -> None:
    assert fit_notes(["before-the-long-night-run"], {}, 24) == "before-the-…ng-night-run"
    assert fit_notes(["before-the-long-night-run"], {"loss": 1.0}, 20) == "befor…ht-run, loss=1"
    assert fit_notes(["before-the-long-night-run"], {"loss": 1.0}, 12) == "befo…-run +1"
    assert fit_notes(["a", "b"], {}, 4) == "a, b"
    assert fit_notes([], {}, 4) == ""
    assert fit_notes([], {"a_long_name_of_a_metric": 1.0}, 10) == "a_lo…ric=1"


def test_what_the_table_leaves_out_is_in_its_json(run: Run, trained: Path) -> None:
    first = json.loads(run("ls", trained, "--json")[1])[0]
    assert (first["pins"], first["metrics"]) == (["transformers-1"], EVALUATED)
    assert offload.list_checkpoints(trained)[0].metrics == EVALUATED
