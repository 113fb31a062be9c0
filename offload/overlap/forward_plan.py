"""Plan of a step beside the forward: the chunks that each module needs, and their order.

Before its forward, a module that was given to ``fully_shard`` gathers its own parameters and those
of its submodules that were not, and perhaps those of other modules. The submodules then have whole
parameters in place of the DTensors that the optimizer steps. So whoever waits for a step must do so
before the outermost of these modules gathers, and for all that it gathers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.format.layout import Layout
from offload.model.parameters import Trainable


class ForwardOrder:
    """Record of the first forward, and of some later ones."""

    def __init__(self) -> None:
        self._parameters: dict[int, torch.Tensor] = {}
        """Known parameters, by id. They are kept alive so that their ids stay unique."""
        self._first_uses: dict[int, int] = {}
        """Number of modules that had begun to run when a parameter was first needed, by its id."""
        self._readers: dict[int, int] = {}
        """Number of the module that read a parameter before its own module ran, by the
        parameter's id."""
        self._num_ran = 0

    def start_over(self) -> None:
        """Note that the next forward belongs to another step."""
        self._num_ran = 0

    def ran(self, own: Iterable[torch.Tensor]) -> None:
        """Note that the module that owns these parameters is about to run."""
        self._num_ran += 1
        for parameter in own:
            self._note(parameter)

    def used(self, parameter: torch.Tensor, reader: int | None) -> None:
        """Note that a parameter is read before the module that owns it has run."""
        if id(parameter) not in self._first_uses and reader is not None:
            self._readers[id(parameter)] = reader
        self._note(parameter)

    def first_use(self, parameter: torch.Tensor) -> int | None:
        """Return how many modules had begun to run when a parameter was first needed.

        None means that the parameter was never needed.
        """
        return self._first_uses.get(id(parameter))

    def readers(self, numbers: Mapping[int, int]) -> dict[int, list[int]]:
        """Return the parameters that modules read before the module that owns them has run."""
        found: dict[int, list[int]] = {}
        for parameter, reader in self._readers.items():
            if parameter in numbers:
                found.setdefault(reader, []).append(numbers[parameter])
        return found

    def _note(self, parameter: torch.Tensor) -> None:
        self._parameters.setdefault(id(parameter), parameter)
        self._first_uses.setdefault(id(parameter), self._num_ran)


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Relation between the modules of a model and the chunks of a layout."""

    order: Sequence[int] = ()
    """All chunks, in the order of their first use."""

    tensors: Sequence[torch.Tensor] = ()
    """Trained parameters, in element-space order; after them, those that only other ranks step."""

    names: Sequence[str] = ()
    """Names of these parameters in files."""

    numbers: Mapping[int, int] = field(default_factory=dict)
    """Index of each parameter in `tensors`, by id of the parameter."""

    spans: Sequence[range] = ()
    """Chunks of this rank with each parameter, by number of the parameter."""

    needs: Sequence[Sequence[int]] = ()
    """Numbers of the parameters that each module needs, by number of the module: those that it
    owns or gathers, and those that it reads before their own module has run."""

    unobserved: Sequence[int] = ()
    """Numbers of parameters whose readers were not observed."""


def make_plan(
    layout: Layout,
    trainables: Sequence[Trainable],
    modules: Sequence[torch.nn.Module],
    record: ForwardOrder,
    elsewhere: Sequence[tuple[str, torch.Tensor]] = (),
) -> ForwardPlan:
    """Return the plan for a layout."""
    spans = [layout.chunks_of(number) for number in range(len(layout.parameters))]
    spans += [range(0)] * len(elsewhere)
    tensors = [t.parameter for t in trainables] + [parameter for _, parameter in elsewhere]
    names = [t.spec.name for t in trainables] + [name for name, _ in elsewhere]
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    readers = record.readers(numbers)
    needs = [
        sorted(
            {numbers[id(p)] for p in needed_by(module) if id(p) in numbers}
            | set(readers.get(number, ()))
        )
        for number, module in enumerate(modules)
    ]
    first_use = [sys.maxsize] * layout.num_chunks
    unobserved = []
    for number, tensor in enumerate(tensors):
        turn = record.first_use(tensor)
        if turn is None:
            unobserved.append(number)
            continue
        for chunk in spans[number]:
            first_use[chunk] = min(first_use[chunk], turn)
    order = sorted(range(layout.num_chunks), key=first_use.__getitem__)
    return ForwardPlan(order, tensors, names, numbers, spans, needs, unobserved)


def needed_by(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Return the parameters that a call of a module needs, without those of its submodules.

    Parameters that FSDP2 gathers are returned as the optimizer knows them, whether or not they are
    gathered at the moment.
    """
    yield from own_parameters(module)
    for state in _states_of(module):
        for group in _groups_of(state):
            for parameter in group.fsdp_params:
                yield parameter.sharded_param


def own_parameters(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Return the parameters that a module has itself, without those of its submodules."""
    return (p for p in module._parameters.values() if p is not None)


def gathers(module: torch.nn.Module) -> bool:
    """Return whether a call of a module gathers parameters of FSDP2."""
    return next(_states_of(module), None) is not None


def begins_lazily(module: torch.nn.Module) -> bool:
    """Return whether the next call of a module is the one in which FSDP2 looks at all parameters.

    This is the first call of a root. It shows nothing of how later calls use the parameters.
    """
    state = next(_states_of(module), None)
    return state is not None and state._is_root is None


def put_first(hooks: Iterable[tuple[torch.nn.Module, int]]) -> None:
    """Make hooks run before FSDP2 gathers.

    A hook that was put on a module before ``fully_shard`` would run after FSDP2's.
    """
    for module, number in hooks:
        present: Any = module._forward_pre_hooks  # torch does not type its hooks
        if gathers(module) and number in present and next(iter(present)) != number:
            # torch does the same for `register_forward_pre_hook(..., prepend=True)`.
            present.move_to_end(number, last=False)


def _states_of(module: torch.nn.Module) -> Iterator[Any]:
    """Return what FSDP2 knows of a module, and of the modules that it gathers with it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # importing it takes long
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is None or not isinstance(module, kind):
        return
    own: Any = module._get_fsdp_state()
    yield own
    yield from own._states_to_forward_prefetch


def _groups_of(state: Any) -> Iterable[Any]:
    """Return the groups of parameters that FSDP2 gathers together for a module."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = state._fsdp_param_group  # torch before 2.13
    return [] if group is None else [group]
