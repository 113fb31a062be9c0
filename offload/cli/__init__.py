"""The command ``offload``.

This wing may know what `offload` exports, and the wings that do not import torch; whatever does is
imported by the command that needs it.
"""

from offload.cli.app import main

__all__ = ["main"]
