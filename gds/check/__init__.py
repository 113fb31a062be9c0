"""Examination behind `gds check`: what this machine and a directory can do, and why not more.

This wing may know `buffers`, `contract`, `libc`, `paths` and `probe`. It makes no backend.
"""

from gds.check.examine import Examination, examine
from gds.check.machine import Finding
from gds.check.system import System

__all__ = ["Examination", "Finding", "System", "examine"]
