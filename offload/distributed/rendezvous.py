"""The rendezvous of the ranks of an optimizer: how they find each other in the key-value store.

torchrun keeps the store when it restarts the ranks, with all keys of those that have ended. So
all further keys begin with a name that rank 0 has made for this start and announces. Each other
rank answers under that name, with a name of its own process; if it has read the announcement of an
earlier start, it sees the present one soon, and answers again. When all have answered, rank 0
welcomes each process by its name. No earlier rank 0 can have done so: the name is of this start.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Sequence

from torch.distributed.distributed_c10d import _get_default_store

from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.effects import Channel, ChannelLostError
from offload.distributed.agreement.peers import decode, encode, key, names
from offload.distributed.agreement.torch_channel import TorchChannel
from offload.errors import RanksError

_PREFIX = "offload/"
"""Text before all keys of this package in the store, which other programs use as well."""

_LOOKS_PER_LIMIT = 16
"""Times that a waiting rank looks at the others within the limit."""

_LONGEST_LOOK_S = 1.0
"""Most seconds between two looks of rank 0, which gives a sign of progress at each."""

_LONGEST_POLL_S = 0.05
"""Most seconds until a rank notices that it has answered the announcement of an earlier start."""

_ANNOUNCED = "name"

_numbers = Counter[str]()
"""Number of optimizers that this process has made, by group of ranks. The n-th optimizer of a group
is the same one on each of its ranks."""


def rendezvous(ranks: Sequence[int], rank: int, timeout_s: float) -> tuple[Agreement, str]:
    """Meet the other ranks of a group that make an optimizer. Collective.

    Returns their agreement, and the text before the keys of all notes of this optimizer.
    """
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


def agree_on_start(channel: Channel, rank: int, size: int, timeout_s: float) -> str:
    """Meet all ranks, and return the name of this start. Collective."""
    process = uuid.uuid4().hex
    if rank == 0:
        return _lead(channel, process, size, timeout_s)
    return _follow(channel, process, rank, timeout_s)


def _lead(channel: Channel, name: str, size: int, timeout_s: float) -> str:
    answers: dict[int, str] = {}
    look_s = min(timeout_s / _LOOKS_PER_LIMIT, _LONGEST_LOOK_S)
    quiet_s, num_signs = 0.0, 0
    while True:
        channel.put(_ANNOUNCED, encode("name", {"name": name, "signs": num_signs}))
        num_signs += 1
        started_s, num_before = channel.now(), len(answers)
        for rank in range(1, size):
            left_s = max(0.0, started_s + look_s - channel.now())
            if rank not in answers and (answer := channel.wait(key(name, "answer", rank), left_s)):
                answers[rank] = answer
        if len(answers) == size - 1:
            break
        # Time in which this process itself was stopped says nothing of the others.
        passed_s = min(channel.now() - started_s, 2 * look_s)
        quiet_s = quiet_s + passed_s if len(answers) == num_before else 0.0
        if quiet_s >= timeout_s:
            failed = _not_here({*range(1, size)} - answers.keys(), timeout_s)
            channel.put(key(name, "failed"), failed)
            raise RanksError(failed)
    for rank, process in answers.items():
        channel.put(key(name, process), "welcome")
        channel.delete(key(name, "answer", rank))
    return name


def _follow(channel: Channel, process: str, rank: int, timeout_s: float) -> str:
    look_s = min(timeout_s / _LOOKS_PER_LIMIT, _LONGEST_POLL_S)
    first = before = channel.get(_ANNOUNCED)
    quiet_s, answered = 0.0, ""
    while quiet_s < timeout_s:
        started_s = channel.now()
        text = channel.get(_ANNOUNCED)
        if text is None:
            channel.wait(_ANNOUNCED, look_s)
        else:
            if text != before:
                before, quiet_s = text, 0.0
            name = str(decode(text, "name", "rank 0")["name"])
            if name != answered:
                channel.put(key(name, "answer", rank), process)
                if answered:
                    channel.delete(key(answered, "answer", rank))
                answered = name
            if channel.wait(key(name, process), look_s) is not None:
                channel.delete(key(name, process))
                return name
            # An announcement that has not changed since the beginning may be of an earlier start.
            if text != first and (failed := channel.get(key(name, "failed"))):
                raise RanksError(failed)
        quiet_s += min(channel.now() - started_s, 2 * look_s)
    raise RanksError(_not_here({0}, timeout_s))


def _not_here(ranks: set[int], timeout_s: float) -> str:
    return (
        f"the constructor: {names(ranks)} did not come within {timeout_s:g} s. A process may have "
        "ended or hang, or may not have made the optimizer as the others did. Restart the job"
    )
