"""The training process of the demo: a plain loop, as a user would write it.

Run as ``python -m offload.demo.train``. Each line it prints is one JSON object, so that the process
that started it can show the progress. With ``--hold`` it stands still in the middle of a step, so
that it can be killed there.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, cast

import torch
from torch import Tensor, nn

import offload
from offload.demo import SCENARIOS, Scenario
from offload.demo.data import Batches
from offload.demo.hold import Hold
from offload.demo.models import build


def train(
    scenario: Scenario, directory: str, *, steps: int, every: int, volatile: bool, hold: Hold
) -> None:
    """Train up to step `steps`, from the newest checkpoint in `directory` if there is one."""
    model, encode = build(scenario.name)
    batches = Batches(encode, batch=scenario.batch, tokens=scenario.tokens)
    torch.manual_seed(1)

    optimizer = offload.AdamW(
        model.named_parameters(),
        directory=directory,
        model=model,
        keep=2,
        options=offload.Options(chunk_bytes=scenario.chunk_bytes, allow_volatile=volatile),
        lr=scenario.lr,
        weight_decay=0.01,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    start = resume(optimizer, scheduler)
    if start == 0:
        say("evaluated", step=0, loss=evaluate(model, batches))

    handle = None
    for step in range(start + 1, steps + 1):
        began = time.perf_counter()
        loss = loss_of(model, batches[step])
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        value = float(loss.item())
        if handle is not None and hold.is_due(step):
            handle.result()  # after the kill there must be a checkpoint to resume from
        say("update", step=step, loss=value.hex())
        updating = time.perf_counter()
        with hold.amid(step):
            optimizer.step()
        update_s = time.perf_counter() - updating
        scheduler.step()
        optimizer.zero_grad()
        call_s = 0.0
        if step % every == 0:
            calling = time.perf_counter()
            train_state = {"scheduler": scheduler.state_dict(), "rng": torch.get_rng_state()}
            handle = optimizer.checkpoint(train_state=train_state)
            call_s = time.perf_counter() - calling
        say(
            "step",
            step=step,
            loss=value.hex(),
            step_s=time.perf_counter() - began,
            update_s=update_s,
            checkpoint_call_s=call_s if step % every == 0 else None,
            **totals(optimizer),
        )

    if handle is not None:
        handle.result()
    optimizer.synchronize()
    say("evaluated", step=steps, loss=evaluate(model, batches))
    say("end", **totals(optimizer))
    optimizer.close()


def resume(
    optimizer: offload.OffloadedOptimizer, scheduler: torch.optim.lr_scheduler.LRScheduler
) -> int:
    """Restore the newest checkpoint and return its step; 0 if there is no checkpoint."""
    before = kernel_read_bytes()
    began = time.perf_counter()
    checkpoint = optimizer.restore()
    seconds = time.perf_counter() - began
    if checkpoint is None:
        say("fresh")
        return 0
    train_state = cast("dict[str, Any]", checkpoint.train_state)
    scheduler.load_state_dict(train_state["scheduler"])
    torch.set_rng_state(train_state["rng"])
    stats = optimizer.stats()
    say(
        "resumed",
        step=checkpoint.step,
        restore_bytes=stats.restore_bytes,
        restore_s=stats.restore_s,
        kernel_read_bytes=kernel_read_bytes() - before,
        wall_s=seconds,
    )
    return checkpoint.step


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of one batch, as a 0-d tensor.

    Without hardware support a product of bf16 matrices takes ten times as long as one of float32.
    So the parameters are upcast before the forward. The gradients still arrive in bf16.
    """
    weights = {name: parameter.float() for name, parameter in model.named_parameters()}
    inputs = {"input_ids": ids, "labels": ids}
    output: Any = torch.func.functional_call(model, weights, (), inputs, tie_weights=True)
    return cast("Tensor", output.loss)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches) -> float:
    """Return the loss on held-out batches."""
    model.eval()
    loss = float(loss_of(model, batches.held_out()).item())
    model.train()
    return loss


def totals(optimizer: offload.OffloadedOptimizer) -> dict[str, float]:
    """Return the counters of the optimizer that the parent process needs."""
    stats = optimizer.stats()
    names = (
        "num_parameters",
        "bytes_read",
        "bytes_written",
        "read_s",
        "write_s",
        "seals",
        "seal_bytes",
        "seal_s",
        "wait_seal_s",
        "ring_bytes",
        "resident_bytes",
        "state_bytes",
    )
    return {name: getattr(stats, name) for name in names}


def kernel_read_bytes() -> int:
    """Return the bytes that this process made the disk read; 0 if the kernel does not say."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            fields = dict(line.split(": ") for line in file)
    except OSError:
        return 0
    return int(fields["read_bytes"])


def say(event: str, **fields: object) -> None:
    """Print one event as a line of JSON, and flush it: a killed process flushes nothing."""
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SCENARIOS), required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--allow-volatile", action="store_true")
    parser.add_argument("--hold", type=int)
    options = parser.parse_args()
    train(
        SCENARIOS[options.model],
        options.directory,
        steps=options.steps,
        every=options.every,
        volatile=options.allow_volatile,
        hold=Hold(options.hold, say),
    )


if __name__ == "__main__":
    main()
