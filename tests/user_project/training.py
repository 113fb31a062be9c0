"""A program of a user, with the calls that the pages show; type checkers check it, nothing runs it.

Values have the types that the checkers are asked to find, so that none of them is `Any` unseen.
"""

from pathlib import Path
from typing import assert_type

import torch

import offload


def train(model: torch.nn.Module, batches: list[torch.Tensor], directory: Path) -> float:
    """Train, make checkpoints, and go on where an earlier run has stopped."""
    optimizer = offload.AdamW(
        model.parameters(),
        1e-3,
        directory=directory,
        model=model,
        keep=offload.LastK(2) | offload.BestBy("val_loss"),
        options=offload.Options(overlap="forward", host_memory="1GiB"),
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    start = 0
    checkpoint = optimizer.restore()
    if checkpoint is not None:
        start = checkpoint.train_state["step"]
        scheduler.load_state_dict(checkpoint.train_state["scheduler"])
    loss = torch.zeros(())
    for step, batch in enumerate(batches[start:], start):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            state = {"step": step + 1, "scheduler": scheduler.state_dict()}
            handle = optimizer.checkpoint(state, metrics={"val_loss": loss})
            assert_type(handle, offload.SealHandle)
    optimizer.pin("last")
    assert_type(optimizer.stats(), offload.Stats)
    assert_type(optimizer.stats().scalars(), dict[str, float])
    optimizer.close()
    return loss.item()


def other_classes(model: torch.nn.Module, directory: str) -> None:
    """Use a class of torch that has no name of its own here, and a closure."""
    with offload.OffloadedOptimizer(
        torch.optim.NAdam, model.parameters(), lr=0.1, directory=directory
    ) as optimizer:
        assert_type(optimizer, offload.OffloadedOptimizer)
        assert_type(optimizer.step(), None)
        assert_type(optimizer.step(lambda: 0.5), float)
    with offload.SGD(model.parameters(), 0.1, 0.9, directory=directory) as sgd:
        assert_type(sgd, offload.SGD)
        assert_type(sgd.position.step, int)


def look(store: str, model: torch.nn.Module) -> list[str]:
    """Look at checkpoints, and take their parameters."""
    offload.load_parameters(model, store)
    with offload.open_checkpoint(store) as checkpoint:
        assert_type(checkpoint, offload.Checkpoint)
        report = checkpoint.verify()
        assert_type(report.ok, bool)
    try:
        offload.pin(store, "good")
    except (offload.PinError, offload.CheckpointNotFoundError) as error:
        return [str(error)]
    return [info.path for info in offload.list_checkpoints(store) if info.valid]
