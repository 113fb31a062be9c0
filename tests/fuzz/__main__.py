"""``python -m tests.fuzz``: run random training programs; exit status 1 if anything was found."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import json
import platform
import sys
import time
from pathlib import Path

import torch

from tests.fuzz import program as programs
from tests.fuzz.runner import isolated, kind_of, prepare, shorten


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument(
        "--also", type=Path, action="append", default=[], help="run the program in this file first"
    )
    parser.add_argument("--shorten", type=float, default=60.0, help="seconds for each finding")
    parser.add_argument("--record", type=Path, help="write the result to this file")
    parser.add_argument("--keep", type=Path, help="write short failing programs to this folder")
    args = parser.parse_args()
    prepare()
    began = time.monotonic()
    ran: collections.Counter[str] = collections.Counter()
    kinds: dict[str, list[str]] = {}
    numbers = range(args.first, args.first + args.count)
    listed = [programs.Program.from_json(path.read_text()) for path in args.also]
    listed += [programs.make(args.seed, number) for number in numbers]
    count = len(listed)
    for program in listed:
        outcome = isolated(program)
        ran.update(outcome.ran)
        if outcome.finding is None:
            continue
        kind = kind_of(outcome.finding)
        kinds.setdefault(kind, []).append(program.name)
        print(f"\n=== program {program.name}, at operation {outcome.at}: {kind}", flush=True)
        if len(kinds[kind]) == 1:
            if args.shorten:
                program, outcome = shorten(program, outcome, args.shorten, print)
            print(program.listing())
            print(outcome.finding, "\n", outcome.trace, flush=True)
            if args.keep:
                args.keep.mkdir(parents=True, exist_ok=True)
                name = program.name.replace(":", "-")
                (args.keep / f"{name}.json").write_text(program.to_json())
    found = sum(len(names) for names in kinds.values())
    seconds = time.monotonic() - began
    print(f"\n{count} programs, {sum(ran.values())} operations, {seconds:.0f} s, {found} findings")
    for kind, names in kinds.items():
        print(f"  {len(names)}: {kind}: {names[:12]}")
    if args.record:
        result = {
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
            "seed": args.seed,
            "first": args.first,
            "programs": count,
            "operations": dict(sorted(ran.items())),
            "findings": found,
            "seconds": round(seconds),
        }
        args.record.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
