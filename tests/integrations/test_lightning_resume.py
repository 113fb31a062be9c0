"""Saving, removing and resuming with Lightning's `ModelCheckpoint` and `fit(ckpt_path=...)`."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO

import offload
from offload.errors import NotRestoredError
from offload.integrations.lightning import OffloadCallback
from tests.integrations.lightning_runs import (
    BATCHES,
    MakeOptimizer,
    Model,
    Stop,
    fit,
    in_memory,
    logged,
    on_ssd,
    parameters,
    saving,
)
from tests.numerics.reference import assert_same_parameters

EPOCHS = 3

# Lightning's, where a run goes on in the directory that it has begun in.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    """A run of `EPOCHS` epochs in FP32: where its logs are, and the model."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    return directory, fit(directory, on_ssd(directory / "run"), max_epochs=EPOCHS)


@pytest.fixture(scope="module")
def _stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, stopped in the middle of its last epoch."""
    directory = tmp_path_factory.mktemp("stopped") / "it"
    stop = EPOCHS * BATCHES - 2
    fit(directory, on_ssd(directory / "run"), max_epochs=EPOCHS, stop_after=stop)
    model = Model(in_memory)
    OffloadCallback().setup(pl.Trainer(logger=False, accelerator="cpu"), model, "fit")  # closes it
    return directory


@pytest.fixture
def stopped(_stopped: Path) -> Iterator[Path]:
    """A run that was stopped, in the same directory each time: files know where they are."""
    shutil.copytree(_stopped, _stopped.parent / "before")
    yield _stopped
    OffloadCallback().setup(pl.Trainer(logger=False, accelerator="cpu"), Model(in_memory), "fit")
    shutil.rmtree(_stopped)
    (_stopped.parent / "before").rename(_stopped)


def pins(store: Path) -> dict[int, list[str]]:
    """Return by step the names of the files that pin it."""
    found = offload.list_checkpoints(store)
    return {c.step: sorted(p.split("-")[1] for p in c.pins) for c in found if c.pins}


def files(directory: Path) -> dict[int, list[str]]:
    """Return by the step that they name the files in a directory, as their pins are called."""
    found: dict[int, list[str]] = {}
    for path in directory.glob("*.ckpt"):
        (reference,) = torch.load(path, weights_only=True)["optimizer_states"]
        found.setdefault(reference["step"], []).append(path.name.replace(".", "-").split("=")[0])
    return {step: sorted(n.split("-")[0] for n in names) for step, names in found.items()}


def test_an_interrupted_and_resumed_run_logs_what_an_uninterrupted_one_does(
    stopped: Path, uninterrupted: tuple[Path, Model]
) -> None:
    resumed = fit(
        stopped,
        on_ssd(stopped / "run"),
        ckpt_path=stopped / "files/last.ckpt",
        max_epochs=EPOCHS,
        seed=99,  # the file has the random states
    )
    directory, expected = uninterrupted
    for column, rows in (("train_loss", EPOCHS * BATCHES), ("val_loss", EPOCHS)):
        assert len(logged(directory, column)) == rows
        assert logged(stopped, column) == logged(directory, column)
    assert_same_parameters(parameters(resumed), parameters(expected))


class ResumableLoader:
    """A loader that knows where it is, as Lightning asks for in the middle of an epoch."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        self.batches = torch.randn(BATCHES, 8, 16, generator=random)
        self.position = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        torch.randint(9, ())  # as torch's own does: it draws a seed for its workers
        start, self.position = self.position % BATCHES, self.position % BATCHES
        for batch in self.batches[start:]:
            self.position += 1
            yield [batch, batch.sum(1, keepdim=True)]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


def test_a_run_resumed_in_the_middle_of_an_epoch_logs_the_same(tmp_path: Path) -> None:
    def run(directory: Path, **settings: Any) -> Model:
        every = saving(
            directory / "files", monitor=None, save_top_k=1, save_last=False, every_n_train_steps=3
        )
        make = on_ssd(directory / "run")
        return fit(directory, make, checkpoints=every, train=ResumableLoader(), **settings)

    expected = run(tmp_path / "a", max_epochs=2)
    run(tmp_path / "b", max_epochs=2, stop_after=7)
    (file,) = (tmp_path / "b/files").iterdir()
    assert "step=6" in file.name  # batch 2 of 4 in the second epoch
    resumed = run(tmp_path / "b", max_epochs=2, ckpt_path=file, seed=99)
    assert len(logged(tmp_path / "a")) == 2 * BATCHES
    assert logged(tmp_path / "b") == logged(tmp_path / "a")
    assert_same_parameters(parameters(resumed), parameters(expected))


def test_each_file_is_pinned_as_long_as_lightning_keeps_it(tmp_path: Path) -> None:
    scores = [4.0, 1.0, 3.0, 2.0, 5.0]

    class Scripted(Model):
        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.log("score", scores[self.current_epoch])

    seen: dict[int, tuple[Any, Any]] = {}

    class Watch(pl.callbacks.Checkpoint):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen[trainer.current_epoch] = (pins(tmp_path / "run"), files(tmp_path / "a/files"))

    chosen = saving(tmp_path / "a/files", monitor="score")
    kept = on_ssd(tmp_path / "run", keep=1)
    fit(
        tmp_path / "a", kept, model_class=Scripted, max_epochs=5, checkpoints=chosen,
        extra=[Watch()],
    )  # fmt: skip
    steps = [sorted(pinned) for pinned, _ in seen.values()]
    assert steps == [[4], [4, 8], [8, 12], [8, 16], [8, 16]]
    for pinned, named in seen.values():
        assert pinned == named
    metrics = {c.step: dict(c.metrics) for c in offload.list_checkpoints(tmp_path / "run")}
    assert metrics == {8: {"score": 1.0}, 16: {"score": 2.0}}
    chosen = saving(tmp_path / "b/files", save_weights_only=True)
    fit(tmp_path / "b", on_ssd(tmp_path / "other"), max_epochs=1, checkpoints=chosen)
    assert (tmp_path / "b/files/last.ckpt").exists()
    assert offload.list_checkpoints(tmp_path / "other") == []  # for parameters only


def test_a_fit_that_would_lose_checkpoints_or_their_place_is_refused(stopped: Path) -> None:
    older = stopped / "files/epoch=0-step=4.ckpt"
    before = pins(stopped / "run")
    with pytest.raises(
        NotRestoredError, match=r"pass ckpt_path=.* to Trainer\.fit\(\) to continue"
    ):
        fit(stopped, on_ssd(stopped / "run"))
    with pytest.raises(offload.OffloadError, match=r"last\.ckpt: .*directory= must name"):
        fit(stopped, on_ssd(stopped / "other"), ckpt_path=stopped / "files/last.ckpt")
    with pytest.raises(offload.OffloadError) as refused:
        fit(stopped, on_ssd(stopped / "run"), ckpt_path=older, max_epochs=EPOCHS)
    assert str(older) in str(refused.value)
    assert "step-00000008, named by" in str(refused.value)
    assert "OffloadCallback(discard_newer=True)" in str(refused.value)
    assert pins(stopped / "run") == before == {4: ["epoch"], 8: ["epoch", "last"]}


def test_what_somebody_else_has_pinned_or_sealed_is_not_given_up(stopped: Path) -> None:
    older = stopped / "files/epoch=0-step=4.ckpt"
    for name in ("last", "epoch=1-step=8"):
        (stopped / f"files/{name}.ckpt").unlink()
    offload.pin(stopped / "run/step-00000008", "mine")
    with pytest.raises(offload.OffloadError, match="step-00000008, pinned as 'mine'"):
        fit(stopped, on_ssd(stopped / "run"), ckpt_path=older, max_epochs=EPOCHS)
    told = OffloadCallback(discard_newer=True)
    with pytest.raises(offload.OffloadError, match="pinned as 'mine', and going back to step 4"):
        fit(stopped, on_ssd(stopped / "run"), ckpt_path=older, callback=told)


def test_a_file_is_written_when_what_it_names_is_sealed_and_removed_when_the_next_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    synced = os.fsync

    class Watched(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, *args: Any, **kwargs: Any) -> None:
            (reference,) = checkpoint["optimizer_states"]
            newest = offload.list_checkpoints(tmp_path / "run")[-1]
            named = (reference["step"], reference["generation"], reference["sealed"])
            assert (newest.step, newest.generation, newest.valid) == named
            super().save_checkpoint(checkpoint, path, *args, **kwargs)
            events.append(("written", str(path)))

        def remove_checkpoint(self, path: Any) -> None:
            events.append(("removed", str(path)))
            super().remove_checkpoint(path)

    def watch(descriptor: int) -> None:
        synced(descriptor)
        events.append(("synced", os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", watch)
    chosen = saving(tmp_path / "files", save_top_k=1, monitor=None, save_last=False)
    fit(
        tmp_path, on_ssd(tmp_path / "run"), max_epochs=2, checkpoints=chosen, plugins=[Watched()]
    )  # fmt: skip
    directory = str(tmp_path / "files")
    first, second = f"{directory}/epoch=0-step=4.ckpt", f"{directory}/epoch=1-step=8.ckpt"
    assert [e for e in events if e[1].startswith(directory)] == [
        ("written", first), ("synced", first), ("synced", directory),
        ("written", second), ("synced", second), ("synced", directory),
        ("removed", first),
    ]  # fmt: skip


class FailsToWrite(TorchCheckpointIO):
    """A machine that stops when the state is sealed and its file is not written yet."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.writes = writes

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if not self.writes:
            raise Stop
        self.writes -= 1
        super().save_checkpoint(*args, **kwargs)


def test_a_checkpoint_whose_file_was_never_written_is_given_up(
    tmp_path: Path, uninterrupted: tuple[Path, Model]
) -> None:
    run = tmp_path / "run"
    fit(tmp_path, on_ssd(run), plugins=[FailsToWrite(0)], stop_after=99)
    assert [(c.step, c.pins) for c in offload.list_checkpoints(run)] == [(4, ())]
    with pytest.raises(offload.OffloadError, match="fresh=True"):
        fit(tmp_path, on_ssd(run))
    fit(tmp_path, on_ssd(run, fresh=True), plugins=[FailsToWrite(2)], stop_after=99)
    assert [c.step for c in offload.list_checkpoints(run)] == [4, 8]
    assert files(tmp_path / "files") == {4: ["epoch", "last"]}
    last = tmp_path / "files/last.ckpt"
    resumed = fit(tmp_path, on_ssd(run), ckpt_path=last, max_epochs=EPOCHS)
    directory, expected = uninterrupted
    assert logged(tmp_path) == logged(directory)
    assert_same_parameters(parameters(resumed), parameters(expected))
    assert pins(run) == files(tmp_path / "files")


def test_what_was_sealed_for_the_same_step_by_hand_keeps_its_train_state(tmp_path: Path) -> None:
    class Sealing(Model):
        train_state: ClassVar[Any] = {"mine": 1}

        def on_train_batch_end(self, *_: object) -> None:
            self.optimizers().checkpoint(self.train_state)

    class Listing(Sealing):
        train_state: ClassVar[Any] = [1]

    make = on_ssd(tmp_path / "run")
    fit(tmp_path, make, model_class=Sealing, max_epochs=1)
    with offload.open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.step == 4
        state = checkpoint.train_state
    files = [str(tmp_path / f"files/{name}.ckpt") for name in ("epoch=0-step=4", "last")]
    assert state["mine"] == 1
    assert sorted(state["lightning_files"]["folders"]) == files
    last = tmp_path / "files/last.ckpt"
    with pytest.raises(offload.OffloadError, match="whose train state is a list"):
        fit(tmp_path, make, model_class=Listing, ckpt_path=last, max_epochs=2)


def test_pins_are_made_and_removed_by_the_next_fit(stopped: Path) -> None:
    """The process was killed before it made them; or a person has removed a file."""
    for info in offload.list_checkpoints(stopped / "run"):
        for name in info.pins:
            offload.unpin(stopped / "run", name)
            if name.startswith("lightning-last"):  # and another had not moved
                offload.pin(stopped / "run/step-00000004", name)
    assert pins(stopped / "run") == {4: ["last"]}
    last = stopped / "files/last.ckpt"
    fit(stopped, on_ssd(stopped / "run"), ckpt_path=last, stop_after=9)
    assert pins(stopped / "run") == {4: ["epoch"], 8: ["epoch", "last"]} == files(stopped / "files")
    (stopped / "files/epoch=0-step=4.ckpt").unlink()
    fit(stopped, on_ssd(stopped / "run"), ckpt_path=last, stop_after=9)
    assert pins(stopped / "run") == {8: ["epoch", "last"]}


def test_a_ckpt_that_was_written_without_the_callback_is_refused_with_the_remedy(
    tmp_path: Path,
) -> None:
    chosen = saving(tmp_path / "files")
    arguments: Any = {"max_epochs": 1, "callback": pl.Callback(), "checkpoints": chosen}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = fit(tmp_path, on_ssd(tmp_path / "run"), **arguments)
    (said,) = (str(each.message) for each in warned if "cannot be resumed" in str(each.message))
    assert re.search(r"^the \.ckpt files of this Trainer .*OffloadCallback\(\)", said)
    model.trainer.optimizers[0].close()  # type: ignore[attr-defined]
    with pytest.raises(
        offload.OffloadError, match=r"last\.ckpt .* had no OffloadCallback.*restore"
    ):
        fit(tmp_path, on_ssd(tmp_path / "run"), ckpt_path=tmp_path / "files/last.ckpt")


def test_a_ckpt_of_torchs_own_optimizer_continues_on_ssd(tmp_path: Path) -> None:
    fit(tmp_path / "a", in_memory, max_epochs=2, stop_after=6)
    start = shutil.copy(tmp_path / "a/files/last.ckpt", tmp_path / "start.ckpt")

    def resume(directory: Path, make: MakeOptimizer) -> Model:
        chosen = saving(tmp_path / "a/files")
        return fit(directory, make, ckpt_path=start, max_epochs=2, checkpoints=chosen)

    torchs = resume(tmp_path / "b", in_memory)
    ours = resume(tmp_path / "c", on_ssd(tmp_path / "run"))
    assert len(logged(tmp_path / "b")) == BATCHES
    assert logged(tmp_path / "c") == logged(tmp_path / "b")
    assert_same_parameters(parameters(ours), parameters(torchs))
