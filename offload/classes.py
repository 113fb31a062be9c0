"""torch's most used optimizer classes under their own names; see also `OffloadedOptimizer`.

Hyper-parameters, their order and their defaults are those of torch. The arguments of
`OffloadedOptimizer` follow them. All are written out, so that type checkers and editors know them.
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
        params: Parameters or groups, as for `OffloadedOptimizer`.
        lr: Learning rate. The arguments from this one to `fused` are those of torch.
        betas: Decay rates of the running averages of the gradient and of its square.
        eps: Number added to the denominator.
        weight_decay: Weight decay, decoupled from the gradient.
        amsgrad: Keep the largest average of squares, too, in a third state array.
        maximize: Maximize the objective instead of minimizing it.
        foreach: Use torch's foreach code; None for torch's own choice.
        capturable: Refused if true, since a step that reads files cannot be captured.
        differentiable: Refused if true, since autograd cannot follow a step with state on a drive.
        fused: Refused if true, except with ``placement="device"`` in the options.
        directory: Directory of the store, or its directories on several drives. This and the
            following arguments are those of `OffloadedOptimizer`.
        model: Module that gives names, buffers and frozen parameters to checkpoints.
        keep: Number of checkpoints to keep, or a retention policy.
        fresh: Start over in a store that has checkpoints.
        options: Settings for streaming and storing.
        process_group: Ranks that train the model together; None for the default group, if there
            is one. `offload.SEPARATE` if each of several processes trains a model of its own.

    Raises:
        OffloadError: The optimizer cannot be made; see `OffloadedOptimizer`.
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
        params: Parameters or groups, as for `OffloadedOptimizer`.
        lr: Learning rate. The arguments from this one to `decoupled_weight_decay` are those of
            torch.
        betas: Decay rates of the running averages of the gradient and of its square.
        eps: Number added to the denominator.
        weight_decay: Weight decay, added to the gradient.
        amsgrad: Keep the largest average of squares, too, in a third state array.
        foreach: Use torch's foreach code; None for torch's own choice.
        maximize: Maximize the objective instead of minimizing it.
        capturable: Refused if true, since a step that reads files cannot be captured.
        differentiable: Refused if true, since autograd cannot follow a step with state on a drive.
        fused: Refused if true, except with ``placement="device"`` in the options.
        decoupled_weight_decay: Decouple weight decay from the gradient, as in `AdamW`.
        directory: Directory of the store, or its directories on several drives. This and the
            following arguments are those of `OffloadedOptimizer`.
        model: Module that gives names, buffers and frozen parameters to checkpoints.
        keep: Number of checkpoints to keep, or a retention policy.
        fresh: Start over in a store that has checkpoints.
        options: Settings for streaming and storing.
        process_group: Ranks that train the model together; None for the default group, if there
            is one. `offload.SEPARATE` if each of several processes trains a model of its own.

    Raises:
        OffloadError: The optimizer cannot be made; see `OffloadedOptimizer`.
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
        params: Parameters or groups, as for `OffloadedOptimizer`.
        lr: Learning rate. The arguments from this one to `fused` are those of torch.
        momentum: Decay rate of the running average of gradients, which is the state. With 0
            there is no state.
        dampening: Dampening of the running average.
        weight_decay: Weight decay, added to the gradient.
        nesterov: Use Nesterov's momentum.
        maximize: Maximize the objective instead of minimizing it.
        foreach: Use torch's foreach code; None for torch's own choice.
        differentiable: Refused if true, since autograd cannot follow a step with state on a drive.
        fused: Refused if true, except with ``placement="device"`` in the options.
        directory: Directory of the store, or its directories on several drives. This and the
            following arguments are those of `OffloadedOptimizer`.
        model: Module that gives names, buffers and frozen parameters to checkpoints.
        keep: Number of checkpoints to keep, or a retention policy.
        fresh: Start over in a store that has checkpoints.
        options: Settings for streaming and storing.
        process_group: Ranks that train the model together; None for the default group, if there
            is one. `offload.SEPARATE` if each of several processes trains a model of its own.

    Raises:
        OffloadError: The optimizer cannot be made; see `OffloadedOptimizer`.
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
