"""Does one thing with a tier, in a process that a test kills.

killed.py push|pull FROM TO     uploads or downloads a checkpoint
killed.py restore FROM TO       restores from the tier FROM into the directory TO, and waits
"""

from __future__ import annotations

import sys
import threading

from offload.tiers import pull, push


def restore(tier: str, directory: str) -> None:
    """Restore from a tier, say so, and wait for the signal."""
    from tests.stores.small import make_model, make_optimizer
    from tests.tiers.conftest import SETTINGS

    optimizer = make_optimizer(
        make_model(64, 40), settings={**SETTINGS, "tier": tier}, directory=directory, keep=3
    )
    optimizer.restore()
    print("restored", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    command, source, target = sys.argv[1:]
    if command == "restore":
        restore(source, target)
    elif command == "push":
        push(source, target, object_bytes=8192, num_transfers=2, retry_s=0)
    else:
        pull(source, target, num_transfers=2, retry_s=0)
    if "torch" in sys.modules:
        sys.exit("torch was imported")
