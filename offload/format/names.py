"""The names of files and directories on storage: of a store, a checkpoint, a slot and a part.

docs/format.md describes which of them lie where, and the content of each.
"""

from __future__ import annotations

import os
import re
from typing import Final

# In the directories of a store: lock and calibration in each, all others in the first only.
LOCK_NAME: Final = "LOCK"
STORE_FILE_NAME: Final = "store.json"
CALIBRATION_NAME: Final = "calibration.json"
"""Name of the file with I/O settings measured on this drive. The file may be removed at any time
and is then made anew."""
RATES_NAME: Final = "placement.json"
"""Name of the file with measured rates of updates. The file may be removed at any time and is then
made anew."""
STATUS_NAME: Final = "status.json"
HISTORY_NAME: Final = "history.jsonl"
"""Names of the files that a run leaves for people, in the first directory only. They may be removed
at any time."""
PINS_NAME: Final = "pins"
TIERS_NAME: Final = "tiers"
"""Name of the directory with records of uploads that have not ended. It may be removed at any time:
an upload that was interrupted then begins anew."""

_SPILL: Final = ".gradients-"
"""Beginning of the name that a file of gradients has for a moment, before it has none."""

# In a checkpoint, and in a slot that may become one.
MANIFEST_NAME: Final = "manifest.json"
MODEL_NAME: Final = "model.safetensors"
SHARD_FOLDER: Final = "model"
"""Name of the folder, in a slot or a part, that holds a shard file of the model and nothing else.
If it is there, there is no file `MODEL_NAME`."""
TRAIN_STATE_NAME: Final = "train_state.safetensors"
QUARANTINE_NAME: Final = "damaged.txt"
"""Name of the file that marks a damaged checkpoint; other checkpoints do not have it."""

# In a part, on a drive that is not the first.
PART_FILE_NAME: Final = "part.json"

# In a part of an owner of state, if several ranks write the store.
TABLE_NAME: Final = "table.json"

_CHECKPOINT: Final = re.compile(r"step-([0-9]{1,19})")
_SLOT: Final = re.compile(r"\.slot-([0-9]+)")
_PART: Final = re.compile(r"part-([1-9][0-9]{0,17})")
_SHARD: Final = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_OWNER: Final = re.compile(r"owner-([1-9][0-9]{0,8})")


def shard_name(owner: int) -> str:
    """Return the name of an owner's shard file of the model, with its folder; torch uses such."""
    return f"{SHARD_FOLDER}/shard-{owner + 1:05}-model-00001-of-00001.safetensors"


def is_shard_name(name: str) -> bool:
    """Return whether a name, without its folder, is that of a shard file of the model."""
    return _SHARD.fullmatch(name) is not None


def checkpoint_name(step: int) -> str:
    """Return the directory name of a checkpoint, given its number of optimizer steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the number of steps in a checkpoint's name; None for any other name."""
    match = _CHECKPOINT.fullmatch(name)
    return None if match is None else int(match[1])


def is_checkpoint_path(path: str) -> bool:
    """Return whether a path ends in a name that a store gives to checkpoints."""
    return step_of(os.path.basename(os.path.abspath(path))) is not None


def slot_name(number: int) -> str:
    """Return the directory name of a slot that is not a checkpoint."""
    return f".slot-{number}"


def is_slot_name(name: str) -> bool:
    """Return whether a name is that of a slot."""
    return _SLOT.fullmatch(name) is not None


def spill_name(identity: str) -> str:
    """Return the name of a file of gradients, from a string that no other file has."""
    return _SPILL + identity


def is_spill_name(name: str) -> bool:
    """Return whether a name is that of a file of gradients."""
    return name.startswith(_SPILL)


def part_name(number: int) -> str:
    """Return the directory name of a part; numbers count from 1."""
    return f"part-{number}"


def part_number(name: str) -> int | None:
    """Return the number in a part's name; None for any other name."""
    match = _PART.fullmatch(name)
    return None if match is None else int(match[1])


def owner_name(owner: int) -> str:
    """Return the name of the directory of an owner, in a directory of the store; counted from 1."""
    return f"owner-{owner}"


def owner_number(name: str) -> int | None:
    """Return the number of the owner whose directory has a name; None for any other name."""
    match = _OWNER.fullmatch(name)
    return None if match is None else int(match[1])
