"""Change each formula of the kernel in turn, and see whether a test notices.

python -m tests.update_kernel.formulas             # all, some ten minutes
python -m tests.update_kernel.formulas --only lerp  # those with this in their name

The tests use the kernel without its self-check, which would refuse many of these changes.
Changes of the square roots of other processors are tried with MKL_ENABLE_INSTRUCTIONS set to what
makes MKL use them. The result is kept in `formulas.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = "offload/update/kernel/source"
RECORD = Path(__file__).with_name("formulas.json")


TESTS = [
    "tests/update_kernel/test_roots.py",
    "tests/update_kernel/test_fp32_state.py",
    "tests/update_kernel/test_compressed_state.py",
    "tests/update_kernel/test_split_masters.py",
    "tests/update_kernel/test_leaf_digests.py",
]
"""Tests of the kernel's results. Those of its self-check are left out: it notices most changes."""


class Change(NamedTuple):
    """One wrong formula."""

    name: str
    file: str
    old: str
    new: str
    instructions: str = ""
    """Value of MKL_ENABLE_INSTRUCTIONS for the tests."""


CHANGES = [
    Change(
        "lerp-from-the-end",
        "rules.h",
        "is_small ? g.one_minus_beta1 :",
        "true ? g.one_minus_beta1 :",
    ),
    Change("lerp-base", "rules.h", "h.is_small ? m : g", "m"),
    Change(
        "lerp-not-fused",
        "rules.h",
        "V::fma(h.weight, V::sub(g, m), h.is_small ? m : g)",
        "V::add(V::mul(h.weight, V::sub(g, m)), h.is_small ? m : g)",
    ),
    Change(
        "addcmul-as-on-cuda",
        "rules.h",
        "V::fma(V::mul(h.one_minus_beta2, g), g, V::mul(v, h.beta2))",
        "V::fma(h.one_minus_beta2, V::mul(g, g), V::mul(v, h.beta2))",
    ),
    Change(
        "addcmul-not-fused",
        "rules.h",
        "V::fma(V::mul(h.one_minus_beta2, g), g, V::mul(v, h.beta2))",
        "V::add(V::mul(V::mul(h.one_minus_beta2, g), g), V::mul(v, h.beta2))",
    ),
    Change(
        "addcdiv-as-on-cuda",
        "rules.h",
        "V::add(p, V::div(V::mul(h.minus_step_size, m), V::add(root, h.eps)))",
        "V::fma(h.minus_step_size, V::div(m, V::add(root, h.eps)), p)",
    ),
    Change(
        "reciprocal-of-bias-correction",
        "rules.h",
        "V::div(square_root<R>(second), h.root_of_bias_correction2)",
        "V::mul(square_root<R>(second), V::div(V::of(1.0f), h.root_of_bias_correction2))",
    ),
    Change("no-eps", "rules.h", "V::add(root, h.eps)", "root"),
    Change(
        "decay-not-fused",
        "rules.h",
        "else if (h.flags & DECAY)\n    g = V::fma(p, h.weight_decay, g);",
        "else if (h.flags & DECAY)\n    g = V::add(V::mul(p, h.weight_decay), g);",
    ),
    Change(
        "fused-decay-of-a-negated-gradient",
        "rules.h",
        "if (FUSED && (h.flags & MAXIMIZE) && (h.flags & DECAY))",
        "if (false)",
    ),
    Change(
        "no-decoupled-decay",
        "rules.h",
        "if (h.flags & DECOUPLED_DECAY) p = V::mul(p, h.weight_decay);",
        "",
    ),
    Change("amsgrad-without-its-maximum", "rules.h", "second = v_max;", ""),
    Change("amsgrad-minimum-kept", "rules.h", "V::max(v_max, v)", "v"),
    Change(
        "amsgrad-nan",
        "rules.h",
        "V::choose_int(nan, all, V::bits(V::max(v_max, v)))",
        "V::bits(V::max(v_max, v))",
    ),
    Change(
        "sgd-decay-not-fused",
        "rules.h",
        "if (h.flags & DECAY) g = V::fma(p, h.weight_decay, g);\n  if constexpr",
        "if (h.flags & DECAY) g = V::add(V::mul(p, h.weight_decay), g);\n  if constexpr",
    ),
    Change(
        "sgd-buffer-not-fused",
        "rules.h",
        "V::fma(g, h.one_minus_dampening, V::mul(buffer, h.momentum))",
        "V::add(V::mul(g, h.one_minus_dampening), V::mul(buffer, h.momentum))",
    ),
    Change(
        "sgd-nesterov-not-fused",
        "rules.h",
        "V::fma(buffer, h.momentum, g) : buffer",
        "V::add(V::mul(buffer, h.momentum), g) : buffer",
    ),
    Change("sgd-no-nesterov", "rules.h", "h.flags & NESTEROV ?", "false ?"),
    Change(
        "sgd-step-not-fused",
        "rules.h",
        "p = V::fma(g, h.minus_lr, p);",
        "p = V::add(V::mul(g, h.minus_lr), p);",
    ),
    Change(
        "root-correctly-rounded", "root.h", "if constexpr (R == CORRECTLY_ROUNDED) return", "return"
    ),
    Change(
        "root-correctly-rounded-avx2",
        "root.h",
        "if constexpr (R == CORRECTLY_ROUNDED) return",
        "return",
        "AVX2",
    ),
    Change(
        "root-correctly-rounded-sse",
        "root.h",
        "if constexpr (R == CORRECTLY_ROUNDED) return",
        "return",
        "SSE4_2",
    ),
    Change(
        "root-tiny",
        "root.h",
        "const Mask tiny = V::less(V::of(0x1p39f), estimate);",
        "const Mask tiny = V::less(estimate, V::of(0.0f));",
    ),
    Change(
        "root-avx2-one-step",
        "root.h",
        "out = V::fma(V::fnma(s1, s1, x), h1, s1);",
        "out = s1;",
        "AVX2",
    ),
    Change(
        "root-sse-fused", "root.h", "V::sub(half, V::mul(s, h))", "V::fnma(s, h, half)", "SSE4_2"
    ),
    Change(
        "root-sse-last",
        "root.h",
        "R == MKL_SSE ? 0x7F7FF000u : 0x7F7FFFFFu",
        "0x7F7FFFFFu",
        "SSE4_2",
    ),
    Change(
        "root-of-negative",
        "root.h",
        "V::choose(V::less(x, zero), V::from_bits(V::of_int(QUIET_NAN)), V::sqrt(x))",
        "V::from_bits(V::of_int(0))",
    ),
    Change("bf16-ties", "values.h", "V::add_int(V::of_int(0x7FFF), is_odd)", "V::of_int(0x8000)"),
    Change(
        "bf16-nan", "values.h", "V::choose_int(V::is_nan(x), V::of_int(0xFFFF), rounded)", "rounded"
    ),
    Change("no-edits", "values.h", "if (__builtin_expect(V::any(edited), 0))", "if (false)"),
    Change(
        "edits-by-bf16-only",
        "values.h",
        "dtype == BF16 ? bf16_bits(exact) : V::fp16_bits(exact)",
        "bf16_bits(exact)",
    ),
    Change(
        "split-nan",
        "values.h",
        "V::from_bits(V::choose_int(nan, V::shift_left<16>(bits), joined))",
        "V::from_bits(joined)",
    ),
    Change(
        "split-ties",
        "values.h",
        "V::add_int(b, V::of_int(0x8000))",
        "V::add_int(b, V::of_int(0x7FFF))",
    ),
    Change(
        "split-sign",
        "values.h",
        "V::load_i16(as_u16(master) + i)",
        "V::load_u16(as_u16(master) + i)",
    ),
    Change("split-quiet", "values.h", "const I b = V::bits(quiet(x));", "const I b = V::bits(x);"),
    Change(
        "gradient-factor-once",
        "update.cpp",
        "k < job.num_factors; k++) g",
        "k < job.num_factors && k < 1; k++) g",
    ),
    Change("no-maximize", "update.cpp", "if (flags & MAXIMIZE) g", "if (false) g"),
    Change(
        "random-number-of-another-element",
        "update.cpp",
        "element + k * V::LANES, run.keys[n]",
        "element, run.keys[n]",
    ),
    Change(
        "random-key-of-another-array",
        "update.cpp",
        "element + k * V::LANES, run.keys[n]",
        "element + k * V::LANES, run.keys[0]",
    ),
    Change(
        "random-halves",
        "state.h",
        "V::choose_int(is_odd, V::shift_right<16>(h), V::bit_and(h, V::of_int(0xFFFF)))",
        "V::shift_right<16>(h)",
    ),
    Change("random-hash", "state.h", "h = V::bit_xor(h, V::shift_right<15>(h));", ""),
    Change(
        "random-nan",
        "state.h",
        "V::add_int(V::bits(quiet(x)), random)",
        "V::add_int(V::bits(x), random)",
    ),
    Change("scale-not-up", "state.h", "largest + 0x7FFD", "largest"),
    Change("scale-too-large", "state.h", "if (largest >= TOO_LARGE) return 0x7FC0;", ""),
    Change(
        "codes-of-nan",
        "state.h",
        "if (s != s) {\n    memset(codes, 0, GROUP);\n    return;\n  }\n  const F divisor",
        "const F divisor",
    ),
    Change("signed-zero-scale", "state.h", "bits_of(s) ? s : 0x1p-149f", "s"),
    Change("unsigned-smallest-code", "state.h", "V::max_unsigned(code, least)", "code"),
    Change(
        "unsigned-negative",
        "state.h",
        "b = V::choose_int(V::greater_int(V::of_int(0), b), V::of_int(QUIET_NAN), b);",
        "",
    ),
    Change(
        "unsigned-minus-zero",
        "state.h",
        "b = V::choose_int(V::differ(b, V::of_int(SIGN)), b, V::of_int(0));",
        "",
    ),
    Change("unsigned-tiny-scale", "state.h", "s < 0x1p-100f ? 0x1p-100f : s", "s"),
    Change("int8-rest-counts", "update.cpp", "y[n] = V::choose(counts, y[n], V::of(0.0f));", ""),
    Change("rest-left-out", "update.cpp", "if (i < end) step_rest", "if (false) step_rest"),
    Change("digest-of-a-part", "leaves.h", "if (start_ % LEAF == 0) {", "if (!is_open_) {"),
    Change(
        "digest-over-a-gap",
        "leaves.h",
        "      digest();\n      is_open_ = false;\n      start_ = start;",
        "      digest();\n      start_ = start;",
    ),
    Change(
        "last-leaf",
        "leaves.h",
        "const size_t end = whole < array_.num_bytes ?",
        "const size_t end = true ?",
    ),
]


REDUNDANT = {
    "signed-zero-scale": "0 / 0 is NaN, whose lowest byte is the code 0 as well",
    "unsigned-tiny-scale": "it is 0 only if all roots are; inf / inf has the lowest byte 0, too",
    "unsigned-negative": "a second moment is a sum of squares, and never negative",
    "unsigned-minus-zero": "a sum of squares is never -0.0",
    "int8-rest-counts": "the copy of a rest ends in zeros, whose moments stay 0; they become NaN "
    "only with a factor, hyper-parameter or scale that leaves no moment of the group finite",
}
"""Changes that no test need notice, and why. The last one changes a guard against copies that end
in other values than zeros. The code of the others is that of `offload.update.coding.blocks8`."""


def main() -> int:
    """Try the changes; return how many were not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.update_kernel.formulas")
    parser.add_argument("--only", default="", help="changes with this in their name")
    parser.add_argument("--new", action="store_true", help="changes that are not recorded")
    parser.add_argument("--check", action="store_true", help="only whether every change fits")
    args = parser.parse_args()
    chosen = [change for change in CHANGES if args.only in change.name]
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if args.new:
        chosen = [change for change in chosen if not known.get(change.name)]
    if args.check:
        return sum(not _fits(change, ROOT) for change in chosen)
    found = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        copy = Path(scratch, "checkout")
        _copy(copy)
        for change in chosen:
            found[change.name] = _noticed_by(change, copy)
            print(f"{change.name}: {found[change.name] or 'NOT NOTICED'}", flush=True)
    names = [change.name for change in CHANGES]
    kept = {name: (known | found)[name] for name in names if name in known | found}
    RECORD.write_text(json.dumps(kept, indent=2) + "\n")
    return sum(not test for name, test in found.items() if name not in REDUNDANT)


def _copy(to: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, names.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)


def _fits(change: Change, root: Path) -> bool:
    if (root / SOURCE / change.file).read_text().count(change.old) == 1:
        return True
    print(f"{change.name}: does not fit {change.file} once")
    return False


def _noticed_by(change: Change, copy: Path) -> str:
    """Return the test that fails with a change; empty if none does."""
    path = copy / SOURCE / change.file
    original = path.read_text()
    if not _fits(change, copy):
        raise SystemExit(1)
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_WAIT_POLICY": "PASSIVE"}
    if change.instructions:
        environment["MKL_ENABLE_INSTRUCTIONS"] = change.instructions
    try:
        path.write_text(original.replace(change.old, change.new))
        build = (
            "import hatch_build, pathlib; hatch_build.build(pathlib.Path('offload/update/kernel'))"
        )
        subprocess.run([sys.executable, "-c", build], cwd=copy, env=environment, check=True)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-p",
                "no:cacheprovider",
                *TESTS,
            ],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(original)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    return failed[0].split()[1].partition("[")[0] if failed else ""


if __name__ == "__main__":
    sys.exit(main())
