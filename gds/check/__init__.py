"""What this machine and a directory can do, and why not more: the doctor behind `gds check`.

This wing may know `probe`, `places`, `paths`, `buffers` and `contract`. It makes no backend.
"""

from gds.check.examine import Examination, examine
from gds.check.finding import Finding
from gds.check.system import System

__all__ = ["Examination", "Finding", "System", "examine"]
