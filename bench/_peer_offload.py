"""This project's process of `bench.peers`, also used for the same model without an optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench._model import Stack
from bench._peer_protocol import Reply, serve


def make(settings: Reply) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Return functions that take iterations of training, and that close it, for `settings`."""
    torch.set_num_threads(settings["threads"])
    model = Stack(settings["layers"], settings["layer_parameters"])
    x = torch.zeros(1)
    if settings["directory"] is None:

        def compute(iterations: int) -> None:
            """Take iterations of forward and backward without an optimizer."""
            for _ in range(iterations):
                model(x).backward()
                model.zero_grad()

        return compute, lambda: None

    import offload

    optimizer = offload.AdamW(
        model.parameters(),
        directory=settings["directory"],
        model=model,
        keep=1,
        options=offload.Options(**settings["options"]),
        **settings["hyper"],
    )

    def train(iterations: int) -> None:
        """Take iterations of training, and wait until nothing is in flight."""
        for _ in range(iterations):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()

    return train, optimizer.close


if __name__ == "__main__":
    serve(make)
