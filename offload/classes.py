"""torch's most used classes under their own names; others go through `OffloadedOptimizer`.

Hyper-parameters, their order and their defaults are torch's; after them come the arguments of
`OffloadedOptimizer`. All are written out, so that type checkers and editors know them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.optimizer import ParamsT

from offload.model.process_groups import ProcessGroup
from offload.optimizer import OffloadedOptimizer
from offload.options import Options
from offload.retention.policy import Retention
from offload.stream.drives import Directory


class AdamW(OffloadedOptimizer):
    """`torch.optim.AdamW` with its state on SSD.

    Args:
        params: As for `OffloadedOptimizer`, and so are all arguments from `directory` on.
        lr: Learning rate; this and those up to `fused` are torch's.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decoupled from the gradient.
        amsgrad: Keep the largest average of squares as well, in a third state array.
        maximize: Go up instead of down.
        foreach: Use torch's foreach code; None for what torch chooses.
        capturable: Refused: a step that reads files cannot be captured.
        differentiable: Refused: autograd cannot follow a step whose state is on a drive.
        fused: Refused, except for state that is updated on a device.
        directory: The store.
        model: Gives names, buffers and frozen parameters to checkpoints.
        keep: How many checkpoints to keep, or a policy.
        fresh: Start over in a store that has checkpoints.
        options: How to stream and store.
        process_group: `offload.SEPARATE` for a separate model in each of several processes.

    Raises:
        OffloadError: As `OffloadedOptimizer` does.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        directory: Directory | Sequence[Directory],
        model: torch.nn.Module | None = None,
        keep: int | Retention = 2,
        fresh: bool = False,
        options: Options = Options(),  # noqa: B008  (frozen)
        process_group: ProcessGroup = None,
    ) -> None:
        super().__init__(
            torch.optim.AdamW,
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            directory=directory,
            model=model,
            keep=keep,
            fresh=fresh,
            options=options,
            process_group=process_group,
        )


class Adam(OffloadedOptimizer):
    """`torch.optim.Adam` with its state on SSD.

    Args:
        params: As for `OffloadedOptimizer`, and so are all arguments from `directory` on.
        lr: Learning rate; this and those up to `decoupled_weight_decay` are torch's.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Added to the gradient.
        amsgrad: Keep the largest average of squares as well, in a third state array.
        foreach: Use torch's foreach code; None for what torch chooses.
        maximize: Go up instead of down.
        capturable: Refused: a step that reads files cannot be captured.
        differentiable: Refused: autograd cannot follow a step whose state is on a drive.
        fused: Refused, except for state that is updated on a device.
        decoupled_weight_decay: Decay as `AdamW` does.
        directory: The store.
        model: Gives names, buffers and frozen parameters to checkpoints.
        keep: How many checkpoints to keep, or a policy.
        fresh: Start over in a store that has checkpoints.
        options: How to stream and store.
        process_group: `offload.SEPARATE` for a separate model in each of several processes.

    Raises:
        OffloadError: As `OffloadedOptimizer` does.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        directory: Directory | Sequence[Directory],
        model: torch.nn.Module | None = None,
        keep: int | Retention = 2,
        fresh: bool = False,
        options: Options = Options(),  # noqa: B008  (frozen)
        process_group: ProcessGroup = None,
    ) -> None:
        super().__init__(
            torch.optim.Adam,
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
            directory=directory,
            model=model,
            keep=keep,
            fresh=fresh,
            options=options,
            process_group=process_group,
        )


class SGD(OffloadedOptimizer):
    """`torch.optim.SGD` with its state on SSD.

    Args:
        params: As for `OffloadedOptimizer`, and so are all arguments from `directory` on.
        lr: Learning rate; this and those up to `fused` are torch's.
        momentum: Of the average of gradients, which is the state; there is none without it.
        dampening: Of that average.
        weight_decay: Added to the gradient.
        nesterov: Use Nesterov's momentum.
        maximize: Go up instead of down.
        foreach: Use torch's foreach code; None for what torch chooses.
        differentiable: Refused: autograd cannot follow a step whose state is on a drive.
        fused: Refused, except for state that is updated on a device.
        directory: The store.
        model: Gives names, buffers and frozen parameters to checkpoints.
        keep: How many checkpoints to keep, or a policy.
        fresh: Start over in a store that has checkpoints.
        options: How to stream and store.
        process_group: `offload.SEPARATE` for a separate model in each of several processes.

    Raises:
        OffloadError: As `OffloadedOptimizer` does.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | torch.Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        directory: Directory | Sequence[Directory],
        model: torch.nn.Module | None = None,
        keep: int | Retention = 2,
        fresh: bool = False,
        options: Options = Options(),  # noqa: B008  (frozen)
        process_group: ProcessGroup = None,
    ) -> None:
        super().__init__(
            torch.optim.SGD,
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
            directory=directory,
            model=model,
            keep=keep,
            fresh=fresh,
            options=options,
            process_group=process_group,
        )
