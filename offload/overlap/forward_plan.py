"""Plan of a step beside the forward: the chunks that each module needs, and their order."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offload.format.layout import Layout
from offload.model.parameters import Trainable
from offload.overlap.forward_order import ForwardOrder
from offload.overlap.gathered import needed_by


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
