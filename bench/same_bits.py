"""Values of the update kernel for CPUs, beside those of torch's optimizers, bit by bit.

Every class, flag, dtype and kind of values is stepped once by the kernel and once by torch's own
class on FP32 masters, and values with other bits are counted; random bits, with denormal numbers,
infinities and NaN, are one of the kinds. Each set of instructions runs in a process of its own.

Torch steps the last elements of a tensor by other code than the elements before them. Values in
which its two codes differ from each other are counted by kind, since neither is *the* result.

    python -m bench.same_bits                                   # AVX2, and AVX-512 if there is one
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench._harness import BenchError, Parser, Result, count, run, say
from bench._one_step import (
    FORMS,
    GROUPS,
    KINDS,
    Problem,
    Stepped,
    bits,
    by_torch,
    differences,
    make_problem,
)
from offload.update.kernel import UpdateKernel
from offload.update.kernel_check import choose_kernel
from tests.dying import dying

_ENVIRONMENTS = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "AVX512": {"ATEN_CPU_CAPABILITY": "avx512"},
}
"""Environment of each set of instructions; torch's FP32 square root is MKL's."""

_FLAGS = {
    "AVX2": {"avx2", "fma"},
    "AVX512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
"""Instructions of each set, as in /proc/cpuinfo. torch believes its environment, and dies of the
first instruction that a processor lacks."""

_STEPS = (1, 2, 7, 1000, 100_000)
_FACTORS: tuple[tuple[float, ...], ...] = ((), (2.0**-16,), (2.0**-10, 0.3))
_MULTIPLE = 1024
"""Numbers of elements are multiples of it, so that torch has no last elements of its own."""

_TAIL = 7
"""Elements of a tensor for which torch uses its code for last elements only."""

_TAIL_ELEMENTS = 64 * _TAIL


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print and write the result; or, as a child, compare and print JSON."""
    args = _arguments(arguments)
    if args.child:
        print(json.dumps(_compared(args.values)))
        return
    result = Result("same_bits", args, args.directory)
    num_wrong = 0
    for instructions in args.instructions:
        found = _in_process(instructions, args.values)
        if "reason" in found:
            result.skip(f"{instructions}: {found['reason']}")
            continue
        for name, value in found.items():
            result.fact(f"{instructions}_{name}", value)
        num_wrong += sum(found["differences"].values())
        say(
            f"{instructions}: {found['num_values']:,} values of {found['num_cases']} cases stepped "
            f"by {found['update_code']}; different from torch: {found['differences'] or 'none'}"
        )
        say(f"  torch's code for last elements differs from its other code in: {found['tails']}")
    result.write()
    if num_wrong:
        raise BenchError(f"{num_wrong} values are not those of torch")


def _in_process(instructions: str, num_values: int) -> dict[str, Any]:
    """Compare in a process whose torch uses some instructions; give a reason if none can."""
    missing = _FLAGS[instructions] - {*Path("/proc/cpuinfo").read_text().split()}
    if missing:
        return {"reason": f"this processor lacks {', '.join(sorted(missing))}"}
    command = [sys.executable, "-m", "bench.same_bits", "--child", "--values", str(num_values)]
    done = subprocess.run(
        dying(command),
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **_ENVIRONMENTS[instructions]},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"the process for {instructions} ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    if "reason" not in found and found["capability"] != instructions:
        return {"reason": f"torch uses {found['capability']} on this processor"}
    return found


def _compared(num_values: int) -> dict[str, Any]:
    """Step at least `num_values` values by both codes, and return what was counted."""
    kernels = {}
    for optimizer in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        chosen = choose_kernel(optimizer, "float32")
        if chosen.kernel is None:
            return {"reason": chosen.code}
        kernels[optimizer] = chosen.kernel
    cases = list(product(GROUPS, FORMS, KINDS))
    num = -(-num_values // (len(cases) * _MULTIPLE)) * _MULTIPLE
    wrong = Counter[str]()
    tails = Counter[str]()
    for number, ((optimizer, changes), form, kind) in enumerate(cases):
        one = make_problem(
            optimizer,
            changes,
            form,
            kind,
            num,
            seed=number,
            step=_STEPS[number % len(_STEPS)],
            factors=_FACTORS[number % len(_FACTORS)],
        )
        label = f"{optimizer.__name__} {changes} {form[0]} {form[1]} {kind}"
        kernel: UpdateKernel = kernels[optimizer]
        for name, wrong_values in differences(one, kernel).items():
            wrong[f"{label}: {name}"] = wrong_values
        tails += _tails(one)
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "update_code": choose_kernel(torch.optim.AdamW, "float32").code,
        "num_values": num * len(cases),
        "num_cases": len(cases),
        "differences": dict(wrong),
        "tails": dict(tails),
    }


def _tails(problem: Problem) -> Counter[str]:
    """Count the values in which torch's two codes differ, by kind of difference."""
    begin = _cut(problem, slice(0, _TAIL_ELEMENTS))
    whole = by_torch(begin)
    found = Counter[str]()
    for start in range(0, _TAIL_ELEMENTS, _TAIL):
        part = slice(start, start + _TAIL)
        alone = by_torch(_cut(begin, part))
        for one, other in zip(_values(whole), _values(alone), strict=True):
            found += _kinds_of_difference(one[part], other)
    return found


def _cut(problem: Problem, part: slice) -> Problem:
    return replace(
        problem,
        live=problem.live[part].clone(),
        gradient=problem.gradient[part].clone(),
        master=None if problem.master is None else problem.master[part].clone(),
        state={name: values[part].clone() for name, values in problem.state.items()},
    )


def _values(stepped: Stepped) -> list[torch.Tensor]:
    parameter, master, state = stepped
    return [parameter, master, *state.values()]


def _kinds_of_difference(one: torch.Tensor, other: torch.Tensor) -> Counter[str]:
    differ = bits(one) != bits(other)
    nan = differ & one.isnan() & other.isnan()
    zero = differ & (one == 0) & (other == 0)
    kinds = {"NaN bits": nan, "sign of zero": zero, "value": differ & ~nan & ~zero}
    return Counter({name: int(which.sum()) for name, which in kinds.items() if which.any()})


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("same_bits", __doc__ or "")
    add = parser.add_argument
    add("--values", type=count, default=count("100Mi"), help="of each set (default: 100Mi)")
    add(
        "--instructions",
        type=lambda text: text.split(","),
        default=",".join(_ENVIRONMENTS),
        help="sets of instructions, with commas (default: %(default)s)",
    )
    add("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.read(arguments, quick={"values": count("512Ki")})
    if unknown := set(args.instructions) - _ENVIRONMENTS.keys():
        parser.error(f"--instructions: no {', '.join(sorted(unknown))}")
    args.what = args.what or "-".join(args.instructions)
    return args


if __name__ == "__main__":
    run(main)
