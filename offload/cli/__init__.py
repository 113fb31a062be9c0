"""The command ``offload``.

This wing may know the exports of `offload`, and the wings that do not import torch. A module that
imports torch is imported by the command that needs it.
"""

from offload.cli.app import main

__all__ = ["main"]
