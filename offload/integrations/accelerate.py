"""Bridge to Hugging Face accelerate.

model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
follow(accelerator, optimizer)
accelerator.save_state("out/checkpoint_0")

`prepare()` calls `state_dict()`, moves all tensors in it to the device, and loads it again. The
state dict of this package's optimizer is a reference without tensors, so nothing is read or moved.

With FSDP2, accelerate saves and loads the optimizer before it calls any hook. So what it saves then
is not used: the reference to the sealed checkpoint is in a file of this module in the same folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import OPTIMIZER_NAME, RNG_STATE_NAME, DistributedType

from offload import MismatchError, OffloadedOptimizer, OffloadError, Position
from offload.integrations.first_rank import decide, num_hosts_of_launcher, require_ranks
from offload.integrations.folders import Folders, unwrap
from offload.integrations.listed_folders import positions_in_file

REFERENCE_NAME = "offload_reference.bin"
"""File with the reference in a folder of FSDP2."""

_OPTIMIZER_FILE = re.compile(rf"{OPTIMIZER_NAME}(_\d+)?\.bin")

_REMEDY = (
    "Pass follow(..., discard_newer=True) to withdraw them, or remove those folders, or load the "
    "newest one"
)

_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_ATTACH = "Call follow(accelerator, optimizer) before save_state()"


class Following:
    """Hooks that seal and pin checkpoints for folders of an accelerator until `stop`."""

    def __init__(
        self, accelerator: Accelerator, optimizer: OffloadedOptimizer, *, discard_newer: bool
    ) -> None:
        self._optimizer = optimizer
        self._folders = Folders(
            "accelerate",
            _positions_in,
            discard_newer=discard_newer,
            remedy=_REMEDY,
            attach=_ATTACH,
        )
        self._is_loading = False
        self._is_stopped = False
        self._is_saving = False
        """Whether `_saving` is running."""
        self._is_writing = False
        """Whether the state has been sealed for a folder that accelerate has not finished yet."""
        self._save_state = accelerator.save_state
        self._load_state = accelerator.load_state
        accelerator.save_state = self._saving
        accelerator.load_state = self._loading
        self._accelerator = accelerator
        self._is_sharded = bool(accelerator.is_fsdp2)
        self._optimizer.torch_form = self._is_sharded
        self._optimizer.warn_unsealed = not self._is_sharded
        self._handles = [
            accelerator.register_save_state_pre_hook(self._before_saving),
            accelerator.register_load_state_pre_hook(self._after_loading_shards),
            self._optimizer.register_load_state_dict_pre_hook(self._before_loading),
        ]
        self._folders.sync(self._optimizer)  # before a step may recycle what a folder refers to

    def stop(self) -> None:
        """Remove the hooks from the accelerator and the optimizer. Pins stay."""
        self._is_stopped = True
        self._optimizer.warn_unsealed = True
        for handle in self._handles:
            handle.remove()

    def _before_saving(
        self, models: list[torch.nn.Module], weights: list[Any], output_dir: str
    ) -> None:
        # accelerate removes old folders before this call, and asks for the state dict after it.
        del models, weights
        if self._is_writing:  # the last save has failed
            self._folders.sync(self._optimizer)
        self._is_writing = True
        self._folders.seal(self._optimizer, output_dir, finishes=self._is_saving)
        if self._is_sharded:
            reference = self._optimizer.state_dict()
            decide(
                self._optimizer,
                lambda: torch.save(reference, os.path.join(output_dir, REFERENCE_NAME)),
            )

    def _saving(self, *args: Any, **kwargs: Any) -> Any:
        """Save as accelerate does, and finish: accelerate has no hook for the end of a save."""
        self._is_saving = True
        try:
            result = self._save_state(*args, **kwargs)
        finally:
            self._is_saving = False
        if self._is_writing and not self._is_stopped:
            self._folders.finish(self._optimizer)
            self._is_writing = False
        return result

    def _loading(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load as accelerate does, from a folder that is written anew if it is missing."""
        if not self._is_stopped:
            where = self._accelerator.project_dir
            if input_dir is not None:
                parent, name = os.path.split(os.path.abspath(os.path.expanduser(input_dir)))
                if not os.path.lexists(os.path.join(parent, name)):
                    self._folders.write_missing(self._optimizer, parent, name)
            elif where and not os.path.lexists(parent := os.path.join(where, "checkpoints")):
                self._folders.write_missing(self._optimizer, parent, "")
        result = self._load_state(input_dir, *args, **kwargs)
        if not self._is_stopped:
            self._folders.sync(self._optimizer)  # before a save withdraws what the folder refers to
        return result

    def _after_loading_shards(self, models: list[torch.nn.Module], input_dir: str) -> None:
        """Load the reference, if accelerate has loaded shards without calling a hook."""
        del models
        self._folders.use(os.path.dirname(os.path.abspath(input_dir)))
        if not self._is_sharded:
            return

        def read() -> Any:
            """Return the reference that was saved in the folder."""
            try:
                return torch.load(os.path.join(input_dir, REFERENCE_NAME), weights_only=True)
            except FileNotFoundError:
                raise MismatchError(
                    f"{input_dir} has no {REFERENCE_NAME}: it was saved without sealing the state, "
                    f"which is lost. {_ATTACH}"
                ) from None

        reference = decide(self._optimizer, read)
        self._folders.go_back(self._optimizer, reference)
        self._is_loading = True
        try:
            self._optimizer.load_state_dict(reference)
        finally:
            self._is_loading = False

    def _before_loading(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        del optimizer
        if self._is_loading:
            return None
        if self._is_sharded and "state" in state_dict:  # what accelerate has saved before the seal
            return self._optimizer.state_dict()  # keeps the present state, until the other hook
        self._folders.go_back(self._optimizer, state_dict)
        return None


def follow(
    accelerator: Accelerator, optimizer: object, *, discard_newer: bool = False
) -> Following:
    """Make the folders of ``save_state()`` refer to sealed, pinned checkpoints of the store.

    - ``save_state()`` seals the state, and pins it as ``accelerate-<step>``, before the folder
      refers to it. If the folder has been removed, the next save removes the pin.
    - ``load_state()`` continues from exactly the checkpoint that the folder refers to.

    With several processes, all of them call this, after ``prepare()``, and make the same calls of
    the accelerator.

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
        OffloadError: The processes of the accelerator are not the optimizer's ranks, or are on
            several hosts; or the model is divided in a way that is not supported.
    """
    inner = unwrap(optimizer, "pass the one that was given to accelerator.prepare()")
    require_ranks(inner, accelerator.num_processes, num_hosts_of_launcher(), "accelerate")
    kind = accelerator.distributed_type
    if kind not in _SUPPORTED and not accelerator.is_fsdp2:
        raise OffloadError(
            f"follow(): accelerate trains with {kind.value}, which is not supported: use "
            "DistributedDataParallel, or FSDP2 by FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    return Following(accelerator, inner, discard_newer=discard_newer)


def _positions_in(folder: str) -> list[Position] | None:
    """Return the positions that a finished folder refers to.

    None means that accelerate has not finished the folder: it writes random states last.

    Raises:
        OSError: The folder cannot be read, which says nothing about what it has.
    """
    names = os.listdir(folder)
    if f"{RNG_STATE_NAME}_0.pkl" not in names:
        return None
    if REFERENCE_NAME in names:
        return positions_in_file(os.path.join(folder, REFERENCE_NAME))
    files = [name for name in names if _OPTIMIZER_FILE.fullmatch(name)]
    found = [positions_in_file(os.path.join(folder, name)) for name in files]
    if not found or None in found:
        return None
    return [position for each in found for position in each or ()]
