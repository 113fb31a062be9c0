"""Loss scaling for fp16 parameters, whose gradients torch's own scaler refuses to unscale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.amp.grad_scaler import OptState

from offload.errors import UnsupportedParameterError
from offload.optimizer import OffloadedOptimizer

_FACTORS = "offload_factors"
"""Key, in a scaler's state of an optimizer, of the factors for gradients in the next step."""


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that also takes fp16 gradients of an `OffloadedOptimizer`.

    Dividing an fp16 gradient by the scale in fp16 would lose the small values that scaling has
    saved. So the gradient stays as backward left it, and `step` multiplies it by the inverse scale
    after upcasting it to FP32. This is done block by block, and takes 0 bytes per parameter. The
    result has the same bits as FP32 masters in memory whose FP32 gradients torch's scaler has
    unscaled. An infinite or NaN gradient skips the step, as in torch: no state is read or written,
    and hooks of the step do not fire.

    If an optimizer has no fp16 gradient, each method does the same as torch's. Arguments and
    ``state_dict()`` are those of torch, too.

    If an optimizer has an fp16 gradient, its gradients of other dtypes stay scaled as well, so that
    all gradients have the same scale.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide gradients by the scale, in place.

        Raises:
            UnsupportedParameterError: There are fp16 gradients. Use `clip_grad_norm_` instead.
        """
        if self._enabled and _has_fp16_gradients(optimizer):
            raise UnsupportedParameterError(
                "unscale_() would lose small fp16 gradients, so step() unscales them in FP32 "
                "instead. To clip them, call scaler.clip_grad_norm_(optimizer, max_norm) in place "
                "of unscale_() and torch.nn.utils.clip_grad_norm_()"
            )
        super().unscale_(optimizer)

    def clip_grad_norm_(
        self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip the norm of an optimizer's unscaled gradients, taken together.

        The result equals that of `unscale_` and `torch.nn.utils.clip_grad_norm_` to the bit. But
        fp16 gradients themselves do not change; the next `step` multiplies them once more. The call
        takes 4 bytes of memory for each element of the largest fp16 parameter.

        Args:
            optimizer: Optimizer that steps next; `unscale_` need not have been called.
            max_norm: Largest norm of the clipped gradients.
            norm_type: Type of the p-norm.

        Returns:
            The norm of the unscaled gradients before clipping.
        """
        if not self._enabled or not _has_fp16_gradients(optimizer):
            if self._enabled and self._stage(optimizer) is not OptState.UNSCALED:
                super().unscale_(optimizer)
            return torch.nn.utils.clip_grad_norm_(_parameters(optimizer), max_norm, norm_type)
        if self._stage(optimizer) is not OptState.UNSCALED:
            super().unscale_(optimizer)
        factors: list[torch.Tensor] = self._per_optimizer_states[id(optimizer)][_FACTORS]
        with torch.inference_mode(False), torch.no_grad():
            norms = [
                torch.linalg.vector_norm(_multiplied(p.grad, factors), norm_type)
                for p in _parameters(optimizer)
                if p.grad is not None
            ]
            total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
            factors.append(torch.clamp(max_norm / (total + 1e-6), max=1.0))
            return cast("torch.Tensor", total)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step with unscaled gradients, unless one of them is infinite or NaN.

        Args:
            optimizer: Any optimizer; `unscale_` need not have been called.
            args: Positional arguments of the optimizer's ``step()``.
            kwargs: Keyword arguments of the optimizer's ``step()``.

        Returns:
            The result of the optimizer's ``step()``; None if the step is skipped.
        """
        late = self._enabled and self._stage(optimizer) is OptState.READY
        if late and _has_fp16_gradients(optimizer):
            super().unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # A scale made in inference mode could not be updated outside of it.
        with torch.inference_mode(False):
            super()._lazy_init_scale_growth_tracker(dev)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        if _has_fp16_gradients(optimizer):
            self._per_optimizer_states[id(optimizer)][_FACTORS] = [inv_scale]
            # With a factor of one, torch only looks for infinite and NaN gradients.
            inv_scale, allow_fp16 = torch.ones_like(inv_scale), True
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        factors = optimizer_state.get(_FACTORS)
        if factors is None or not isinstance(optimizer, OffloadedOptimizer):
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        with optimizer.gradients_times(*(factor.item() for factor in factors)):
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    def _stage(self, optimizer: torch.optim.Optimizer) -> OptState:
        stage: OptState = self._per_optimizer_states[id(optimizer)]["stage"]
        return stage


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _has_fp16_gradients(optimizer: torch.optim.Optimizer) -> bool:
    # torch's own code refuses fp16 gradients of other optimizers.
    return isinstance(optimizer, OffloadedOptimizer) and any(
        p.grad is not None and p.grad.dtype == torch.float16 for p in _parameters(optimizer)
    )


def _multiplied(gradient: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
    gradient = gradient.float()
    for factor in factors:
        gradient = gradient * factor
    return gradient
