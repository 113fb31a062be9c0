"""One rank of a training with a tier, which does what a case of `rank_jobs` says.

With ``"hosts": "ab"`` rank 0 is on a host a, which sees the directory ``a`` in DIRECTORY, and rank
1 on a host b, which sees ``b``. Neither sees the directory of the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import offload
from gds import Backend, PosixBackend
from offload.distributed import node
from offload.errors import OffloadError
from offload.options import Tier
from offload.tiers import arriving, list_tier
from tests.crash.fault_backend import FaultBackend
from tests.hurry import hurry_after
from tests.limits import AGREEMENT_S, HANG_S
from tests.numerics.reference import bits
from tests.ranks_training.calls import record, record_into
from tests.ranks_training.host_backend import HostBackend
from tests.tiers.copies import SlowLink, until_parameters

logging.getLogger("offload").setLevel(logging.INFO)

_THIS_NODE = node.this_node


def make_model(kind: str, width: int) -> torch.nn.Module:
    """Make replicas, or shards; or a model of one process."""
    torch.manual_seed(7)
    layers = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.Linear(width, 24)).bfloat16()
    if kind == "one":
        return layers
    if kind == "ddp":
        return DistributedDataParallel(layers)
    for layer in layers:
        fully_shard(layer)
    return fully_shard(layers)


class _Nth:
    """Chooses the operation of a kind that is the n-th one with files of a name."""

    def __init__(self, number: int, kind: str, name: str) -> None:
        self._left, self._kind, self._name = number, kind, name

    def __call__(self, kind: str, path: str) -> bool:
        self._left -= kind == self._kind and path.endswith(self._name)
        return self._left == 0


def grow(optimizer: offload.OffloadedOptimizer, model: torch.nn.Module) -> None:
    """Add a module to the model, and its parameters to the optimizer."""
    torch.manual_seed(11)
    extra = torch.nn.Linear(24, 8).bfloat16()
    for parameter in extra.parameters():
        parameter.data.normal_()
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if inner is model:
        fully_shard(extra)
    inner.add_module("extra", extra)
    optimizer.add_param_group({"params": [*extra.parameters()]})


def local_bits(model: torch.nn.Module) -> str:
    """Return a digest of what this rank has of the parameters."""
    digest = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        digest.update(bits(local.detach()).numpy().tobytes())
    return digest.hexdigest()


def _wait(
    link: SlowLink, optimizer: offload.OffloadedOptimizer, step: int, case: dict[str, Any]
) -> None:
    """Wait until the tier has the first checkpoint, or the parameters of a later one.

    From the first one on, one takes ``slow_link_s``; one is made every 10 s.
    """
    if link.rate is not None:
        until_parameters(case["tier"], step)
        return
    assert optimizer._uploads is not None
    assert optimizer._uploads.wait(HANG_S)
    (copy,) = list_tier(case["tier"])
    assert copy.marker is not None
    sizes = copy.marker.sizes.items()
    nbytes = sum(n for name, n in sizes if "state/" in name or name.startswith("model."))
    link.rate = nbytes / case["slow_link_s"]


def _do(
    what: str, optimizer: offload.OffloadedOptimizer, model: torch.nn.Module, folder: Path
) -> Any:
    """Make a call after a restore; return what the test looks at."""
    match what:
        case "forward":
            generator = torch.Generator().manual_seed(5)
            found = model(torch.randn(4, 64, generator=generator).bfloat16()).float().sum().item()
            (folder.parent / f"forward-{dist.get_rank()}").touch()
            return found
        case "state_dict":
            position = offload.reference_of(optimizer.state_dict())
            return [position.step, position.sealed] if position is not None else None
        case "load_state_dict":
            optimizer.load_state_dict(optimizer.state_dict())
        case "full_state_dict":
            return optimizer.full_state_dict()["num_steps"]
        case "checkpoint":
            return optimizer.checkpoint({"step": 2, "rank": dist.get_rank()}).result().step
        case "restore":
            restored = optimizer.restore()
            return restored.step if restored is not None else None
        case "synchronize":
            optimizer.synchronize()
        case "lr":
            optimizer.param_groups[0]["lr"] = 3e-3
        case "edit":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        case "grow":
            grow(optimizer, model)
        case "freeze":
            next(model.parameters()).requires_grad_(False)
        case "close":
            optimizer.close()
    return None


def main(folder: str, case: dict[str, Any]) -> dict[str, Any]:
    """Restore, train, seal, and close; return what the test looks at."""
    rank = dist.get_rank()
    directory = folder
    backend: Backend | None = None
    node.this_node = _THIS_NODE
    if "hosts" in case:
        host = case["hosts"][rank]
        node.this_node = lambda: node.Node(host, f"boot of {host}")
        directory, backend = f"{folder}/{host}", HostBackend(Path(folder), host)
    if "unsealed" in case:  # the rank cannot write the table of its part once
        backend = failing = FaultBackend(backend or PosixBackend())
        if rank == case["unsealed"]:
            failing.fail_if(_Nth(case["nth_table"], "write_bytes", "table.json"))
    if "unwritten" in case:  # the rank cannot write state of this name once
        backend = failing = FaultBackend(backend or PosixBackend())
        if dist.get_rank() == 1:
            failing.fail_if(_Nth(2, "write", case["unwritten"]))
    if "tier_timeout_s" in case:
        arriving.DEFAULT_TIMEOUT_S = case["tier_timeout_s"]
        arriving.DEFAULT_RETRY_S = 0.5
    model = make_model(case.get("kind", "ddp"), case.get("width", 96))
    tier = case["tier"] if rank not in case.get("without", []) else None
    optimizer = offload.AdamW(
        model.parameters(),
        directory=directory,
        model=model,
        keep=case.get("keep", 2),
        fresh=case.get("fresh", False),
        options=offload.Options(
            allow_volatile=True,
            agreement_timeout_s=AGREEMENT_S,
            chunk_bytes=4096,
            overlap=case.get("overlap"),
            drives=offload.DriveTuning(calibrate=False),
            tier=Tier(tier, finish_s=case.get("finish_s", 60.0), max_age_s=case.get("max_age_s"))
            if tier
            else None,
            backend=backend,
        ),
        lr=1e-2,
    )
    errors: list[list[str]] = []
    restored, found_then = None, list[Any]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(1 + case.get("retries", 0)):
            try:
                restored = optimizer.restore()
                if "then" in case:
                    found_then = [_do(one, optimizer, model, Path(folder)) for one in case["then"]]
                elif restored is not None:
                    optimizer.pin("here")  # waits for the state
                    optimizer.unpin("here")
                break
            except (OffloadError, OSError) as error:
                restored = None
                errors.append([type(error).__name__, str(error)])
    found = {
        "errors": errors,
        "resumed": restored.step if restored else 0,
        "state": restored.train_state if restored else None,
        "warned": [str(one.message) for one in caught if "complete" in str(one.message)],
        "then": found_then,
    }
    if (errors and restored is None) or "close" in case.get("then", ()):
        with contextlib.suppress(OffloadError, OSError):
            optimizer.close()
        return found
    link = SlowLink() if "slow_link_s" in case and rank == 0 else None
    if link is not None:
        assert optimizer._uploads is not None
        optimizer._uploads.measured = link
    for step in range(optimizer.num_steps + 1, case["last"] + 1):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(4, 64, generator=generator).bfloat16()
        model(x).float().square().mean().backward()
        optimizer.step()
        if step in case["seals"]:
            if link is not None:
                link.now_s += 10
            optimizer.checkpoint({"step": step, "rank": rank}).result()
            if link is not None:
                _wait(link, optimizer, step, case)
    optimizer.close()
    stats = optimizer.stats().tier
    return {
        **found,
        "bits": local_bits(model),
        "tier": dataclasses.asdict(stats) if stats is not None else None,
    }


def run_calls(
    folder: Path, rank: int, size: int, calls: list[Any], setting: dict[str, Any]
) -> None:
    """Run one rank that a server has forked; see `tests.ranks_training.rank_server`."""
    del rank, size
    os.environ.update(setting["environment"])
    record_into(folder)
    hurry_after(folder / "hurry", AGREEMENT_S)
    dist.init_process_group("gloo")
    for case in calls:
        record("main", value=main(str(folder / case.pop("into")), case))
    dist.destroy_process_group()
