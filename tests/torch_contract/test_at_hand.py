"""What a user meets at a prompt: completion, signatures, tables in a notebook, and one line."""

from __future__ import annotations

import inspect
import io
import logging
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import offload
from gds import MemoryBackend
from tests.stores.small import STORE, make_model, make_optimizer, memory_store, train


def offered(thing: object) -> set[str]:
    """Return the names that a shell completes: it shows underscores to those who type them."""
    names = {name for name in dir(thing) if not name.startswith("__")}
    assert not {name for name in names if name.startswith("_")}
    return names


def test_completion_offers_the_package_and_not_what_it_imports() -> None:
    assert offload.Options().verify  # what is loaded lazily is loaded
    assert offered(offload) == {*offload.__all__}
    assert "__version__" in dir(offload)


def test_completion_offers_what_a_training_loop_calls() -> None:
    with make_optimizer(make_model(), MemoryBackend()) as optimizer:
        names = offered(optimizer)
    assert {"checkpoint", "restore", "step", "zero_grad", "param_groups", "stats", "pin"} <= names
    of_torch = {name for name in dir(torch.optim.Optimizer) if not name.startswith("_")}
    assert of_torch - names == {"OptimizerPostHook", "OptimizerPreHook", "profile_hook_step"}
    assert "__enter__" in dir(optimizer), "programs find out from this what it can do"


def test_completion_offers_what_a_checkpoint_has() -> None:
    with offload.open_checkpoint(STORE, backend=memory_store(1)) as checkpoint:
        names = offered(checkpoint)
        assert all(hasattr(checkpoint, name) for name in names)
    assert {"step", "path", "train_state", "metrics", "verify", "close", "tensors"} <= names
    assert not {"backend", "manifest", "open_slot", "unlocked"} & names


@pytest.mark.parametrize("cls", [offload.AdamW, offload.OffloadedOptimizer], ids=str)
def test_a_signature_shows_no_setting_that_is_a_default(cls: type) -> None:
    assert str(inspect.signature(cls).parameters["options"].default) == "Options()"


def test_settings_show_what_differs_from_the_defaults() -> None:
    given = offload.Options(overlap="forward", host_memory="1GiB", rounding_seed=0)
    assert repr(given) == "Options(host_memory='1GiB', overlap='forward')"
    assert eval(repr(given), vars(offload)) == given


class Table(HTMLParser):
    """The rows of an HTML table, by their first cell."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.feed(source)
        self.title, *cells = self.texts
        self.rows = dict(zip(cells[::2], cells[1::2], strict=True))

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_notebooks_show_small_tables() -> None:
    backend = MemoryBackend()
    with make_optimizer(make_model(), backend, directory="/<b>run") as optimizer:
        train(optimizer, 3, losses={1: 3.0, 2: 2.0, 3: 1.5})
        table = Table(optimizer._repr_html_())
        assert table.title == "AdamW"
        assert table.rows["store"].startswith("/<b>run: step 3, ")
        assert table.rows["checkpoints"] == "2, 3"
        assert table.rows["learning rate"] == "0.001"
        assert "b" not in table.tags, "a path is text"
        stats = Table(optimizer.stats()._repr_html_())
        assert stats.rows["steps"].startswith("3 steps of ")
        assert stats.rows["checkpoints"] == "3 sealed"
    assert Table(optimizer._repr_html_()).rows["store"].endswith("closed")
    with offload.open_checkpoint("/<b>run", backend=backend.reopened()) as checkpoint:
        shown = Table(checkpoint._repr_html_())
    assert shown.title == "Checkpoint of step 3"
    assert shown.rows["path"] == "/<b>run/step-00000003"
    assert shown.rows["metrics"] == "loss=1.5"


def resume(backend: MemoryBackend) -> None:
    with make_optimizer(make_model(), backend) as optimizer:
        assert optimizer.restore() is not None


def test_a_restore_says_on_the_terminal_what_it_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with make_optimizer(make_model(), directory="run") as optimizer:
            optimizer.restore()
            train(optimizer, 2)
    assert capsys.readouterr() == ("", "offload: resumed step 2 from run/step-00000002\n")
    resume(memory_store(2))
    assert capsys.readouterr().err == f"offload: resumed step 2 from {STORE}/step-00000002\n"


def test_a_reference_that_a_process_resumes_from_says_it_as_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Trainers resume with it, and do not call `restore`."""
    backend = MemoryBackend()
    with make_optimizer(make_model(), backend) as optimizer:
        train(optimizer, 2)
        reference = optimizer.state_dict()
        optimizer.load_state_dict(reference)
    assert capsys.readouterr().err == ""
    with make_optimizer(make_model(), backend.reopened()) as optimizer:
        optimizer.load_state_dict(optimizer.state_dict())  # as accelerate's prepare() does
        optimizer.load_state_dict(reference)
        optimizer.load_state_dict(reference)
    assert capsys.readouterr().err == f"offload: resumed step 2 from {STORE}/step-00000002\n"


@pytest.mark.parametrize("how", ["environment", "level", "disabled"])
def test_the_line_can_be_silenced(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("offload")
    backend = memory_store(1)
    if how == "environment":
        monkeypatch.setenv("OFFLOAD_VERBOSITY", "warning")
    elif how == "level":
        logger.setLevel(logging.WARNING)
    else:
        logging.disable(logging.INFO)
    try:
        resume(backend)
    finally:
        logger.setLevel(logging.NOTSET)
        logging.disable(logging.NOTSET)
    assert capsys.readouterr().err == ""


def test_the_line_is_not_said_beside_that_of_the_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    backend = memory_store(1)
    with caplog.at_level(logging.INFO, "offload"):
        resume(backend)
    assert any("restored step 1" in message for message in caplog.messages)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("lost", ["missing", "closed"])
def test_a_restore_goes_on_without_a_terminal(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = memory_store(1)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", None if lost == "missing" else closed)
    resume(backend)
