"""FSDP2 of accelerate and of the Trainer, between processes without an accelerator.

accelerate ignores its FSDP plugin on a CPU, and uses DistributedDataParallel instead. torch shards
there as it does elsewhere. `allow` sets what accelerate sets if there is an accelerator, and no
more: all that shards, saves and loads then is accelerate's own code.
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType


def allow() -> None:
    """Make an accelerator with an FSDP plugin use it, from now on in this process."""
    make = AcceleratorState.__init__

    def with_plugin(self: Any, *args: Any, fsdp_plugin: Any = None, **settings: Any) -> None:
        make(self, *args, fsdp_plugin=fsdp_plugin, **settings)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
        if getattr(self, "fsdp_plugin", None) is not None:
            self.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = with_plugin
