"""A loop like that of nanoGPT, with the optimizer's state on SSD and no `torch.save`.

    python nanogpt_loop.py --directory run --steps 200
    python nanogpt_loop.py --directory run16 --dtype float16    # with a loss scaler

Comments that begin with "was:" show the line of the usual loop that each new line replaces. Stop it
in any way, `kill -9` included, and run it again: it continues after the last checkpoint, to the
same bits as if it had never been stopped.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch.nn import functional

import offload

VOCABULARY, LENGTH = 64, 32


class Block(torch.nn.Module):
    """A layer of a GPT: causal attention, then a multilayer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = (
            torch.nn.LayerNorm(width),
            torch.nn.LayerNorm(width),
        )
        self.attention = torch.nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = self.before_attention(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.before_mlp(x))


class GPT(torch.nn.Module):
    """Predicts the next token of a text."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Embedding(LENGTH, width)
        self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(num_layers)))
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)
        torch.nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        h = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        logits = self.head(self.blocks(h)).float()
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def get_batch(text: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pieces of a text, and the same pieces one token further on."""
    starts = torch.randint(len(text) - LENGTH, (size,)).tolist()
    pieces = torch.stack([text[i : i + LENGTH + 1] for i in starts])
    return pieces[:, :-1], pieces[:, 1:]


def get_lr(iter_num: int, num_iters: int) -> float:
    """Return the learning rate of an iteration: a warm-up, then a cosine."""
    if iter_num < 5:
        return 1e-3 * (iter_num + 1) / 5
    return 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * iter_num / num_iters))


@torch.no_grad()
def estimate_loss(model: torch.nn.Module, text: torch.Tensor) -> float:
    """Return the mean loss over a few batches."""
    model.eval()
    losses = [model(*get_batch(text, 8)).item() for _ in range(4)]
    model.train()
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("run"), help="on a local SSD")
    parser.add_argument("--steps", type=int, default=200, help="iterations in all, over all runs")
    parser.add_argument("--every", type=int, default=20, help="iterations between evaluations")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--scale", type=float, default=65536.0, help="first loss scale of float16")
    arguments = parser.parse_args()

    torch.manual_seed(1337)
    text = (torch.arange(20_000) ** 2 // 7) % VOCABULARY  # a real program would read its data
    train_text, val_text = text[:18_000], text[18_000:]
    model_args = {"width": 64, "num_layers": 2}
    model = GPT(**model_args).to(getattr(torch, arguments.dtype))

    # was: optimizer = torch.optim.AdamW(groups, lr=..., fused=True)
    optimizer = offload.AdamW(
        model.parameters(),
        lr=1e-3,
        directory=arguments.directory,
        model=model,  # was: 'model': model.state_dict()
        keep=offload.LastK(1) | offload.BestBy("val_loss"),  # was: if val_loss < best: torch.save
    )
    # was: scaler = torch.amp.GradScaler(...); this one also takes parameters that are fp16
    scaler = offload.GradScaler(
        "cpu", init_scale=arguments.scale, enabled=arguments.dtype == "float16"
    )

    iter_num = 0
    # was: checkpoint = torch.load('ckpt.pt'), model.load_state_dict(checkpoint['model']),
    #      optimizer.load_state_dict(checkpoint['optimizer']): restore() does all three
    checkpoint = optimizer.restore()
    if checkpoint is not None:
        saved = checkpoint.train_state
        iter_num = saved["iter_num"]  # not checkpoint.step, which does not count skipped steps
        scaler.load_state_dict(saved["scaler"])
        torch.set_rng_state(saved["random"])
        print(f"continuing at iteration {iter_num}, optimizer step {checkpoint.step}", flush=True)

    while iter_num < arguments.steps:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num, arguments.steps)
        loss = model(*get_batch(train_text, 8))
        scaler.scale(loss).backward()
        # was: scaler.unscale_(optimizer), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)  # skips the optimizer's step if a gradient is infinite
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1
        print(f"step {iter_num} loss {loss.item()!r}", flush=True)
        if iter_num % arguments.every == 0 or iter_num == arguments.steps:
            val_loss = estimate_loss(model, val_text)
            # was: torch.save({'model': ..., 'optimizer': optimizer.state_dict(),
            #                  'model_args': ..., 'iter_num': iter_num, ...}, 'ckpt.pt')
            optimizer.checkpoint(
                {
                    "iter_num": iter_num,
                    "model_args": model_args,
                    "scaler": scaler.state_dict(),
                    "random": torch.get_rng_state(),
                },
                metrics={"val_loss": val_loss},
            )
    optimizer.close()  # waits for the last checkpoint, and raises if it failed


if __name__ == "__main__":
    main()
