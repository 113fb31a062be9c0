"""Table of live parameters: their places in element space, and their scalar state."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from itertools import compress
from typing import Any

import torch

from offload.errors import MismatchError, UnsupportedParameterError
from offload.format.arrays import StateFormat
from offload.format.layout import Layout, ParameterSpec, element_space_order, model_order
from offload.model.load_path import is_extra
from offload.model.loading import give_back
from offload.model.memory_overlap import MemoryCheck
from offload.model.parameters import (
    Trainable,
    are_stepped,
    check_gradients,
    describe_parameters,
    group_names,
    is_stepped,
    memories,
)
from offload.model.replacing import describing
from offload.model.shards import Shards
from offload.model.stored import Stored, describe_model, digests_of_untaken
from offload.update.dtypes import DTYPE_CODES
from offload.update.kept_state import Scalars
from offload.update.rules import UpdateRule

_log = logging.getLogger("offload")

Groups = Sequence[Mapping[str, Any]]


class ParameterTable:
    """Table that follows changes of ``param_groups``, and keeps known parameters in place.

    Args:
        rule: Rule that determines the state arrays of a group's parameters.
        model: Module with the names, buffers and frozen parameters; None for a table of the groups'
            parameters only.
        chunk_elements: Elements per chunk of a new store. An adopted checkpoint has its own number.
        state_format: Stored form of the state.
        shards: Function that returns this rank's part of a tensor; None if this process steps and
            stores all tensors as a whole.
    """

    def __init__(
        self,
        rule: UpdateRule,
        model: torch.nn.Module | None,
        chunk_elements: int,
        state_format: StateFormat,
        *,
        shards: Shards | None = None,
    ) -> None:
        self.rule = rule
        self._chunk_elements = chunk_elements
        self.state_format = state_format
        self.model = model
        self.shards = shards
        self.shares: tuple[int, ...] = (1,)
        """Share of a new store's state on each drive."""
        self.layout: Layout | None = None
        """Layout; None until the first step, checkpoint or restore. Parameters may change until
        then."""
        self.trainables: list[Trainable] = []
        """Trainable parameters in element-space order."""
        self.scalars: list[Scalars | None] = []
        """Scalar state in element-space order; None for a parameter that has no state yet."""
        self._kinds: set[tuple[str, int, tuple[str, ...]]] = set()
        """Dtype, group and state arrays of the trainable parameters, each combination once."""
        self._memory = MemoryCheck()
        self._elsewhere: dict[int, torch.Tensor] = {}
        """Parameters of the groups that only other ranks step, by id."""
        self._agreed: tuple[dict[torch.Tensor, int], list[tuple[str, ...]]] | None = None
        """With several ranks: the group of each parameter, and the arrays of each group, for which
        all ranks have laid out their parts. None if they have not, as after a restore."""
        self._frozen: set[str] | None = None
        """Names of the model's parameters that were frozen and in no group at the first `describe`.
        A name is removed once a warning has covered it."""
        self._has_logged_missing_model = False
        self._untaken: dict[str, str] | None = None
        """Digests, at the first `describe`, of what no load of a state dict could give back."""

    def describe(self, groups: Groups) -> tuple[Layout, list[Trainable]]:
        """Lay out the present groups and model; known parameters keep their place.

        Returns:
            The layout, and the trainable parameters in element-space order.

        Raises:
            MismatchError: A known parameter has changed in a way that its files cannot follow.
            UnsupportedParameterError: A new parameter cannot be updated, or two share memory.
        """
        if self._frozen is None:
            self._frozen = {n for n, p in self._not_given(groups) if not p.requires_grad}
        described = describe_parameters(
            groups,
            self.model,
            self.rule,
            self.state_format,
            constructed=True,
            shards=self.shards,
        )
        found = {t.parameter: t for t in described}
        self._note_elsewhere(groups, found)
        trainables = []
        for trainable in self.trainables:
            parameter = trainable.parameter
            now = found.pop(parameter, trainable)  # a parameter frozen later keeps its state
            if now.spec != trainable.spec:
                raise _changed_error(trainable.spec, now.spec, parameter, self.model)
            trainables.append(trainable)
        new = {t.spec.name: t for t in found.values()}
        names = {t.spec.name for t in trainables}
        for name in new:
            if name in names:
                raise MismatchError(
                    f"parameter {name!r} has been replaced by another object since the optimizer "
                    "was given it. Copy values into the old parameter (p.copy_() under no_grad, "
                    "or p.data = ...) rather than replace it"
                )
        if any(t.spec.group >= len(groups) for t in trainables):
            raise MismatchError(
                f"there are {len(groups)} parameter groups, but there were more before: a group "
                "cannot be removed in the middle of a run; keep the group, and remove its "
                "parameters from it"
            )
        specs = [t.spec for t in new.values()]
        # Added parameters go to the end, so that parameters that are on disk keep their place.
        order = specs if trainables else element_space_order(specs)
        trainables += [new[spec.name] for spec in order]
        now_stepped = [t for t in trainables if is_stepped(t.parameter)]
        self._memory.check([(t.spec.name, t.memory) for t in now_stepped])
        with describing():
            items = describe_model(self.model, groups, trainables, self.shards)
            stored = [item.spec for item in items]
        if self._untaken is None:
            self._untaken = digests_of_untaken(self.model, items)
        if self.shards is not None and self.layout is not None:
            # The ranks step different parameters, and yet must agree on the order of the model.
            known = {tensor.name: place for place, tensor in enumerate(self.layout.model)}
            stored.sort(key=lambda spec: known.get(spec.name, len(known)))
        model = model_order(stored[: len(trainables)], stored[len(trainables) :])
        # A layout without state binds nothing, such as that of weights that were imported alone.
        before = self.layout if self.layout is not None and self.layout.parameters else None
        chunk_elements = before.chunk_elements if before is not None else self._chunk_elements
        shares = before.shares if before is not None else self.shares
        specs = [t.spec for t in trainables]
        state_dtype = self.state_format.state_dtype
        return Layout(tuple(specs), model, chunk_elements, state_dtype, shares), trainables

    def is_current(self, groups: Groups) -> bool:
        """Return whether the layout still fits the groups; fast enough for every step."""
        if self.layout is None or (self.shards is not None and not self.is_agreed(groups)):
            return False
        known = {id(t.parameter): t.spec.group for t in self.trainables}
        for index, group in enumerate(groups):
            for p in group["params"]:
                place = known.get(id(p))
                if place is None:
                    if is_stepped(p) and self.shards is None:
                        return False  # the parameter is new
                elif place != index:
                    return False  # the parameter is in another group now
        if any(group >= len(groups) for _, group, _ in self._kinds):
            return False
        kept = [self.rule.rule(group).arrays for group in groups]
        stored = self.state_format.stored_arrays
        if any(stored(dtype, kept[group]) != arrays for dtype, group, arrays in self._kinds):
            return False
        memory = memories(self.trainables)
        if not self._memory.is_current(list(compress(memory, are_stepped(self.trainables)))):
            return False  # a parameter has other memory, or is trained only from now on
        return all(
            DTYPE_CODES.get(m.dtype) == t.spec.dtype and m.shape == t.spec.shape
            for t, m in zip(self.trainables, memory, strict=True)
        )

    def is_agreed(self, groups: Groups) -> bool:
        """Return whether all ranks have laid out the groups as they are; the same on all ranks.

        A parameter that is new is laid out by the ranks that step a part of it. The other ranks
        have to know as well, because all ranks go on in a new slot then.
        """
        if self._agreed is None:
            return False
        known, arrays = self._agreed
        return arrays == self._arrays(groups) and all(
            known.get(p) == index
            for index, group in enumerate(groups)
            for p in group["params"]
            if is_stepped(p)
        )

    def note_agreed(self, groups: Groups) -> None:
        """Record that all ranks have laid out the groups as they are."""
        known = self._agreed[0] if self._agreed is not None else {}
        known |= {
            p: index for index, group in enumerate(groups) for p in group["params"] if is_stepped(p)
        }
        self._agreed = known, self._arrays(groups)

    def _arrays(self, groups: Groups) -> list[tuple[str, ...]]:
        return [self.rule.rule(group).arrays for group in groups]

    def adopt(
        self,
        layout: Layout,
        trainables: Sequence[Trainable],
        scalars: Sequence[Scalars | None] | None = None,
    ) -> None:
        """Use a layout.

        Args:
            layout: Layout to use from now on.
            trainables: Trainable parameters of the layout, in element-space order.
            scalars: Scalar state of each parameter. If None, known parameters keep theirs and new
                parameters have none.
        """
        self.layout = layout
        self.trainables = list(trainables)
        self._kinds = {(t.spec.dtype, t.spec.group, t.spec.arrays) for t in trainables}
        if scalars is not None:
            self.scalars = list(scalars)
        self.scalars += [None] * (len(trainables) - len(self.scalars))

    def stored(self, groups: Groups) -> list[Stored]:
        """Return the present tensors of ``model.safetensors``, for a checkpoint.

        This logs two facts that users may not expect, once each: without a model, checkpoints have
        no buffers; and a parameter that was unfrozen but is in no group is not trained.

        Raises:
            UnsupportedParameterError: An entry of the model's state dict has changed that could not
                be given back.
        """
        if self.model is None and not self._has_logged_missing_model:
            self._has_logged_missing_model = True
            _log.info(
                "checkpoints have the parameters that the optimizer was given, and no buffers "
                "(such as those of BatchNorm) and no other parameters, because model= was left "
                "out: pass model=model to the optimizer to have the whole state dict in them"
            )
        unfrozen = [n for n, p in self._not_given(groups) if p.requires_grad]
        if unfrozen := [n for n in unfrozen if n in (self._frozen or ())]:
            self._frozen = (self._frozen or set()) - set(unfrozen)
            _log.warning(
                "%r%s: requires gradients now, was frozen when the optimizer was made, and is in "
                "none of its parameter groups, so it is not trained by this optimizer: pass it to "
                "add_param_group()",
                unfrozen[0],
                f" (and {len(unfrozen) - 1} more)" if unfrozen[1:] else "",
            )
        stored = describe_model(self.model, groups, self.trainables, self.shards)
        for name, digest in digests_of_untaken(self.model, stored).items():
            if digest != (self._untaken or {}).get(name):
                how = "set_extra_state()" if is_extra(name) else "_load_from_state_dict()"
                raise UnsupportedParameterError(
                    f"{name!r} in the model's state dict has changed, and load_state_dict() could "
                    f"not give it back: define {how}, or leave out model="
                )
        return stored

    def give_back(self, stored: Sequence[Stored], path: str) -> None:
        """Let the model take what was read of a checkpoint; see `offload.model.loading`."""
        give_back(self.model, stored, path, self.shards)

    def _note_elsewhere(self, groups: Groups, here: Container[torch.Tensor]) -> None:
        """Note which parameters of the groups only other ranks step."""
        if self.shards is None:
            return
        known = {id(t.parameter) for t in self.trainables}
        self._elsewhere = {
            id(p): p
            for group in groups
            for p in group["params"]
            if is_stepped(p) and p not in here and id(p) not in known
        }

    def stepped_elsewhere(self, groups: Groups) -> list[torch.Tensor]:
        """Return the parameters of the groups that only other ranks step, in the groups' order."""
        if not self._elsewhere:
            return []
        return [p for group in groups for p in group["params"] if id(p) in self._elsewhere]

    def named_elsewhere(self, groups: Groups) -> list[tuple[str, torch.Tensor]]:
        """Return `stepped_elsewhere` with the names of the parameters."""
        if not self._elsewhere:
            return []
        return [(name, p) for name, p in self.live(groups).items() if id(p) in self._elsewhere]

    def _not_given(self, groups: Groups) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters of the model that are in no group, with their names."""
        if self.model is None:
            return []
        given = {id(p) for group in groups for p in group["params"]}
        return [(n, p) for n, p in self.model.named_parameters() if id(p) not in given]

    def gradients(self, groups: Groups) -> list[torch.Tensor | None]:
        """Return the gradient of each parameter, in element-space order.

        The entry of a parameter that was removed from its group is None: it is not stepped.

        Raises:
            UnsupportedParameterError: A gradient is sparse or complex.
        """
        present = {id(p) for group in groups for p in group["params"]}
        gradients = [
            (t.parameter.grad if t.shard is None else t.shard.gradient())
            if id(t.parameter) in present
            else None
            for t in self.trainables
        ]
        check_gradients(self.trainables, gradients)
        return gradients

    def with_gradient(self, groups: Groups) -> list[str]:
        """Return the names of all parameters of the groups that have a gradient."""
        named = group_names(groups, self.model, self.shards)
        return [name for name, parameter in named if parameter.grad is not None]

    def live(self, groups: Groups) -> dict[str, torch.Tensor]:
        """Return the parameters of the groups by their names."""
        return dict(group_names(groups, self.model, self.shards))

    def clear(self) -> None:
        """Forget everything but the model, for a restore."""
        self.layout, self.trainables, self.scalars, self._kinds = None, [], [], set()
        self._elsewhere, self._agreed = {}, None


def _changed_error(
    before: ParameterSpec,
    now: ParameterSpec,
    parameter: torch.Tensor,
    model: torch.nn.Module | None,
) -> MismatchError:
    """Return the error for a parameter that was changed in a way that its files cannot follow."""
    found: list[str] = []
    if now.name != before.name:
        gone = model is not None and all(p is not parameter for p in model.parameters())
        found.append(
            "is not in model= any more: its layer was replaced or removed"
            if gone
            else f"is called {now.name!r}"
        )
    if now.dtype != before.dtype:
        found.append(f"is {now.dtype} and was {before.dtype}")
    if now.shape != before.shape:
        found.append(f"has the shape {list(now.shape)} and had {list(before.shape)}")
    if now.cut != before.cut:
        found.append(f"is stepped as {now.stored_name} here and was as {before.stored_name}")
    if now.group != before.group:
        found.append(f"is in parameter group {now.group} and was in {before.group}")
    elif now.arrays != before.arrays and now.dtype == before.dtype:
        found.append(
            f"would keep the state {list(now.arrays)} with the settings of its group (momentum, "
            f"amsgrad, ...), and kept {list(before.arrays)}"
        )
    return MismatchError(
        f"parameter {before.name!r} has changed since the optimizer was made: it "
        f"{', and '.join(found)}. Its state on the drive cannot follow that in the middle of a "
        "run, and nothing was written. Undo the change; or change the model first, and construct "
        "the optimizer after that"
    )
