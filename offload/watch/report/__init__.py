"""A report of a run as one HTML file, which needs no server, no network and no script.

This folder may know the reader of histories, `checkpoint`, `format` and `units`.
"""

from offload.watch.report.page import render
from offload.watch.report.run import Run, look_back

__all__ = ["Run", "look_back", "render"]
