"""The oracle: a torch optimizer over FP32 masters in memory, behind live 16-bit parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers, so that equal means the same bits."""
    detached = tensor.detach()
    if not detached.is_floating_point():
        return detached
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return detached.contiguous().view(sizes[detached.element_size()])


def rounded(master: Tensor, dtype: torch.dtype, split: bool) -> Tensor:
    """Return what a master is as a live parameter.

    Args:
        master: FP32.
        dtype: The live parameter's.
        split: Round bf16 half away from zero, as ``Options(master="split")`` says it does.
    """
    if split and dtype == torch.bfloat16:
        upper = (bits(master) + 0x8000) >> 16
        return upper.to(torch.int16).view(torch.bfloat16).view(master.shape)
    return master.detach().to(dtype)


class Masters(torch.optim.Optimizer):
    """A torch optimizer whose parameters are live ones, and which steps FP32 masters of them.

    Gradients are upcast, the wrapped class steps the masters, and live parameters become what the
    masters round to. An element of a live parameter that is not what its master rounds to has
    been edited: it becomes the master. FP32 parameters are their own masters.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params: Iterable[Any],
        *,
        split: bool = False,
        **hyper: Any,
    ) -> None:
        self.split = split
        self.masters: dict[Tensor, Tensor] = {}
        self.inner: torch.optim.Optimizer | None = None
        groups = [group if isinstance(group, dict) else {"params": group} for group in params]
        super().__init__([dict(group) for group in groups], {})
        inner = optimizer_class([self._mastered(group) for group in self.param_groups], **hyper)
        self.inner = inner
        self.defaults.update(inner.defaults)
        for mine, theirs in zip(self.param_groups, inner.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    def _mastered(self, group: dict[str, Any]) -> dict[str, Any]:
        for parameter in group["params"]:
            if parameter.dtype == torch.float32:
                self.masters[parameter] = parameter
            else:
                self.masters[parameter] = torch.nn.Parameter(parameter.detach().float())
        return {**group, "params": [self.masters[p] for p in group["params"]]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its masters begin as the live parameters."""
        super().add_param_group(param_group)
        if self.inner is not None:
            added = self.param_groups[-1]
            self.inner.add_param_group(self._mastered(dict(added)))
            added.update({k: v for k, v in self.inner.param_groups[-1].items() if k != "params"})

    def live(self) -> list[Tensor]:
        """Return the live parameters, in the order of the groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def effective(self) -> list[Tensor]:
        """Return what the masters would begin the next step as, edits of live parameters included.

        Nothing is changed: an edit counts when a step, or somebody who goes on from a checkpoint,
        finds it. One that is taken back before that was none.
        """
        return [self._effective(parameter, self.masters[parameter]) for parameter in self.live()]

    def _effective(self, parameter: Tensor, master: Tensor) -> Tensor:
        if parameter is master:
            return master.detach().clone()
        old = rounded(master, parameter.dtype, self.split)
        edited = bits(old) != bits(parameter)
        if self.split and parameter.dtype == torch.bfloat16:
            upper = bits(parameter).to(torch.int32) << 16
            low = bits(master) - (bits(old).to(torch.int32) << 16)
            kept = (upper + low).view(torch.float32)
            value = torch.where(kept.isnan(), upper.view(torch.float32), kept)
        else:
            value = parameter.float()
        return torch.where(edited, value.view(master.shape), master.detach())

    @torch.no_grad()
    def absorb(self) -> None:
        """Make edits of live parameters count, of those that are about to be stepped."""
        for parameter, value in zip(self.live(), self.effective(), strict=True):
            if parameter is not self.masters[parameter] and parameter.grad is not None:
                self.masters[parameter].copy_(value)

    @torch.no_grad()
    def take_effective(self) -> None:
        """Make all edits count, as loading a state dict with masters does."""
        for parameter, value in zip(self.live(), self.effective(), strict=True):
            self.masters[parameter].copy_(value)

    @torch.no_grad()
    def publish(self) -> None:
        """Make live parameters what their masters round to."""
        for parameter, master in self.masters.items():
            if parameter is not master and parameter.grad is not None:
                parameter.copy_(rounded(master, parameter.dtype, self.split))

    @torch.no_grad()
    def prepare(self) -> torch.optim.Optimizer:
        """Give the masters hyper-parameters, edits and upcast gradients; return the optimizer."""
        assert self.inner is not None
        self.absorb()
        for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update({key: value for key, value in mine.items() if key != "params"})
        for parameter, master in self.masters.items():
            if parameter is not master:
                gradient = parameter.grad
                master.grad = None if gradient is None else gradient.float()
        return self.inner

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.prepare().step()
        self.publish()
        return loss

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of masters, state and hyper-parameters."""
        assert self.inner is not None
        return {
            "masters": [self.masters[p].detach().clone() for p in self.live()],
            "live": [p.detach().clone() for p in self.live()],
            "effective": self.effective(),
            "inner": copy.deepcopy(self.inner.state_dict()),
            "groups": self.hyper(),
        }

    def hyper(self) -> list[dict[str, Any]]:
        """Return a copy of the hyper-parameters of each group."""
        return [
            copy.deepcopy({key: value for key, value in group.items() if key != "params"})
            for group in self.param_groups
        ]

    @torch.no_grad()
    def load_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Become what a snapshot was made of; live parameters too."""
        assert self.inner is not None
        pairs = zip(self.live(), snapshot["masters"], snapshot["live"], strict=True)
        for parameter, master, live in pairs:
            self.masters[parameter].copy_(master)
            parameter.copy_(live)
        self.inner.load_state_dict(copy.deepcopy(snapshot["inner"]))
        for group, hyper in zip(self.param_groups, snapshot["groups"], strict=True):
            group.update(copy.deepcopy(hyper))
