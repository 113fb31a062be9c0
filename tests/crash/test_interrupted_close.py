"""A `close` that was interrupted can be called again, and then the store is free."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.engine.working_slot import StateSlots
from offload.store.store import Store
from offload.stream.drives import Drives
from offload.stream.memory import WorkingMemory
from offload.update.pool import UpdatePool


def opened(backend: MemoryBackend, overlap: Any = None) -> tuple[torch.nn.Linear, offload.AdamW]:
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 10)
    options = offload.Options(backend=backend, allow_volatile=True, overlap=overlap)
    return model, offload.AdamW(model.parameters(), directory="/run", model=model, options=options)


@pytest.mark.parametrize("overlap", [None, "forward"])
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (WorkingMemory, "reset"),
        (StateSlots, "close"),
        (UpdatePool, "close"),
        (Store, "close"),
        (Drives, "close"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_close_that_was_interrupted_can_be_called_again(
    kind: type, method: str, overlap: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = MemoryBackend()
    model, optimizer = opened(backend, overlap)
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    optimizer.checkpoint().result()
    stepped = model.weight.detach().clone()
    work = getattr(kind, method)
    interrupts = [KeyboardInterrupt]

    def interrupted(self: object) -> None:
        if interrupts:
            raise interrupts.pop()
        work(self)

    monkeypatch.setattr(kind, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.close()
    with pytest.raises(offload.OffloadError, match="closed"):
        optimizer.step()
    optimizer.close()
    model, again = opened(backend)
    with again:
        assert again.restore() is not None
        assert torch.equal(model.weight, stepped)
