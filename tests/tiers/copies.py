"""Optimizers with a tier, and copies of checkpoints that tests look at and damage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import offload
from gds import Backend
from offload.options import Tier
from offload.tiers import list_tier, verify_tier
from offload.tiers.policy import Measurements
from offload.tiers.services.opening import open_objects
from offload.tiers.upload_thread import TierStats
from tests.eventually import eventually
from tests.limits import HANG_S
from tests.stores.files import tree
from tests.stores.small import make_model, make_optimizer, train
from tests.tiers.proxy import Proxy

WIDTHS = (64, 40)
SMALL = 8192
"""Bytes of an object: two chunks, so that there are several."""

DOCUMENTS = ("manifest.json", "train_state.safetensors")
"""Files of a checkpoint that say when it was made."""


def optimizer_in(
    directory: Path | list[Path],
    tier: str | Tier | None = None,
    *,
    model: torch.nn.Module | None = None,
    backend: Backend | None = None,
    settings: Mapping[str, Any] | None = None,
    **changes: Any,
) -> offload.OffloadedOptimizer:
    chosen = {"drives": offload.DriveTuning(calibrate=False), "tier": tier, **(settings or {})}
    arguments = {"directory": directory, "keep": 3, **changes}
    return make_optimizer(model or make_model(*WIDTHS), backend, settings=chosen, **arguments)


def new_in(
    directory: Path | list[Path], tier: str, model: torch.nn.Module | None = None, **changes: Any
) -> offload.OffloadedOptimizer:
    """Return an optimizer of other parameters, whose end waits for no upload."""
    model = model or make_model(*WIDTHS, seed=5)
    return optimizer_in(directory, Tier(tier, finish_s=0), model=model, **changes)


def wait_for_uploads(optimizer: offload.OffloadedOptimizer) -> TierStats:
    """Wait until nothing is being sent, and return the statistics."""
    assert optimizer._uploads is not None
    assert optimizer._uploads.wait(HANG_S)
    stats = optimizer.stats().tier
    assert stats is not None
    return stats


def train_and_send(optimizer: offload.OffloadedOptimizer, num_steps: int) -> TierStats:
    """Take steps, and wait after each one until its checkpoint has been sent."""
    for _ in range(num_steps):
        train(optimizer, 1)
        stats = wait_for_uploads(optimizer)
    return stats


def whole(tier: str) -> list[bool]:
    """Return whether each complete copy in a tier is whole."""
    return [report.ok for report in verify_tier(tier)]


def steps_in(tier: str) -> list[int | None]:
    """Return the step of each copy in a tier; None for one that is not complete."""
    return [copy.marker and copy.marker.step for copy in list_tier(tier)]


def files(checkpoint: Path, *without: str) -> dict[str, bytes]:
    """Return the files of a checkpoint, by name, but for some of them."""
    found = {str(path.relative_to(checkpoint)): data for path, data in tree(checkpoint).items()}
    return {name: data for name, data in found.items() if name not in without}


class SlowLink(Measurements):
    """A link of which the clock and the rate are told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(lambda: self.now_s)
        self.rate: float | None = None

    @property
    def bytes_per_s(self) -> float | None:
        return self.rate


def until_parameters(tier: str, step: int) -> None:
    """Wait until the tier has the parameters of a step."""
    assert eventually(
        lambda: step in {c.parameters.step for c in list_tier(tier) if c.parameters is not None}
    )


def is_part(name: str) -> bool:
    """Whether an object is one of those that are not to be sent twice."""
    return "state/" in name or name.endswith(("safetensors", "table.json", "manifest.json"))


def sent_twice(proxy: Proxy) -> list[str]:
    """Return the objects that were sent more than once, of one copy."""
    return [name for name, n in Counter(filter(is_part, proxy.puts())).items() if n > 1]


def change(tier: str, name: str, how: str) -> None:
    """Change the object of a name of the newest copy in a tier.

    Args:
        tier: URL of the tier, or of a copy.
        name: Name of the object in the copy.
        how: "missing", "short", "long", or the byte to flip: "first", "middle" or "last".
    """
    copy = list_tier(tier)[-1]
    with open_objects(copy.url.removesuffix(f"/{copy.folder}")) as objects:
        path = f"{copy.folder}/{name}"
        data = objects.get(path, 1 << 20)
        if how == "missing":
            objects.delete([path])
        elif how == "short":
            objects.put(path, data[:-3])
        elif how == "long":
            objects.put(path, data + b"x")
        else:
            at = {"first": 0, "middle": len(data) // 2, "last": len(data) - 4}[how]
            objects.put(path, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
