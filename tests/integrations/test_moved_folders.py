"""Pins follow what folders refer to now: overwritten, moved, copied, unreadable, not mounted."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

import offload
import offload.tiers
from offload.errors import MismatchError, PinError
from offload.integrations.accelerate import follow
from offload.integrations.lightning import OffloadCallback
from offload.integrations.transformers import latest_checkpoint
from tests.integrations import lightning_runs
from tests.integrations.training import Case


@pytest.fixture(autouse=True)
def accelerator_of_its_own() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    OffloadCallback().setup(
        lightning_runs.pl.Trainer(logger=False, accelerator="cpu"),
        lightning_runs.Model(lightning_runs.in_memory),
        "fit",
    )  # closes what fits have left open


def pinned(store: Path, library: str) -> list[int]:
    """Return the steps that a library pins; all other pins are none of its own."""
    infos = offload.list_checkpoints(store)
    return [info.step for info in infos if any(name.startswith(library) for name in info.pins)]


class Run:
    """A loop that saves with accelerate, in a process of its own as far as the library knows."""

    def __init__(self, root: Path, load: str = "", *, store: str = "store") -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.root, self.store = root, root / store
        self.accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(4, 4)
        options = offload.Options(chunk_bytes=4096)
        optimizer = offload.AdamW(
            model.parameters(), directory=self.store, model=model, keep=1, options=options
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        follow(self.accelerator, self.optimizer)
        if load:
            self.accelerator.load_state(str(root / load))

    def save(self, *names: str) -> Run:
        """Take a step before each save."""
        for name in names:
            self.accelerator.backward(self.model(torch.ones(1, 4)).sum())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.accelerator.save_state(str(self.root / name))
        return self

    def close(self) -> list[int]:
        """Return the steps that are pinned at the end."""
        self.optimizer.optimizer.close()
        return pinned(self.store, "accelerate")


def test_a_folder_that_is_written_again_and_again_pins_one_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offload")
    run = Run(tmp_path).save(*["out/last"] * 6)
    slots = [p.name for p in run.store.iterdir() if p.name.startswith((".slot", "step"))]
    assert len(slots) <= 3, "the newest, the one before, and one for the next step"
    assert run.close() == [6]
    said = [r.getMessage() for r in caplog.records if "no longer pinned" in r.getMessage()]
    assert len(said) == 5
    assert "step-00000005 is no longer pinned as accelerate-5" in said[-1]
    assert "out/last refers to something else now" in said[-1]
    assert Run(tmp_path, "out/last").save("out/last").close() == [7]


def test_a_folder_is_not_given_up_for_another_one_of_the_same_step(tmp_path: Path) -> None:
    run = Run(tmp_path).save("out/a")
    run.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(PinError, match=r"out/b cannot be saved: .*out/a refers to step 1"):
        run.accelerator.save_state(str(tmp_path / "out/b"))
    run.accelerator.save_state(str(tmp_path / "out/a"))  # the same folder may be written anew
    assert run.close() == [1]
    Run(tmp_path, "out/a").close()


def loop(path: Path) -> None:
    """Make a path that cannot be read, for any user; the error is ELOOP."""
    path.rename(path.with_name(f"{path.name}-away"))
    path.symlink_to(path)


def unmount(path: Path) -> None:
    """Put an empty directory where the drive was."""
    path.rename(path.with_name(f"{path.name}-away"))
    path.mkdir()


def dangle(path: Path) -> None:
    """Make a symbolic link to a drive that is not there."""
    path.rename(path.with_name(f"{path.name}-away"))
    path.symlink_to(path.with_name("drive"))


@pytest.mark.parametrize(
    ("lose", "what", "when"),
    [
        (loop, "out/a/optimizer.bin", "between two runs"),
        (dangle, "out", "while it runs"),
        (unmount, "out", "between two runs"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_folder_that_may_come_back_keeps_its_checkpoint(
    lose: Callable[[Path], None],
    what: str,
    when: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(tmp_path).save("out/a", "elsewhere/b")
    if when == "between two runs":
        assert run.close() == [1, 2]
    lose(tmp_path / what)
    if when == "between two runs":
        run = Run(tmp_path, "elsewhere/b")
    assert run.save("elsewhere/b", "elsewhere/b").close() == [1, 4]
    (said,) = [r.getMessage() for r in caplog.records if "stays pinned" in r.getMessage()]
    assert "pinned as accelerate-1" in said
    assert f"offload unpin {run.store} accelerate-1" in said


def copied(a: Path, b: Path) -> None:
    shutil.copytree(a, b, symlinks=True)


def renamed(a: Path, b: Path) -> None:
    a.rename(b)


def behind_a_link(a: Path, b: Path) -> None:
    """The run is in the same place, which has another name."""
    a.rename(a.with_name("drive"))
    b.symlink_to(a.with_name("drive"))


def pulled(a: Path, b: Path) -> None:
    offload.tiers.push(a / "store", f"file://{b.parent}/tier")
    b.mkdir()
    offload.tiers.pull(f"file://{b.parent}/tier", b / "store")
    shutil.copytree(a / "out", b / "out")


MOVES = [renamed, behind_a_link, copied, pulled]


@pytest.mark.parametrize("move", MOVES)
def test_folders_and_store_that_moved_together_stay_together(
    move: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert Run(a).save("out/a", "out/b").close() == [1, 2]
    move(a, b)
    before = [1] if move is not pulled else []  # only the newest has come
    run = Run(b, "out/b").save("out/c")
    assert pinned(run.store, "accelerate") == [*before, 2, 3]
    shutil.rmtree(b / "out/a")
    assert run.save("out/b").close() == [3, 4]
    # Between two runs as well, and of folders from both places.
    shutil.rmtree(b / "out/c")
    assert Run(b, "out/b").save("out/d").close() == [4, 5]
    if move is copied:  # and the original is unaffected by its copy
        assert Run(a, "out/b").save("out/c").close() == [1, 2, 3]


def test_only_the_store_has_moved(tmp_path: Path) -> None:
    Run(tmp_path).save("out/a", "out/b").close()
    (tmp_path / "deeper").mkdir()
    (tmp_path / "store").rename(tmp_path / "deeper/store")
    run = Run(tmp_path, "out/b", store="deeper/store").save("out/c")
    assert pinned(run.store, "accelerate") == [1, 2, 3]
    shutil.rmtree(tmp_path / "out/a")
    assert run.save("out/c").close() == [2, 4]


def train(root: Path, steps: int, resume: Path | str | None = None) -> list[int]:
    """Train with the Trainer, which keeps two folders of its own."""
    case = Case({"max_steps": steps, "save_steps": 2, "save_total_limit": 2})
    case.run(
        root, resume=str(resume or latest_checkpoint(root / "out", root / "run") or "") or None
    )
    return pinned(root / "run", "transformers")


@pytest.mark.parametrize(("step", "to"), [(4, "out/kept/best"), (2, "kept/checkpoint")])
def test_a_folder_that_the_user_moves_keeps_its_checkpoint(
    step: int, to: str, tmp_path: Path
) -> None:
    train(tmp_path, 4)
    (tmp_path / to).parent.mkdir(exist_ok=True)
    (tmp_path / f"out/checkpoint-{step}").rename(tmp_path / to)
    if step == 4:
        with pytest.raises(MismatchError, match=f"step-00000004, which {tmp_path / to} refers to"):
            train(tmp_path, 8)
        assert train(tmp_path, 8, tmp_path / to) == [4, 6, 8]
    else:
        assert train(tmp_path, 8) == [2, 6, 8]
    shutil.rmtree(tmp_path / to)
    assert train(tmp_path, 10) == [8, 10]


@pytest.mark.parametrize("step", [2, 4], ids=["older", "newest"])
def test_a_folder_that_is_gone_since_the_last_run_is_not_given_up_in_silence(
    step: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 4)
    (tmp_path / "a/b/far").mkdir(parents=True)
    kept = (tmp_path / f"out/checkpoint-{step}").rename(tmp_path / "a/b/far/away")
    if step == 4:
        remedy = f"offload unpin {tmp_path / 'run'} transformers-4"
        with pytest.raises(MismatchError, match=f"pinned as transformers-4 .*{remedy}"):
            train(tmp_path, 6)
        assert train(tmp_path, 6, kept) == [2, 4, 6], "all three folders are there"
    else:
        assert train(tmp_path, 6) == [4, 6]
        (said,) = [r.getMessage() for r in caplog.records if "no longer pinned" in r.getMessage()]
        assert "checkpoint-2 is gone since the last run" in said
        assert f"offload pin {tmp_path / 'run/step-00000002'}" in said


def fit(root: Path, epochs: int, *, resume: bool = True, **settings: Any) -> list[int]:
    """Train with Lightning, which keeps ``last.ckpt`` and one more."""
    files = lightning_runs.saving(root / "files", monitor=None, save_top_k=1)
    found = sorted(root.glob("files/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    last = found[-1] if resume else None
    make = lightning_runs.on_ssd(root / "run", keep=1)
    model = lightning_runs.fit(
        root, make, checkpoints=files, ckpt_path=last, max_epochs=epochs, **settings
    )
    model.trainer.optimizers[0].close()  # type: ignore[attr-defined]
    return pinned(root / "run", "lightning")


def step_named_in(file: Path) -> Any:
    (reference,) = torch.load(file, weights_only=True)["optimizer_states"]
    return reference["step"]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_files_of_lightning_that_were_copied_with_their_store(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert fit(a, 1, resume=False) == [4]
    copied(a, b)
    assert fit(b, 2) == [4, 8], "Lightning leaves files of another directory alone"
    for name in ("epoch=0-step=4", "last"):
        (b / f"files/{name}.ckpt").unlink()
    assert fit(b, 3) == [8, 12], "and nothing of the original counts"
    assert {step_named_in(file) for file in b.glob("files/*.ckpt")} == {8, 12}
    assert fit(a, 2) == [8]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_file_of_lightning_whose_drive_is_not_mounted_keeps_its_checkpoint(
    tmp_path: Path,
) -> None:
    assert fit(tmp_path, 1, resume=False) == [4]
    last = shutil.copy(tmp_path / "files/last.ckpt", tmp_path / "start.ckpt")
    unmount(tmp_path / "files")
    files = lightning_runs.saving(tmp_path / "others", monitor=None, save_top_k=1)
    make = lightning_runs.on_ssd(tmp_path / "run", keep=1)
    model = lightning_runs.fit(tmp_path, make, checkpoints=files, ckpt_path=last, max_epochs=2)
    model.trainer.optimizers[0].close()  # type: ignore[attr-defined]
    assert pinned(tmp_path / "run", "lightning") == [4, 8]
