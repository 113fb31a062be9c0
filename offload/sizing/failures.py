"""How often to checkpoint: the cost of an interval, and the interval that wastes least time.

The optimum is the first-order formula of Young ("A first order approximation to the optimum
checkpoint interval", 1974), which Daly's higher-order estimate (2006) approaches if checkpoints are
short beside the mean time to failure (MTTF).
"""

from __future__ import annotations

import math


def overhead(stall_s: float, interval_s: float) -> float:
    """Return the share of an interval of training that a checkpoint's stall adds to it.

    Args:
        stall_s: Seconds for which training stands still for one checkpoint.
        interval_s: Seconds of training from one checkpoint to the next.
    """
    return stall_s / interval_s


def interval_for(stall_s: float, budget: float) -> float:
    """Return the shortest interval in seconds whose overhead is within a budget."""
    return stall_s / budget


def optimal_interval(stall_s: float, mttf_s: float) -> float:
    """Return the interval in seconds that wastes the least time: ``sqrt(2 * stall * MTTF)``."""
    return math.sqrt(2 * stall_s * mttf_s)


def waste(stall_s: float, interval_s: float, mttf_s: float) -> float:
    """Return the share of time that is lost: in checkpoints, and in work that failures undo.

    A failure undoes half an interval on average. The time of restarts is not in it.

    Args:
        stall_s: Seconds for which training stands still for one checkpoint.
        interval_s: Seconds of training from one checkpoint to the next.
        mttf_s: Mean time to failure of the whole run, in seconds.
    """
    return stall_s / interval_s + interval_s / (2 * mttf_s)


def share_in_checkpoints(reduction: float, speedup: float) -> float:
    """Return the share of a run that was spent in checkpoints, seen from what faster ones saved."""
    return reduction / (1 - 1 / speedup)


def memory_fills_after(
    copy_bytes: float, interval_s: float, storage_gbps: float, memory_bytes: float
) -> float:
    """Return the seconds until copies that wait for storage fill the memory; infinity if never."""
    growth = copy_bytes / interval_s - storage_gbps * 1e9
    return memory_bytes / growth if growth > 0 else math.inf
