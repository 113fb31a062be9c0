"""Train a small language model with Hugging Face's Trainer, the optimizer's state on SSD.

Run it, interrupt it wherever you like, and run it again: it goes on where it was.

    pip install '.[transformers]'      # in a checkout
    python trainer.py --directory /mnt/nvme/example --steps 200
    torchrun --standalone --nproc-per-node=2 trainer.py     # on two processes
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from offload.integrations.transformers import OffloadCallback, latest_checkpoint

LENGTH = 64
"""Bytes in a sample."""


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Python's own documentation, byte by byte: half a megabyte of English that everybody has."""

    def __init__(self) -> None:
        text = "\n".join(pydoc_data.topics.topics.values()).encode()
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._bytes) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self._bytes[index * LENGTH : (index + 1) * LENGTH].long()
        return {"input_ids": sample, "labels": sample}


def make_model(width: int) -> LlamaForCausalLM:
    """Return a model with random weights; a pretrained one is used in the same way."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    """Train, or go on training."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--directory", type=Path, default=Path("trainer-example"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()

    args = TrainingArguments(
        output_dir=str(options.directory / "out"),
        max_steps=options.steps,
        save_steps=options.save_steps,
        save_total_limit=2,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 10,
        weight_decay=0.1,
        logging_steps=max(options.save_steps // 5, 1),
        report_to="none",
        use_cpu=True,
    )

    state = options.directory / "run"  # on a local NVMe drive
    # close=True closes the optimizer at the end of training, which frees the store.
    offloading = OffloadCallback(close=True)
    trainer = Trainer(
        make_model(options.width),
        args,
        train_dataset=Text(),
        optimizer_cls_and_kwargs=offloading.optimizer_cls_and_kwargs(directory=state),
        callbacks=[offloading],
    )
    trainer.train(resume_from_checkpoint=latest_checkpoint(args.output_dir, state))


if __name__ == "__main__":
    main()
