"""Losses of a real fine-tune with each state format, beside exact FP32 state.

SmolLM2-135M in bf16 is fine-tuned on the help texts of Python, with the same data in the same
order each time. This needs the demo's packages. The script reports the training losses, and the
loss on held-out text before and after training.

    python -m bench.finetune --directory DIR
    python -m bench.finetune --directory DIR --model tiny --steps 300

There is no limit, since only the user can judge whether a format is good enough for a model. The
same run with FP32 state and another learning rate shows the meaning of a difference.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

import offload
from bench._harness import Parser, Result, run, say, scratch
from offload.demo import SCENARIOS
from offload.demo.models import build
from offload.demo.train import Batches, evaluate, loss_of

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "split": {"master": "split"},
    "bf16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8"},
    "split-int8": {"master": "split", "state_dtype": "int8"},
}
_RATES = {"fp32-rate-x1.1": 1.1}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train once with each format, print and write the result."""
    parser = Parser("finetune", __doc__ or "")
    parser.add_argument("--model", choices=sorted(SCENARIOS), default="smollm2")
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    args = parser.read(arguments, quick={"model": "tiny", "steps": 4})
    args.what = args.what or f"{args.model}-{args.steps}-steps"
    with scratch(args.directory) as directory:
        result = Result("finetune", args, directory)
        baseline: list[float] = []
        for label in (*FORMATS, *_RATES):
            losses, before, after = train(args.model, args.steps, label, directory)
            baseline = baseline or losses
            result.add_samples({f"{label}_loss": losses})
            result.fact(f"{label}_held_out_loss_before", before)
            result.fact(f"{label}_held_out_loss_after", after)
            pairs = zip(losses, baseline, strict=True)
            result.fact(f"{label}_largest_difference", max(abs(a - b) for a, b in pairs))
            say(f"{label}: held-out loss {before:.4f} -> {after:.4f}")
        result.write()


def train(
    model_name: str, steps: int, label: str, directory: str
) -> tuple[list[float], float, float]:
    """Train, and return the loss of every step, and the held-out loss before and after.

    Args:
        model_name: Name of a demo scenario.
        steps: Number of steps.
        label: Key of `FORMATS` or `_RATES`.
        directory: Directory for the store.
    """
    scenario = SCENARIOS[model_name]
    model, encode = build(scenario.name)
    batches = Batches(encode, batch=scenario.batch, tokens=scenario.tokens)
    before = evaluate(model, batches)
    options = offload.Options(chunk_bytes=scenario.chunk_bytes, **FORMATS.get(label, {}))
    losses = []
    with offload.AdamW(
        model.named_parameters(),
        directory=os.path.join(directory, label),
        model=model,
        keep=1,
        options=options,
        lr=scenario.lr * _RATES.get(label, 1.0),
        weight_decay=0.01,
    ) as optimizer:
        for step in range(1, steps + 1):
            loss = loss_of(model, batches[step])
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.item()))
    return losses, before, evaluate(model, batches)


if __name__ == "__main__":
    run(main)
