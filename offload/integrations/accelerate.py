"""Bridge to Hugging Face accelerate.

model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
follow(accelerator, optimizer)
accelerator.save_state("out/checkpoint_0")

`prepare()` calls `state_dict()`, moves all tensors in it to the device, and loads it again. The
state dict of this package's optimizer is a reference without tensors, so nothing is read or moved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import RNG_STATE_NAME

from offload import OffloadError
from offload.integrations.folders import Folders, unwrap

_REMEDY = (
    "Pass follow(..., discard_newer=True) to withdraw them, or remove those folders, or load the "
    "newest one"
)


class Following:
    """Hooks that seal and pin checkpoints for an accelerator's folders until `stop`; see `follow`.

    Args:
        accelerator: Accelerator that saves and loads the folders.
        optimizer: Optimizer of this package, prepared or not.
        discard_newer: Whether loading an older folder may withdraw newer checkpoints in use.
    """

    def __init__(self, accelerator: Accelerator, optimizer: object, *, discard_newer: bool) -> None:
        self._optimizer = unwrap(optimizer, "pass the one that was given to accelerator.prepare()")
        self._folders = Folders(
            "accelerate",
            _is_complete,
            discard_newer=discard_newer,
            remedy=_REMEDY,
            attach="Call follow(accelerator, optimizer) before save_state()",
        )
        self._handles = [
            accelerator.register_save_state_pre_hook(self._before_saving),
            self._optimizer.register_load_state_dict_pre_hook(self._before_loading),
        ]

    def stop(self) -> None:
        """Remove the hooks from the accelerator and the optimizer. Pins stay."""
        for handle in self._handles:
            handle.remove()

    def _before_saving(
        self, models: list[torch.nn.Module], weights: list[Any], output_dir: str
    ) -> None:
        # accelerate removes old folders before this call, and asks for the state dict after it.
        del models, weights
        self._folders.seal(self._optimizer, output_dir)
        self._folders.sync(self._optimizer)

    def _before_loading(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        del optimizer
        self._folders.go_back(self._optimizer, state_dict)


def follow(
    accelerator: Accelerator, optimizer: object, *, discard_newer: bool = False
) -> Following:
    """Make the folders of ``save_state()`` refer to sealed, pinned checkpoints of the store.

    - ``save_state()`` seals the state, and pins it as ``accelerate-<step>``, before the folder
      refers to it. If the folder has been removed, the next save removes the pin.
    - ``load_state()`` continues from exactly the checkpoint that the folder refers to.

    Args:
        accelerator: Accelerator whose ``save_state`` and ``load_state`` are used.
        optimizer: Optimizer of this package, prepared or not.
        discard_newer: Whether loading an older folder may withdraw checkpoints that newer folders
            refer to. Without it, such a load is refused. Checkpoints of folders that were never
            finished, or have been removed, are withdrawn in any case.

    Returns:
        A handle whose method `stop` removes the hooks.

    Raises:
        TypeError: The optimizer is not one of this package.
        OffloadError: The accelerator has several processes.
    """
    if accelerator.num_processes > 1:
        raise OffloadError(
            f"follow(): the accelerator has {accelerator.num_processes} processes, but a store "
            "can have only one writer. Launch one process"
        )
    return Following(accelerator, optimizer, discard_newer=discard_newer)


def _is_complete(folder: str) -> bool:
    """Return whether accelerate has finished a folder: it writes random states last."""
    return os.path.isfile(os.path.join(folder, f"{RNG_STATE_NAME}_0.pkl"))
