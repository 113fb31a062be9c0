"""Names of tensors in a model that is wrapped for many ranks, without the wrappers' prefixes.

The names are those of ``torch.distributed.checkpoint.state_dict``, so that checkpoints do not
depend on how the model is wrapped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

_WRAPPED_AS = {
    ("torch.nn.parallel", "DistributedDataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
}
"""Attribute that holds the wrapped module, by the module that defines the wrapper and its class. If
a defining module is not imported, its class has no instances."""

_CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."
"""Prefix of modules whose activations are recomputed. Some methods of the wrapper remove it."""


def unwrapped_names(model: torch.nn.Module) -> Callable[[str], str]:
    """Return the function that removes wrappers from the names of a model's tensors."""
    wrappers = [
        (getattr(sys.modules[module], name), attribute)
        for (module, name), attribute in _WRAPPED_AS.items()
        if hasattr(sys.modules.get(module), name)
    ]
    prefixes = {
        f"{prefix}.{attribute}" if prefix else attribute
        for prefix, module in model.named_modules(remove_duplicate=False)
        for kind, attribute in wrappers
        if isinstance(module, kind)
    }

    def unwrapped(name: str) -> str:
        """Return a name without the parts that wrappers have put into it."""
        if prefixes:
            parts = name.split(".")
            kept = [
                part
                for number, part in enumerate(parts)
                if ".".join(parts[: number + 1]) not in prefixes
            ]
            name = ".".join(kept)
        return name.replace(_CHECKPOINT_WRAPPER, "")

    return unwrapped
