"""The meeting of the ranks of an optimizer: how they find each other in the key-value store."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence

from torch.distributed.distributed_c10d import _get_default_store

from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.channel import ChannelLostError
from offload.distributed.agreement.start_name import agree_on_start
from offload.distributed.agreement.torch_channel import TorchChannel
from offload.errors import RanksError

_PREFIX = "offload/"
"""Text before all keys of this package in the store, which other programs use as well."""

_numbers = Counter[str]()
"""Number of optimizers that this process has made, by group of ranks. The n-th optimizer of a group
is the same one on each of its ranks."""


def meet(ranks: Sequence[int], rank: int, timeout_s: float) -> tuple[Agreement, str]:
    """Meet the other ranks of a group that make an optimizer. Collective."""
    # All groups use the same key-value store, so the keys of a group begin with its ranks.
    group = hashlib.sha256(json.dumps([*ranks]).encode()).hexdigest()[:16]
    number = _numbers[group]
    _numbers[group] += 1
    name = f"{group}/{number}"
    channel = TorchChannel(_get_default_store(), _PREFIX, timeout_s=timeout_s)
    try:
        channel.put(_group_key(ranks[rank]), _in_words(ranks))
        channel.enter(name)
        start = agree_on_start(channel, rank, len(ranks), timeout_s)
    except BaseException as error:
        channel.close()
        is_alone = isinstance(error, RanksError) and not isinstance(error, ChannelLostError)
        said = _other_groups(ranks, timeout_s) if is_alone else ""
        if said:
            raise RanksError(f"{error}. {said}") from error
        raise
    channel.enter(start)
    return Agreement(channel, rank, len(ranks), timeout_s=timeout_s), f"{_PREFIX}{name}/{start}/"


def _other_groups(ranks: Sequence[int], timeout_s: float) -> str:
    """Return which ranks of a group were given another group, in words; empty if none was."""
    channel = TorchChannel(_get_default_store(), _PREFIX, timeout_s=timeout_s)
    own = _in_words(ranks)
    try:
        found = {rank: channel.get(_group_key(rank)) for rank in ranks}
    except ChannelLostError:
        return ""
    finally:
        channel.close()
    for rank, group in found.items():
        if group is not None and group != own:
            return (
                f"Rank {rank} of the job has last made an optimizer with the process group of "
                f"ranks {group}, and this one was made with that of ranks {own}: give all ranks of "
                "a group the same process_group="
            )
    return ""


def _group_key(rank: int) -> str:
    return f"group of rank {rank}"


def _in_words(ranks: Sequence[int]) -> str:
    """Return ranks in few words, whatever their number: ``0 to 7, 16``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join(" to ".join(map(str, run)) for run in runs)
