"""Faults that are put into the library on purpose, to see that programs find them.

``python -m tests.fuzz --faults`` says how many programs it takes to find each. Each function here
puts one in, into the process that it is called in.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from offload.engine import engine, resume
from offload.model import table
from offload.overlap import forward_hooks
from offload.update import live_values


def reader_does_not_wait() -> None:
    """With ``overlap="forward"`` nobody waits for a parameter that is read outside of modules."""
    forward_hooks.ForwardHooks._before_use = lambda *_: False  # type: ignore[method-assign]


def edits_are_ignored() -> None:
    """The master goes on where the live parameter was edited."""
    os.environ["OFFLOAD_UPDATE"] = "torch"  # the kernel has no such function
    live_values.take_edits = lambda *_: None


def a_scalar_is_forgotten() -> None:
    """A restore forgets how many steps one parameter has seen."""
    adopt = table.ParameterTable.adopt

    def forgetful(self: Any, layout: Any, trainables: Any, scalars: Any = None) -> None:
        adopt(self, layout, trainables, scalars and [None, *scalars[1:]])

    table.ParameterTable.adopt = forgetful  # type: ignore[method-assign]


def a_step_is_counted_twice() -> None:
    """Every fifth step counts as two."""
    step = engine.Engine.step

    def eager(self: Any, groups: Any) -> None:
        step(self, groups)
        self.state.num_steps += self.num_steps % 5 == 4

    engine.Engine.step = eager  # type: ignore[method-assign]


def buffers_are_not_looked_at() -> None:
    """A second checkpoint of a step is taken for the first, whatever has changed."""
    engine.has_same_model = lambda *_: True  # type: ignore[attr-defined]
    engine.have_same_groups = lambda *_: True  # type: ignore[attr-defined]


def other_groups_keep_their_settings() -> None:
    """A restore brings back the hyper-parameters of the first group only."""
    load = resume.load_checkpoint

    def partial(checkpoint: Any, slot: Any, stored: Any, buffers: Any, groups: Any) -> int:
        copies = [groups[0], *({**group} for group in groups[1:])]
        return load(checkpoint, slot, stored, buffers, copies)

    engine.load_checkpoint = partial  # type: ignore[attr-defined]


BREAKAGES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        reader_does_not_wait,
        edits_are_ignored,
        a_scalar_is_forgotten,
        a_step_is_counted_twice,
        buffers_are_not_looked_at,
        other_groups_keep_their_settings,
    )
}
