"""Pushes or pulls once, in a process that a test kills: ``killed.py push|pull FROM TO``."""

from __future__ import annotations

import sys

from offload.tiers import pull, push

if __name__ == "__main__":
    command, source, target = sys.argv[1:]
    if command == "push":
        push(source, target, object_bytes=8192, num_transfers=2, retry_s=0)
    else:
        pull(source, target, num_transfers=2, retry_s=0)
    if "torch" in sys.modules:
        sys.exit("torch was imported")
