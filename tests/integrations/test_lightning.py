"""The optimizer under Lightning's real Trainer: the losses are those of torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision

import offload
from offload.integrations.lightning import OffloadCallback
from tests.integrations.lightning_runs import (
    OPTIONS,
    Model,
    fit,
    in_memory,
    logged,
    on_ssd,
    parameters,
    saving,
)
from tests.numerics.delays import Late
from tests.numerics.reference import Reference, assert_same_parameters

STEPS = 8

# Lightning's, where a run goes on in the directory that it has begun in.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def scaler_on_cpu() -> MixedPrecision:
    # Asked for by name, Lightning takes bf16 on a processor; the plugin itself works there.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_factor=2.0**8, growth_interval=1)
    return MixedPrecision("16-mixed", device="cpu", scaler=scaler)


def settings(name: str) -> dict[str, Any]:
    return {
        "bf16-mixed-clipped-by-value": {
            "precision": "bf16-mixed",
            "gradient_clip_val": 0.05,
            "gradient_clip_algorithm": "value",
        },
        "16-mixed-clipped": {"plugins": [scaler_on_cpu()], "gradient_clip_val": 0.5},
        "accumulated": {"accumulate_grad_batches": 2, "max_epochs": 4, "gradient_clip_val": 0.5},
    }[name]


@pytest.mark.parametrize("name", ["bf16-mixed-clipped-by-value", "16-mixed-clipped", "accumulated"])
def test_losses_are_those_of_torchs_own_optimizer(name: str, tmp_path: Path) -> None:
    run = {"save": False, "max_epochs": 2}
    ours = fit(tmp_path / "a", on_ssd(tmp_path / "run"), **{**run, **settings(name)})
    torchs = fit(tmp_path / "b", in_memory, **{**run, **settings(name)})
    losses = logged(tmp_path / "a")
    assert len(losses) == STEPS
    assert losses == logged(tmp_path / "b")
    assert_same_parameters(parameters(ours), parameters(torchs))
    if name.startswith("16-mixed"):  # some steps are skipped, as their gradients overflow
        assert 0 < ours.trainer.optimizers[0].stats().steps < STEPS  # type: ignore[attr-defined]


class MastersInMemory(torch.optim.Optimizer):
    """What a step on 16-bit parameters is, written independently, where Lightning can use it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.reference = Reference(torch.optim.AdamW, self.param_groups[0]["params"], lr=lr)

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.reference.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.reference.step()
        return loss


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_16_bit_parameters_train_on_fp32_masters(precision: str, tmp_path: Path) -> None:
    ours = fit(
        tmp_path / "a", on_ssd(tmp_path / "run"), max_epochs=2, precision=precision, save=False
    )
    expected = fit(
        tmp_path / "b",
        lambda module: MastersInMemory(module.parameters(), lr=1e-2),
        max_epochs=2,
        precision=precision,
        callback=pl.Callback(),
        save=False,
    )
    losses = logged(tmp_path / "a")
    assert len(losses) == STEPS
    assert losses == logged(tmp_path / "b")
    assert {p.dtype for p in ours.parameters()} == {next(expected.parameters()).dtype}
    assert next(ours.parameters()).dtype.itemsize == 2
    assert_same_parameters(parameters(ours), parameters(expected))


class Manual(Model):
    """Two optimizers that take turns, one of them with a closure, as in the training of a GAN."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        with first.toggle_model():
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            first.step()
            first.zero_grad()

        def closure() -> torch.Tensor:
            again = self.loss(batch)
            second.zero_grad()
            self.manual_backward(again)
            return again

        with second.toggle_model():
            second.step(closure=closure)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("train_loss", loss)

    def configure_optimizers(self) -> Any:
        optimizers = [self._make(self.layers[0], "first"), self._make(self.layers[4], "second")]
        schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=3) for o in optimizers]
        return optimizers, schedulers


def test_manual_optimization_with_two_optimizers_that_take_turns(tmp_path: Path) -> None:
    def ours(module: torch.nn.Module, name: str) -> torch.optim.Optimizer:
        return on_ssd(tmp_path / name)(module)  # type: ignore[arg-type]

    def torchs(module: torch.nn.Module, name: str) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=1e-2)

    run = {"model_class": Manual, "max_epochs": 2}
    trained = fit(tmp_path / "a", ours, **run)  # type: ignore[arg-type]
    expected = fit(tmp_path / "b", torchs, callback=pl.Callback(), save=False, **run)  # type: ignore[arg-type]
    losses = logged(tmp_path / "a")
    assert len(losses) == STEPS
    assert losses == logged(tmp_path / "b")
    assert_same_parameters(parameters(trained), parameters(expected))
    for name in ("first", "second"):  # each .ckpt names a checkpoint in both stores
        assert [c.step for c in offload.list_checkpoints(tmp_path / name) if c.pins] == [4, 8]


class Averages(pl.Callback):
    """Notes what another callback has averaged, after each batch."""

    def __init__(self, averaging: pl.Callback) -> None:
        self.averaging = averaging
        self.found: list[torch.Tensor] = []

    def on_train_batch_end(self, *_: object) -> None:
        average = self.averaging._average_model  # type: ignore[attr-defined]
        self.found.append(torch.cat([p.detach().flatten() for p in average.parameters()]).clone())


AVERAGING = {
    "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.5),
    "WeightAveraging": WeightAveraging,
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1),
}


@pytest.mark.filterwarnings("ignore:.*It is recommended to use `self.log:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Swapping scheduler|SWA is currently only supported every epoch")
@pytest.mark.parametrize(
    ("name", "overlap", "compiled"),
    [
        ("EMAWeightAveraging", "forward", True),
        ("WeightAveraging", None, False),
        ("StochasticWeightAveraging", "forward", False),
    ],
)
def test_averaging_callbacks(name: str, overlap: Any, compiled: bool, tmp_path: Path) -> None:
    """They read parameters after each batch, and exchange them for validation and at the end."""
    torch.compiler.reset()
    options = offload.Options(
        chunk_bytes=4096, ring_chunks=3, overlap=overlap, backend=Late(),
        allow_volatile=True,
    )  # fmt: skip

    class Compiled(Model):
        def __init__(self, make: Any) -> None:
            super().__init__(make)
            self.layers.compile(backend="eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

        def loss(self, batch: Any) -> torch.Tensor:
            return (self(batch[0]) - batch[1]).square().mean()

    found = []
    for make in (on_ssd(tmp_path / "run", options=options), in_memory):
        averaging = AVERAGING[name]()
        averages = Averages(averaging)
        model = fit(
            tmp_path / make.__name__, make, max_epochs=3, save=False, extra=[averaging, averages],
            model_class=Compiled if compiled else Model,
        )  # fmt: skip
        found.append((averages.found, model))
    assert logged(tmp_path / "make") == logged(tmp_path / "in_memory")
    assert logged(tmp_path / "make", "val_loss") == logged(tmp_path / "in_memory", "val_loss")
    assert len(found[0][0]) >= 12
    for batch, (ours, torchs) in enumerate(zip(found[0][0], found[1][0], strict=True)):
        assert torch.equal(ours, torchs), f"average after batch {batch}"
    assert_same_parameters(parameters(found[0][1]), parameters(found[1][1]))
    torch.compiler.reset()


class Clipping(pl.Callback):
    """Edits parameters after each batch, and notes them, as a user's callback may."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: object) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.clamp_(-0.1, 0.1)
        self.found.append(sum(p.double().sum().item() for p in pl_module.parameters()))


def test_a_callback_that_edits_parameters(tmp_path: Path) -> None:
    """Also of those that a step still updates that runs beside the next forward."""
    options = offload.Options(
        chunk_bytes=4096, overlap="forward", backend=Late(), allow_volatile=True
    )
    clipping = [Clipping(), Clipping()]
    ours = fit(
        tmp_path / "a", on_ssd(tmp_path / "run", options=options), save=False, extra=clipping[:1]
    )
    torchs = fit(tmp_path / "b", in_memory, save=False, extra=clipping[1:])
    assert clipping[0].found == clipping[1].found
    assert logged(tmp_path / "a") == logged(tmp_path / "b")
    assert_same_parameters(parameters(ours), parameters(torchs))


def test_lightning_makes_a_class_of_ours_and_copies_nothing(tmp_path: Path) -> None:
    first, second = (torch.nn.Parameter(torch.ones(10)) for _ in range(2))
    ours = offload.AdamW([first], directory=tmp_path / "run", options=OPTIONS)
    wrapped: Any = LightningOptimizer(ours)
    assert isinstance(wrapped, offload.AdamW)
    wrapped.add_param_group({"params": [second], "lr": 0.5})
    assert [group["lr"] for group in ours.param_groups] == [1e-3, 0.5]
    for parameter in (first, second):
        parameter.grad = torch.ones_like(parameter)
    ours.step()
    assert wrapped.checkpoint({"by": "wrapped"}).result().step == 1
    wrapped.pin("kept")
    assert wrapped.state_dict() == ours.state_dict()
    ours.load_state_dict(wrapped.state_dict())
    before = second.detach().clone()
    ours.step()
    assert wrapped.restore().train_state == {"by": "wrapped"}
    assert torch.equal(second.detach(), before)
    assert wrapped.stats().scalars() == ours.stats().scalars()
    wrapped.close()
    with pytest.raises(offload.OffloadError, match="closed"):
        ours.step()


def test_what_cannot_work_is_refused_by_name(tmp_path: Path) -> None:
    options = offload.Options(chunk_bytes=4096, overlap="backward")
    with pytest.raises(offload.OffloadError, match=r'step\(closure\).*overlap="backward"'):
        fit(tmp_path / "a", on_ssd(tmp_path / "run", options=options))
    with pytest.raises(offload.OffloadError, match=r"AsyncCheckpointIO.*remove it"):
        fit(tmp_path / "b", on_ssd(tmp_path / "other"), plugins=[AsyncCheckpointIO()])
    with pytest.raises(offload.OffloadError, match="OffloadCallback has nothing to do"):
        fit(tmp_path / "c", lambda m: torch.optim.AdamW(m.parameters()), callback=OffloadCallback())


def test_files_hold_no_state_and_a_second_fit_closes_the_optimizer_of_the_first(
    tmp_path: Path,
) -> None:
    first = fit(tmp_path / "a", on_ssd(tmp_path / "run"), max_epochs=1)
    saved = torch.load(tmp_path / "a/files/last.ckpt", weights_only=True)
    (reference,) = saved["optimizer_states"]
    assert "state" not in reference
    held = sum(t.numel() * t.element_size() for t in first.state_dict().values())
    assert (tmp_path / "a/files/last.ckpt").stat().st_size < held + 40_000
    first.trainer.save_checkpoint(tmp_path / "mine.ckpt")  # as long as there is no other fit
    (kept,) = [c for c in offload.list_checkpoints(tmp_path / "run") if c.step == 4]
    assert sum(name.startswith("lightning-mine-") for name in kept.pins) == 1
    fit(
        tmp_path / "a",
        on_ssd(tmp_path / "run"),
        ckpt_path=tmp_path / "mine.ckpt",
        max_epochs=2,
        checkpoints=saving(tmp_path / "a/files"),
    )
    assert len(logged(tmp_path / "a")) == STEPS
    with pytest.raises(offload.OffloadError, match="closed"):
        first.trainer.optimizers[0].step()


def test_the_trainer_may_come_from_the_other_package(tmp_path: Path) -> None:
    package = pytest.importorskip("pytorch_lightning")

    class Line(package.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, store: Path) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.store = store
            self.line = torch.nn.Linear(8, 1)
            self.seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.line(batch[0]).square().mean()
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return offload.AdamW(self.parameters(), lr=0.1, directory=self.store, options=OPTIONS)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(torch.linspace(-1, 1, 64).view(8, 8)), batch_size=2
            )

    def run(root: Path, epochs: int, *, goes_on: bool = False) -> list[float]:
        model = Line(root / "run")
        files = package.callbacks.ModelCheckpoint(dirpath=root / "files", save_last=True)
        trainer = package.Trainer(
            max_epochs=epochs, accelerator="cpu", callbacks=[OffloadCallback(), files],
            logger=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, ckpt_path=str(root / "files/last.ckpt") if goes_on else None)
        return model.seen

    parts = run(tmp_path / "parts", 1) + run(tmp_path / "parts", 2, goes_on=True)
    whole = run(tmp_path / "whole", 2)
    assert len(whole) == 8
    assert parts == whole
