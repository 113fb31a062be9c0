"""What single ranks do unlike the others, or unlike most scripts: functions for `Calls.do`."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload
from tests.eventually import eventually
from tests.ranks_training.calls import Calls, Model
from tests.ranks_training.models import inner, local, make_model


def open_otherwise(calls: Calls, change: str) -> None:
    """Make the optimizer with one thing unlike that of the other ranks."""
    model, arguments = inner(calls.model), dict[str, Any]()
    if change == "unwrap":
        calls.model = make_model(dataclasses.replace(calls.setting, kind="one"), calls.size)
    elif change == "layer":
        model.layers.append(torch.nn.Linear(3, 3).to(torch.bfloat16))
    elif change == "dtype":
        calls.model.float()
    elif change == "freeze":
        model.layers[0].bias.requires_grad_(False)
    elif change == "buffer":
        model.register_buffer("further", torch.zeros(3))
    elif change == "groups":
        arguments["params"] = [{"params": [one]} for one in calls.model.parameters()]
        arguments["params"][-1]["lr"] = 0.5
    elif change in ("torch", "offload"):
        package: Any = {"torch": torch, "offload": offload}[change]
        plain, package.__version__ = package.__version__, "0.0.7"
        try:
            calls.open()
        finally:
            package.__version__ = plain
        return
    elif change in OPTIONS:
        calls.setting.options.update(OPTIONS[change])
    else:
        arguments = ARGUMENTS[change]
    calls.open(**arguments)


OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"state_dtype": "int8"},
    "overlap": {"overlap": "forward"},
    "chunk_bytes": {"chunk_bytes": 8192},
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "model": {"model": None},
    "lr": {"lr": 0.5},
    "class": {"optimizer_class": offload.Adam},
    "keep": {"keep": offload.LastK(3) | offload.EverySteps(5)},
}


def open_in_pair(calls: Calls) -> None:
    """Make the optimizer: rank 0 for the group of ranks 0 and 1, and the others for all ranks."""
    pair = dist.new_group([0, 1])  # a call of all ranks
    calls.open(process_group=pair if calls.rank == 0 else None)


def open_beside(calls: Calls) -> None:
    """Make an optimizer of two of four ranks, for a model and a directory of their own."""
    groups = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    number = calls.rank // 2
    calls.model = torch.nn.Linear(8, 8)
    torch.nn.init.constant_(calls.model.weight, number)
    directory = calls.directory.with_name(f"pair-{number}")
    calls.open(process_group=groups[number], directory=directory, model=None)


def add_layer(calls: Calls, width: int) -> None:
    """Give the optimizer a new layer of the model, with the values that all ranks give it."""
    torch.manual_seed(width)
    model = calls.model.module
    model.added = torch.nn.Linear(width, 2, bias=False).to(torch.bfloat16)
    try:
        calls.optimizer.add_param_group({"params": [*model.added.parameters()]})
    except BaseException:
        del model.added
        raise


def add_entry(calls: Calls, name: str) -> None:
    """Let the model's state dict have a tensor more, which only its hooks know of."""
    further = torch.zeros(3)

    def add(module: Any, entries: dict[str, Any], prefix: str, metadata: Any) -> None:
        del module, metadata
        entries[f"{prefix}{name}"] = further

    inner(calls.model).register_state_dict_post_hook(add)


def step_without(calls: Calls, name: str) -> None:
    """Take a step in which a parameter has no gradient on this rank."""
    calls.backward()
    dict(calls.model.named_parameters())[name].grad = None
    calls.update()


def ask_for_the_state(calls: Calls) -> None:
    """Ask torch for the state of an optimizer that holds none in memory."""
    torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(calls.model, calls.optimizer)


# Parameters that several ranks hold.


def ignore(calls: Calls, name: str) -> None:
    """Let each rank have its own values of a parameter, which the wrapper leaves alone."""
    torch.manual_seed(7)
    model: Any = Model(calls.setting.widths).to(torch.bfloat16)
    with torch.no_grad():
        dict(model.named_parameters())[name].add_(calls.rank)
    if calls.setting.kind == "ddp":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])
        calls.model = DistributedDataParallel(model)
    else:
        calls.model = fully_shard(model, ignored_params={dict(model.named_parameters())[name]})


def change(calls: Calls, name: str, ranks: Sequence[int], how: str = "counted") -> None:
    """Add 1 to this rank's part of a parameter, on some ranks.

    How: ``counted``, as torch counts changes; ``data``, past the count; ``broadcast`` for a change
    that the first of the ranks brings to all of them.
    """
    parameter = dict(inner(calls.model).named_parameters())[name]
    with torch.no_grad():
        if how == "broadcast":
            if calls.rank == ranks[0]:
                parameter.add_(1)
            dist.broadcast(parameter, ranks[0])
        elif calls.rank in ranks:
            held = local(parameter)
            (held.data if how == "data" else held).add_(1)


def fill(calls: Calls, name: str, value: float) -> None:
    """Give this rank's part of a parameter one value everywhere."""
    with torch.no_grad():
        local(dict(inner(calls.model).named_parameters())[name]).fill_(value)


def open_reversed(calls: Calls) -> None:
    """Make the optimizer without model=; the last rank gives parameters of one shape in reverse."""
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(3)]
    calls.model = DistributedDataParallel(torch.nn.Sequential(*layers).to(torch.bfloat16))
    order = -1 if calls.rank == calls.size - 1 else 1
    calls.open(model=None, params=[*calls.model.parameters()][::order])


# Buffers and extra state.


def add_buffers(
    calls: Calls, differ: bool, broadcast: bool = True, persistent: bool = True
) -> None:
    """Give the model two buffers of which one may differ between the ranks."""
    model = inner(calls.model)
    model.register_buffer("common", torch.ones(3))
    value = torch.full((2, 3), float(calls.rank if differ else 7)).t()  # not contiguous
    model.register_buffer("own", value, persistent=persistent)
    if isinstance(calls.model, DistributedDataParallel):
        calls.model = DistributedDataParallel(model, broadcast_buffers=broadcast)


def change_buffer(calls: Calls) -> None:
    """Let the buffer differ from now on."""
    inner(calls.model).own.fill_(calls.rank)


def buffer_value(calls: Calls) -> float:
    """Return the buffer's value."""
    return float(inner(calls.model).own.flatten()[0])


def step_warning(calls: Calls) -> list[list[str]]:
    """Take a step; the value is what it warns of, and the file that each warning names."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        calls.backward()
        calls.optimizer.step()
        calls.num_steps += 1
    return [[str(one.message), one.filename] for one in seen]


class Counting(torch.nn.Module):
    """A module with an extra state that is no tensor, and a number that a load derives."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = {"count": count}
        self.loads = 0
        self.register_load_state_dict_post_hook(lambda module, _: module.loaded())

    def loaded(self) -> None:
        """Count the loads of a state dict."""
        self.loads += 1

    def get_extra_state(self) -> dict[str, int]:
        """Return the count."""
        return self.count

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Set the count."""
        self.count = state


def count(calls: Calls, start: int) -> None:
    """Give the model a module that is nothing but its extra state."""
    inner(calls.model).counting = Counting(start + calls.rank)


def counted(calls: Calls) -> list[int]:
    """Return the extra state, and the number of loads."""
    counting = inner(calls.model).counting
    return [counting.count["count"], counting.loads]


# Ends, drives, and what is listed.


def threads(calls: Calls) -> list[str]:
    """Return the names of this rank's threads for the ranks that do not end."""

    def found() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name.startswith("offload-")]

    eventually(lambda: not found())
    return found()


def open_in_memory(calls: Calls, directory: str, size: int | None) -> None:
    """Make the optimizer with a directory for its memory."""
    calls.setting.options["host_memory"] = offload.MemoryDirectory(directory, size)
    calls.open()


def kept_bytes(calls: Calls) -> int:
    """Return how much state stays in memory."""
    return int(calls.optimizer.stats().resident_bytes)


def sealed_train_state(calls: Calls) -> Any:
    """Return the train state of the checkpoint that a handle has, or the error that it raises."""
    try:
        return calls.handle.result().train_state
    except Exception as error:  # noqa: BLE001  (the test looks at it)
        return str(error)


def generation(calls: Calls) -> int:
    """Return the generation of the present state."""
    return int(calls.optimizer.position.generation)


def listed(calls: Calls) -> list[list[int]]:
    """Return the step and the size in bytes of each checkpoint that the optimizer lists."""
    return [[info.step, info.bytes] for info in calls.optimizer.checkpoints() if info.valid]


def listed_while_pins_move(calls: Calls, steps: int) -> list[list[int]]:
    """Seal and pin some steps, and unpin older ones; return what this rank lists after each step.

    A checkpoint that is unpinned is withdrawn only by the step that writes into its slot.
    """
    found = []
    for number in range(1, steps + 1):
        calls.step()
        found.append([info.step for info in calls.optimizer.checkpoints()])
        calls.checkpoint()
        calls.result()
        calls.optimizer.pin(f"pin-{number}")
        if number > 2:
            calls.optimizer.unpin(f"pin-{number - 2}")
    return found
