"""A clock of ranks that runs faster once they only wait for one that does not come.

Until then they have the long limit of `tests.limits`, which no rank exceeds that is at work. What
is left of it then is waited for in vain, and a test need not wait as long.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.limits import SHORT_AGREEMENT_S


def hurry_after(file: Path, limit_s: float) -> None:
    """Let the time of this process pass faster from when a file is there.

    Args:
        file: The file.
        limit_s: Limit that passes within `SHORT_AGREEMENT_S` then; not above that, nothing changes.
    """
    faster = limit_s / SHORT_AGREEMENT_S - 1
    if faster <= 0:
        return
    plain, since = time.monotonic, list[float]()

    def monotonic() -> float:
        """Return the time of a clock that never goes back."""
        now = plain()
        if not since and file.exists():
            since.append(now)
        return now + faster * (now - since[0]) if since else now

    time.monotonic = monotonic


def flag(folder: Path) -> Path:
    """Return the file of this job which says that a rank does not come any more."""
    return folder / f"hurry-{os.environ.get('MASTER_PORT', '')}"
