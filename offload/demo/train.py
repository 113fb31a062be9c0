"""The training process of the demo: a plain loop, as a user would write it.

Run as ``python -m offload.demo.train``. Each line it prints is one JSON object, so that the process
that started it can show the progress. With ``--kill`` it kills itself in the middle of a step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

import offload
from offload.demo import SCENARIOS, Scenario
from offload.demo.models import build


def train(
    scenario: Scenario,
    directory: str,
    *,
    steps: int,
    every: int,
    volatile: bool,
    killing: Killing,
    beyond: bool,
    loss_function: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    """Train up to step `steps`, from the newest checkpoint in `directory` if there is one.

    With `beyond`, gradients and the parameters of blocks are on the drive as well.
    """
    where: dict[str, Any] = {"parameters": "drive", "gradients": "drive"} if beyond else {}
    model, encode = build(scenario.name)
    batches = Batches(encode, batch=scenario.batch, tokens=scenario.tokens)
    torch.manual_seed(1)

    optimizer = offload.AdamW(
        model.named_parameters(),
        directory=directory,
        model=model,
        keep=2,
        options=offload.Options(chunk_bytes=scenario.chunk_bytes, allow_volatile=volatile, **where),
        lr=scenario.lr,
        weight_decay=0.01,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    start = resume(optimizer, scheduler)
    if start == 0:
        say("evaluated", step=0, loss=evaluate(model, batches, loss_function))

    handle = None
    for step in range(start + 1, steps + 1):
        began = time.perf_counter()
        loss = loss_function(model, batches[step])
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        value = float(loss.item())
        if handle is not None and killing.is_due(step):
            handle.result()  # after the kill there must be a checkpoint to resume from
        say("update", step=step, loss=value.hex())
        updating = time.perf_counter()
        with killing.amid(step):
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
    say("evaluated", step=steps, loss=evaluate(model, batches, loss_function))
    say("end", digest=digest_of(model), **totals(optimizer))
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


def loss_in_bf16(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of one batch, as a 0-d tensor, with the parameters as they are."""
    output: Any = model(input_ids=ids, labels=ids)
    return cast("Tensor", output.loss)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of one batch, as a 0-d tensor, with all parameters upcast.

    Without hardware support a product of bf16 matrices takes ten times as long as one of float32.
    So the parameters are upcast before the forward. The gradients still arrive in bf16.
    """
    weights = {name: parameter.float() for name, parameter in model.named_parameters()}
    inputs = {"input_ids": ids, "labels": ids}
    output: Any = torch.func.functional_call(model, weights, (), inputs, tie_weights=True)
    return cast("Tensor", output.loss)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Batches,
    loss_function: Callable[[nn.Module, Tensor], Tensor] = loss_of,
) -> float:
    """Return the loss on held-out batches."""
    model.eval()
    loss = float(loss_function(model, batches.held_out()).item())
    model.train()
    return loss


def digest_of(model: nn.Module) -> str:
    """Return a digest of the bits of all parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
        "to_server_bytes",
        "from_server_bytes",
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
    parser.add_argument("--kill", type=int)
    parser.add_argument("--beyond", action="store_true")
    # Upcast parameters of all blocks would be in memory at once.
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    train(
        SCENARIOS[options.model],
        options.directory,
        steps=options.steps,
        every=options.every,
        volatile=options.allow_volatile,
        killing=Killing(options.kill),
        beyond=options.beyond,
        loss_function=loss_in_bf16 if options.bf16 else loss_of,
    )


def text() -> str:
    """Return the help texts of Python's own `help()`: half a megabyte of English."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


class Batches:
    """Batches of token ids.

    Batch k is the same in every process, so that a resume needs no sampler. The last tenth of the
    text is never trained on.
    """

    def __init__(self, encode: Callable[[str], list[int]], *, batch: int, tokens: int) -> None:
        ids = torch.tensor(encode(text()))
        self._training, self._held_out = ids.tensor_split([ids.numel() * 9 // 10])
        self._shape = (batch, tokens)

    def __getitem__(self, step: int) -> Tensor:
        """Return the ids of a step, as int64 of shape (batch, tokens).

        The ids are random windows of the text, drawn with the step as the seed.
        """
        batch, tokens = self._shape
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(self._training.numel() - tokens, (batch, 1), generator=draw)
        return self._training[starts + torch.arange(tokens)]

    def held_out(self) -> Tensor:
        """Return ids of shape (8, tokens), spread evenly over the text that is never trained on."""
        _, tokens = self._shape
        starts = torch.linspace(0, self._held_out.numel() - tokens, 8).long()
        return self._held_out[starts[:, None] + torch.arange(tokens)]


class Killing:
    """Kills this process in the middle of an update, at whatever point the update has reached.

    A kill from outside may come too late for a short update, because nothing guarantees when
    another process gets a processor. If an update ends before the timer fires, the next update is
    killed instead.

    Args:
        step: First step whose update is to be killed; None to kill no update.
    """

    def __init__(self, step: int | None) -> None:
        self._step = math.inf if step is None else step
        self._fastest_s = math.inf
        self._within: int | None = None
        """The step whose update is in progress and is to be killed; None at all other times."""
        signal.signal(signal.SIGALRM, self._kill)

    def is_due(self, step: int) -> bool:
        """Return whether the update of a step is to be killed."""
        return step >= self._step

    @contextmanager
    def amid(self, step: int) -> Iterator[None]:
        """Run the block as the update of a step. A step that is due ends the process."""
        began = time.perf_counter()
        if self.is_due(step):
            self._within = step
            # This is early enough even for an update that is much faster than all before.
            signal.setitimer(signal.ITIMER_REAL, min(self._fastest_s / 10, 60.0))
        try:
            yield
        finally:
            self._within = None
        self._fastest_s = min(self._fastest_s, time.perf_counter() - began)

    def _kill(self, *_: object) -> None:
        if self._within is not None:
            say("killing", step=self._within)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
