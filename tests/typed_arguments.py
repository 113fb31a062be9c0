"""Calls that a type checker takes, and calls that it must refuse; never run.

mypy checks this file with the packages (`pyproject.toml`), and reports a ``type: ignore`` that
ignores no error. So it says so when an argument is not checked any more.
"""

from __future__ import annotations

from typing import assert_type

import torch

import offload
from offload.integrations.transformers import OffloadCallback


def takes(model: torch.nn.Module, callback: OffloadCallback) -> None:
    """Use arguments as they are meant."""
    offload.AdamW(model.parameters(), 1e-3, directory="run", keep=offload.LastK(2))
    offload.SGD(model.named_parameters(), 0.1, 0.9, directory=["a", "b"], model=model)
    optimizer = offload.Adam([{"params": list(model.parameters()), "lr": 0.1}], directory="run")
    optimizer.checkpoint(metrics={"loss": torch.ones(()), "accuracy": 0.5})
    assert_type(optimizer.num_steps, int)
    cls, _ = callback.optimizer_cls_and_kwargs(directory="run", options=offload.Options())
    assert_type(cls, type[torch.optim.Optimizer])


def refuses(model: torch.nn.Module, callback: OffloadCallback) -> None:
    """Give arguments that are wrong, each in its own way."""
    offload.AdamW(model.parameters(), lr="x", directory="run")  # type: ignore[arg-type]
    offload.AdamW(model.parameters(), directory=3)  # type: ignore[arg-type]
    offload.AdamW(model.parameters(), wieght_decay=3, directory="run")  # type: ignore[call-arg]
    offload.AdamW(model.parameters())  # type: ignore[call-arg]
    offload.Adam(model, directory="run")  # type: ignore[arg-type]
    offload.SGD(model.parameters(), directory="run", fused="yes")  # type: ignore[arg-type]
    optimizer = offload.AdamW(model.parameters(), directory="run")
    optimizer.checkpoint(metrics={"loss": "low"})  # type: ignore[dict-item]
    callback.optimizer_cls_and_kwargs(directory="run", keep="2")  # type: ignore[arg-type]
