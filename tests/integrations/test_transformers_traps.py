"""Traps that the Trainer's users fall into with optimizers of their own; each test names one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import SchedulerType, Trainer, get_scheduler

import offload
from gds import MemoryBackend
from offload.errors import (
    MismatchError,
    NotRestoredError,
    OffloadError,
    OverlapError,
    UnsupportedOptimizerError,
)
from offload.integrations.transformers import OffloadCallback, create_optimizer, latest_checkpoint
from tests.integrations.training import (
    STEPS,
    Case,
    Sentences,
    StopBefore,
    StoppedError,
    arguments,
    make_model,
)
from tests.numerics.delays import Late
from tests.numerics.reference import assert_same_bits

ONCE = {"max_steps": 2, "save_steps": 2}


def in_memory(**settings: Any) -> dict[str, Any]:
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True, chunk_bytes=4096)
    return {"directory": "/store", "options": options, **settings}


SPECIFIC = {
    "cosine_with_min_lr": {"min_lr": 0.001},
    "cosine_warmup_with_min_lr": {"min_lr": 0.001},
    "warmup_stable_decay": {"num_decay_steps": 3},
}


@pytest.mark.parametrize("name", [kind.value for kind in SchedulerType])
def test_schedulers_read_defaults_and_param_groups(name: str) -> None:
    """Some of transformers' read `optimizer.defaults["lr"]`; all check for an Optimizer."""
    rates = []
    model = make_model()
    ours = offload.AdamW(model.parameters(), lr=0.02, **in_memory(model=model))
    for optimizer in (ours, torch.optim.AdamW(make_model().parameters(), lr=0.02)):
        scheduler = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=2,
            num_training_steps=8,
            scheduler_specific_kwargs=SPECIFIC.get(name),
        )
        rates.append([])
        for step in range(8):
            optimizer.step()
            plateau = name in ("reduce_lr_on_plateau", "greedy")
            scheduler.step(*([float(step)] if plateau else []))
            rates[-1].append([float(group["lr"]) for group in optimizer.param_groups])
    ours.close()
    assert rates[0] == rates[1]


def test_groups_and_hyperparameters_are_the_trainers_own(tmp_path: Path) -> None:
    model = make_model()
    args = arguments(tmp_path, adam_beta1=0.8, adam_epsilon=1e-6)
    trainer = Trainer(model, args)
    theirs = trainer.create_optimizer()
    with create_optimizer(model, args, **in_memory()) as ours:
        assert theirs.defaults["fused"], "which is what is left out"
        for mine, group in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert [id(p) for p in mine["params"]] == [id(p) for p in group["params"]]
            keys = ("lr", "betas", "eps", "weight_decay")
            assert [mine[key] for key in keys] == [group[key] for key in keys]
    with create_optimizer(model, args, **in_memory(weight_decay=0.5, lr=1.0)) as ours:
        assert [group["weight_decay"] for group in ours.param_groups] == [0.5, 0.0]
        assert ours.defaults["lr"] == 1.0
    with create_optimizer(model, args, **in_memory(optimizer_class=torch.optim.NAdam)) as ours:
        assert ours.defaults["lr"] == 0.02
    with pytest.raises(UnsupportedOptimizerError, match="Adafactor"):
        create_optimizer(model, arguments(tmp_path, optim="adafactor"), **in_memory())


def test_the_plain_class_works_without_names(tmp_path: Path) -> None:
    """`optimizer_cls_and_kwargs=(offload.AdamW, {...})`: the Trainer makes the groups."""
    settings = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-8}
    expected = Case({**ONCE, "max_steps": 4}).run(tmp_path / "factory")

    def trainer(*callbacks: Any) -> Trainer:
        kwargs = {**settings, "directory": tmp_path / "run"}
        return Trainer(
            make_model(),
            arguments(tmp_path, **{**ONCE, "max_steps": 4}),
            train_dataset=Sentences(),
            optimizer_cls_and_kwargs=(offload.AdamW, kwargs),
            callbacks=[OffloadCallback(), *callbacks],
        )

    path = tmp_path / "factory/out/checkpoint-2/optimizer.pt"
    assert path.stat().st_size < 8192, "a reference, and no state"
    first = trainer(StopBefore(4))
    with pytest.raises(StoppedError):
        first.train()
    first.optimizer.optimizer.close()
    second = trainer()
    second.train(resume_from_checkpoint=True)
    for name, parameter in second.model.named_parameters():
        assert_same_bits(parameter, expected.parameters[name], name)
    second.optimizer.optimizer.close()
    with offload.open_checkpoint(tmp_path / "run") as checkpoint:
        names = {spec.name for spec in checkpoint.manifest.layout.parameters}
    assert "group0.param0" in names
    # It takes `model` out of what it is given. So names need the factory, or `optimizers=`.
    kwargs = {**settings, "directory": tmp_path / "other", "model": (model := make_model())}
    other = Trainer(model, arguments(tmp_path), optimizer_cls_and_kwargs=(offload.AdamW, kwargs))
    with pytest.raises(TypeError, match=r"expected its parameters: pass model\.parameters\(\)"):
        other.create_optimizer()
    with pytest.raises(ValueError, match=r"config\.json"):  # and not random parameters
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint.path)


def test_model_init_makes_a_new_optimizer_for_each_training(tmp_path: Path) -> None:
    offloading = OffloadCallback()
    settings = {"directory": tmp_path / "run"}
    trainer = Trainer(
        model_init=make_model,
        args=arguments(tmp_path, **ONCE),
        train_dataset=Sentences(),
        callbacks=[offloading],
        optimizer_cls_and_kwargs=offloading.optimizer_cls_and_kwargs(**settings),
    )
    trainer.train()
    first = trainer.optimizer.optimizer
    with pytest.raises(
        NotRestoredError,
        match=r"resume_from_checkpoint=latest_checkpoint\(.* to continue.*fresh=True",
    ):
        trainer.train()  # from the beginning, in a store that has checkpoints
    with pytest.raises(OffloadError, match="closed"):
        first.synchronize()
    trainer.optimizer.optimizer.close()


def test_a_folder_of_save_only_model_does_not_lose_the_state_silently(tmp_path: Path) -> None:
    """The Trainer goes on without a word if a folder has no `optimizer.pt`."""
    Case(ONCE).run(tmp_path)
    (tmp_path / "out/checkpoint-2/optimizer.pt").unlink()
    with pytest.raises(NotRestoredError, match=r"resume_from_checkpoint=latest_checkpoint\("):
        Case({"max_steps": 4}).run(tmp_path, resume=True)

    case = Case({**ONCE, "save_only_model": True})
    case.run(tmp_path / "model")
    assert not list((tmp_path / "model/run").glob("step-*")), "nothing asked for the state"


@pytest.mark.parametrize("made_by", ["create_optimizer", "class_and_kwargs"])
def test_without_the_callback_the_first_save_and_a_resume_say_what_is_missing(
    tmp_path: Path, made_by: str
) -> None:
    model, args = make_model(), arguments(tmp_path, **ONCE)
    run = tmp_path / "run"
    how: dict[str, Any] = {}
    if made_by == "create_optimizer":
        how["optimizers"] = (create_optimizer(model, args, directory=run), None)
    else:
        how["optimizer_cls_and_kwargs"] = (offload.AdamW, {"directory": run})
    trainer = Trainer(model, args, train_dataset=Sentences(), **how)
    with pytest.warns(RuntimeWarning, match=r"cannot be resumed from.*OffloadCallback\(\)") as said:
        trainer.train()
    assert len(said) == 1
    trainer.optimizer.optimizer.close()
    with pytest.warns(RuntimeWarning, match=r"skipping .*checkpoint-2.*OffloadCallback\(\)"):
        assert latest_checkpoint(args.output_dir, run) is None
    if made_by != "class_and_kwargs":
        with pytest.raises(MismatchError, match=r"without sealing.*OffloadCallback\(\)"):
            Case({"max_steps": 4}).run(tmp_path, resume=True)


@pytest.mark.filterwarnings("ignore:the reference that state_dict")
def test_a_callback_of_the_user_may_ask_for_the_state_dict_and_seal(tmp_path: Path) -> None:
    """Only the Trainer's saves seal by themselves: it has made its folder when it asks."""

    class Asking(transformers.TrainerCallback):
        seals = False

        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            if self.seals:
                optimizer.optimizer.checkpoint()
            else:
                assert not optimizer.state_dict()["sealed"]

    run = Case({"save_strategy": "no"}).run(tmp_path / "asked", asking := Asking())
    assert run.stats.seals == 0
    asking.seals = True
    model, args = make_model(), arguments(tmp_path, **ONCE)
    with create_optimizer(model, args, directory=tmp_path / "run") as optimizer:
        given = {"optimizers": (optimizer, None), "callbacks": [asking]}
        with warnings.catch_warnings(action="error"):
            Trainer(model, args, train_dataset=Sentences(), **given).train()
    assert latest_checkpoint(args.output_dir, tmp_path / "run") == f"{args.output_dir}/checkpoint-2"


def test_the_callback_needs_our_optimizer(tmp_path: Path) -> None:
    trainer = Trainer(
        make_model(),
        arguments(tmp_path),
        train_dataset=Sentences(),
        callbacks=[OffloadCallback()],
    )
    with pytest.raises(TypeError, match=r"got torch\.optim\.adamw\.AdamW.*create_optimizer"):
        trainer.train()
    cls, kwargs = OffloadCallback().optimizer_cls_and_kwargs(directory=tmp_path / "run")
    with pytest.raises(OffloadError, match="callbacks="):
        cls()(make_model(), **kwargs)


def test_what_the_trainer_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OverlapError, match="overlap"):  # it measures the norm of gradients
        Case({"max_grad_norm": 0}, overlap="backward").run(tmp_path / "overlap")
    with Case().trainer(tmp_path) as trainer:
        trainer.state.is_hyper_param_search = True
        with pytest.raises(OffloadError, match="a training of its own"):
            trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)


class Looking(transformers.TrainerCallback):
    """Reads and edits parameters after each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found.append(sum(p.double().square().sum().item() for p in model.parameters()))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.05, 0.05)
        self.on_optimizer_step(args, state, control, model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_callbacks_after_a_step_find_its_parameters(tmp_path: Path) -> None:
    torch.compiler.reset()
    settings = {"save_strategy": "no", "torch_compile": True, "torch_compile_backend": "eager"}
    runs = []
    for overlap in (None, "forward"):
        looking = Looking()
        case = Case(settings, overlap=overlap, backend=Late(0.002))
        runs.append((case.run(tmp_path / str(overlap), looking), looking.found))
    assert len(runs[0][1]) == 2 * STEPS
    assert runs[0][1] == runs[1][1]
    assert runs[0][0].history == runs[1][0].history
    for name, parameter in runs[0][0].parameters.items():
        assert_same_bits(runs[1][0].parameters[name], parameter, name)
    torch.compiler.reset()
