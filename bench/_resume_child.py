"""Process that resumes and takes one forward; started by `bench.resume`.

python -m bench._resume_child WAY PLACE PARAMETERS TENSORS

Each way ends with parameters in place and an optimizer that could take the next step. The process
prints the system's monotonic clock, in seconds, at the end of the forward.
"""

from __future__ import annotations

import sys
import time
import warnings

import torch

_LR, _WEIGHT_DECAY = 1e-4, 0.1
_STATE = ("exp_avg", "exp_avg_sq")


def main() -> None:
    """Resume in the way that the command line names, and print the time."""
    way, place, num_parameters, num_tensors = sys.argv[1:]
    parameters = _empty(int(num_parameters), int(num_tensors))
    optimizer: torch.optim.Optimizer
    if way == "offload":
        import offload

        optimizer = offload.AdamW(
            parameters, directory=place, keep=1, lr=_LR, weight_decay=_WEIGHT_DECAY
        )
        optimizer.restore()
    else:
        state = _torch_load(place) if way == "torch_load" else _dcp_load(place, parameters)
        if way == "torch_load":
            with torch.no_grad():
                for number, parameter in enumerate(parameters):
                    parameter.copy_(state[f"{number}.parameter"])
        masters = [state[f"{number}.master"] for number in range(len(parameters))]
        optimizer = torch.optim.AdamW(masters, lr=_LR, weight_decay=_WEIGHT_DECAY)
        for number, master in enumerate(masters):
            moments = {name: state[f"{number}.{name}"] for name in _STATE}
            optimizer.state[master] = {"step": torch.tensor(1.0), **moments}
    torch.stack([parameter.detach().sum() for parameter in parameters]).sum().item()
    print(time.perf_counter(), flush=True)
    del optimizer


def _torch_load(place: str) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(place, weights_only=True, mmap=False)
    return state


def _dcp_load(place: str, parameters: list[torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Load into the tensors that training continues with, so that nothing is copied afterwards."""
    from torch.distributed.checkpoint.state_dict_loader import load

    state = {f"{number}.parameter": p.detach() for number, p in enumerate(parameters)}
    for number, parameter in enumerate(parameters):
        for name in ("master", *_STATE):
            state[f"{number}.{name}"] = torch.empty(parameter.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that there is one process: it is meant
        load(state, checkpoint_id=place, no_dist=True)
    return state


def _empty(num_parameters: int, num_tensors: int) -> list[torch.nn.Parameter]:
    each = num_parameters // num_tensors
    sizes = [each] * (num_tensors - 1) + [num_parameters - each * (num_tensors - 1)]
    return [torch.nn.Parameter(torch.empty(size, dtype=torch.bfloat16)) for size in sizes]


if __name__ == "__main__":
    main()
