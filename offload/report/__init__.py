"""A report of a run as one HTML file, which needs no server, no network and no script.

This wing may know `record`, whose history it reads, `checkpoint`, `format` and `units`. It never
imports torch.
"""

from offload.report.page import render
from offload.report.run import Run, look_back

__all__ = ["Run", "look_back", "render"]
