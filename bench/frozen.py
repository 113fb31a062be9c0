"""Bytes that a checkpoint writes if only a small part of the model is trained, as with LoRA.

``model.safetensors`` is one whole file in each checkpoint. One process trains, seals and ends, and
another process resumes. From the fourth seal on, and from the first seal after the resume, a seal
writes the trained parameters and less than 4 MiB. Bytes are the kernel's count of the process's
writes. With ``--device``, the bytes written to the block device are recorded as well; they mean
something only if no other process writes to the device.

    python -m bench.frozen --directory DIR
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench._frozen_child import DTYPES
from bench._harness import BenchError, Parser, Result, require_space, run, say, scratch, size
from bench._statistics import median
from tests.dying import dying

_MIB = 1 << 20
_MARGIN_BYTES = 4 * _MIB
_NUM_SLOTS = 3
"""Number of slots with ``keep=2``; each is written in full once."""

_CHILD_TIMEOUT_S = 1800


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    with scratch(args.directory) as directory:
        require_space(directory, (_NUM_SLOTS + 1) * int(args.frozen_mib * _MIB))
        result = Result("frozen", args, directory)
        store = os.path.join(directory, "store")
        first = _process(args, store, _NUM_SLOTS + args.rounds)
        resumed = _process(args, store, args.rounds)
        if not resumed["resumed_from"]:
            raise BenchError("the second process has not resumed: nothing was measured")
        allowed = first["trained_bytes"] + _MARGIN_BYTES
        for name in ("trained_bytes", "frozen_bytes"):
            result.fact(name, first[name])
        phases = {
            "each_slot_for_the_first_time": first["seals"][:_NUM_SLOTS],
            "from_the_fourth_seal_on": first["seals"][_NUM_SLOTS:],
            "after_a_resume": resumed["seals"],
        }
        for name, seals in phases.items():
            _record(result, name, seals)
        for name in ("from_the_fourth_seal_on", "after_a_resume"):
            when = name.replace("_", " ")
            result.claim(
                f"bytes that a seal writes {when}, beside what is trained + 4 MiB",
                [seal["written_bytes"] / allowed for seal in phases[name]],
                numerator=f"{name}_written_bytes",
                denominator=f"{allowed} bytes",
                limit=args.limit,
                largest=max(seal["written_bytes"] for seal in phases[name]) / allowed,
            )
        result.write()


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("frozen", __doc__ or "")
    add = parser.add_argument
    add("--frozen-mib", type=float, default=1024, help="in bf16 (default: %(default)s)")
    add("--trained-mib", type=float, default=1, help="beside it (default: %(default)s)")
    add("--dtype", choices=list(DTYPES), default="bfloat16", help="of what is trained")
    add("--device", default="", help="the block device that DIR is on, by its name in /sys/block")
    add("--limit", type=float, default=1.0, help="of the bytes, beside what is trained + 4 MiB")
    args = parser.read(arguments, quick={"frozen_mib": 8, "trained_mib": 0.125})
    args.what = args.what or f"{args.frozen_mib:g}MiB-{args.trained_mib:g}MiB-{args.dtype}"
    return args


def _process(args: argparse.Namespace, store: str, seals: int) -> dict[str, Any]:
    """Run the process that trains, and return its measurements."""
    sizes = [str(int(mib * _MIB)) for mib in (args.frozen_mib, args.trained_mib)]
    command = [sys.executable, "-m", "bench._frozen_child", store, *sizes, str(seals)]
    done = subprocess.run(
        dying([*command, args.dtype, args.device]),
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=_CHILD_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise BenchError(f"the process that trains failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _record(result: Result, phase: str, seals: list[dict[str, float]]) -> None:
    """Record and print the costs of the seals of a phase."""
    kinds = ["written_bytes", "read_bytes", "seal_s"]
    if any(seal["device_bytes"] for seal in seals):
        kinds.append("device_bytes")
    samples = {kind: [seal[kind] for seal in seals] for kind in kinds}
    result.add_samples({f"{phase}_{kind}": values for kind, values in samples.items()})
    written, read = (
        ", ".join(size(nbytes) for nbytes in samples[kind])
        for kind in ("written_bytes", "read_bytes")
    )
    say(f"{phase.replace('_', ' ')}: median of {median(samples['seal_s']):.3f} s")
    say(f"  written: {written}")
    say(f"  read: {read}")


if __name__ == "__main__":
    run(main)
