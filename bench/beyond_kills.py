"""A model that is on the drive only, killed at random moments: memory, and the bits after resumes.

The process has parameters, gradients and state on the drive. Its peak memory is compared with the
parameters alone, and its digest with that of a training in memory that nobody kills.

    python -m bench.beyond_kills --directory DIR
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench._harness import BenchError, Parser, Result, require_space, run, say, scratch, size

_ROOT = Path(__file__).parent.parent


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill, compare, print and write the result."""
    args = _arguments(arguments)
    with scratch(args.directory) as directory:
        require_space(directory, args.layers * 60_000_000)
        result = Result("beyond_kills", args, directory)
        plain = _train("plain", f"{directory}/plain", args)
        chance = random.Random(args.seed)
        kills = 0
        while kills < args.kills:
            if _train("drive", f"{directory}/drive", args, chance.uniform(4, args.seconds)) is None:
                kills += 1
                say(f"{kills} kills")
            else:
                raise BenchError(f"the training ended after {kills} kills: give more --steps")
        found = _train("drive", f"{directory}/drive", args)
        if plain is None or found is None or found["digest"] != plain["digest"]:
            raise BenchError("the parameters differ from those of a training in memory")
        result.fact("kills", kills)
        result.fact("same_bits", value=True)
        result.fact("parameter_bytes", found["parameters"])
        result.fact("peak_bytes_on_the_drive", found["above"])
        result.fact("peak_bytes_in_memory", plain["above"])
        result.fact("parameters_beside_peak", found["parameters"] / found["above"])
        say(
            f"{size(found['parameters'])} of parameters: {size(found['above'])} of memory on the "
            f"drive, {size(plain['above'])} in memory; {kills} kills, the same bits"
        )
        result.write()


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("beyond_kills", __doc__ or "")
    add = parser.add_argument
    add("--layers", type=int, default=150, help="blocks of 1.8 M parameters (default: %(default)s)")
    add("--steps", type=int, default=30, help="steps of the training (default: %(default)s)")
    add("--kills", type=int, default=30, help="kills (default: %(default)s)")
    add("--seconds", type=float, default=25, help="longest life before a kill")
    add("--seed", type=int, default=1, help="of the moments")
    args = parser.read(arguments, quick={"layers": 2, "steps": 4, "kills": 1, "seconds": 5})
    args.what = args.what or f"{args.layers}-blocks"
    return args


def _train(
    kind: str, directory: str, args: argparse.Namespace, life_s: float | None = None
) -> dict[str, Any] | None:
    """Run the training in a process of its own; return what it says, or None if it was killed."""
    command = [
        sys.executable,
        "-m",
        "tests.blocks.beyond",
        kind,
        directory,
        args.steps,
        args.layers,
    ]
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, text=True, cwd=_ROOT
    ) as process:
        if life_s is not None:
            time.sleep(life_s)
            process.kill()
        said = process.communicate()[0]
    if process.returncode == -9:
        return None
    if process.returncode:
        raise BenchError(f"the training has failed with the status {process.returncode}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


if __name__ == "__main__":
    run(main)
