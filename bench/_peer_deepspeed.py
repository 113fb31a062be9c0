"""DeepSpeed's process of `bench.peers`, which runs in DeepSpeed's own environment.

It uses ZeRO stage 3 in one process, with the optimizer's state on NVMe through DeepSpeed's
pipelined swapper, which is the faster one. `buffer_count` is the smallest number that works (three
sub-groups of four arrays). Besides DeepSpeed, it needs only torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import deepspeed
import torch

from bench._model import Stack
from bench._peer_protocol import Reply, serve


def make(settings: Reply) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Return functions that take iterations of training, and that close it, for `settings`."""
    torch.set_num_threads(settings["threads"])
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.setdefault(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_SIZE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["MASTER_PORT"] = str(settings["port"])
    deepspeed.init_distributed(dist_backend="gloo")
    model = Stack(settings["layers"], settings["layer_parameters"])
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=_config(settings)
    )
    x = torch.zeros(1)

    def train(iterations: int) -> None:
        """Take iterations of training."""
        for _ in range(iterations):
            engine.backward(engine(x))
            engine.step()  # returns when its last write has ended

    return train, lambda: None


def _config(settings: Reply) -> dict[str, Any]:
    hyper = settings["hyper"]
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {**hyper, "betas": [0.9, 0.999], "eps": 1e-8}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": settings["layer_parameters"],
            "reduce_bucket_size": settings["layer_parameters"],
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 2 * settings["layer_parameters"],
            "contiguous_gradients": True,
            "overlap_comm": False,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": settings["directory"],
                "pin_memory": False,
                "pipeline_read": True,
                "pipeline_write": True,
                "buffer_count": 12,
                "fast_init": False,
            },
        },
        "aio": settings["aio"],
    }


if __name__ == "__main__":
    serve(make)
