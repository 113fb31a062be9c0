"""torch's own CUDA arithmetic, from the headers it is installed with, compiled for the CPU.

The compiler contracts products and sums as nvcc does by default (`test_nvrtc.py` shows it of the
latter), so this is what torch computes on a device.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.device.host import build

_HEADERS = Path(torch.__file__).parent / "include" / "ATen" / "native"

_PREFIX = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <type_traits>
"""

_QUALIFIERS = """
#define C10_DEVICE
#define C10_HOST_DEVICE
#define C10_ALWAYS_INLINE inline
#define __forceinline__ inline
"""

ADAM_ENTRY = """
template <ADAM_MODE mode, bool amsgrad>
void step(float *arrays[5], uint64_t num, const float *h, float step, bool maximize) {
  constexpr int depth = amsgrad ? 5 : 4;
  const float correction1 = 1 - powf(h[1], step), correction2 = 1 - powf(h[2], step);
  for (uint64_t i = 0; i < num; i++) {
    float r[depth][kILP];
    for (int d = 0; d < depth; d++) r[d][0] = arrays[d][i];
    adam_math<float, float, depth, mode, amsgrad>(r, h[0], h[1], h[2], h[3], h[4], maximize,
        nullptr, nullptr, correction1, std::sqrt(correction2));
    for (int d = 0; d < depth; d++) arrays[d][i] = r[d][0];
  }
}
extern "C" void adam(float *arrays[5], uint64_t num, const float *h, float s, bool decoupled,
                     bool amsgrad, bool maximize) {
  if (decoupled && amsgrad) step<ADAM_MODE::ADAMW, true>(arrays, num, h, s, maximize);
  else if (decoupled) step<ADAM_MODE::ADAMW, false>(arrays, num, h, s, maximize);
  else if (amsgrad) step<ADAM_MODE::ORIGINAL, true>(arrays, num, h, s, maximize);
  else step<ADAM_MODE::ORIGINAL, false>(arrays, num, h, s, maximize);
}
"""

_FOREACH_ENTRY = """
extern "C" void lerp_all(float *a, const float *b, uint64_t num, float weight) {
  for (uint64_t i = 0; i < num; i++) a[i] = lerp<float, float>(a[i], b[i], weight);
}
extern "C" void addcmul_all(float *a, const float *b, const float *c, uint64_t num, float value) {
  for (uint64_t i = 0; i < num; i++)
    a[i] = pointwise_op_impl<float>(a[i], b[i], c[i], value, std::multiplies<float>());
}
extern "C" void addcdiv_all(float *a, const float *b, const float *c, uint64_t num, float value) {
  for (uint64_t i = 0; i < num; i++)
    a[i] = pointwise_op_impl<float>(a[i], b[i], c[i], value, std::divides<float>());
}
"""


def adam_math() -> str:
    """Return the source of torch's `adam_math`, or skip the test."""
    text = _header("cuda/fused_adam_utils.cuh")
    mode = re.search(r"enum class ADAM_MODE.*?;", text)
    indexes = re.findall(r"^constexpr uint8_t k\w+Idx = \d;", text, re.MULTILINE)
    body = _function(text, r"template <\s*typename scalar_type,\s*typename opmath_t", "adam_math(")
    if mode is None or len(indexes) != 5 or "const opmath_t& beta1" not in body:
        pytest.skip(f"the fused Adam of torch {torch.__version__} has another form")
    return "\n".join(["constexpr int kILP = 1;", mode.group(), *indexes, body])


class TorchArithmetic:
    """torch's functions of CUDA on CPU tensors."""

    def __init__(self, directory: Path) -> None:
        options = ["-O2", "-ffp-contract=fast"]
        if platform.machine() in ("x86_64", "AMD64"):
            if " fma " not in Path("/proc/cpuinfo").read_text():
                pytest.skip("the processor has no FMA, with which torch's sources are compiled")
            options.append("-mfma")
        text = _header("cuda/DeviceAddCmulCdiv.cuh")
        pointwise = _function(text, r"template <typename opmath_t, typename Op>", "_impl(")
        text = _header("Lerp.h")
        small = _function(text, r"template <typename scalar_t>", "is_lerp_weight_small(scalar_t")
        lerp = _function(text, r"template <typename scalar_t, typename weight_t>", "lerp(")
        # of FP32, which the type of its arithmetic is as well
        lerp = re.sub(r"at::opmath_type<\w+>", "float", lerp)
        parts = [_PREFIX, _QUALIFIERS, adam_math(), ADAM_ENTRY]
        parts += [pointwise, small, lerp, _FOREACH_ENTRY]
        source = "\n".join(parts)
        self._library = build(source, directory, options=options)

    def adam(
        self, arrays: Sequence[torch.Tensor], group: dict, *, decoupled: bool, step: int
    ) -> None:
        """Run torch's fused kernel: parameter, gradient, and the two or three moments, FP32."""
        beta1, beta2 = group["betas"]
        hyper = np.array(
            [group["lr"], beta1, beta2, group["weight_decay"], group["eps"]], np.float32
        )
        pointers = (ctypes.c_void_p * 5)(*(a.data_ptr() for a in arrays))
        self._library.adam(
            pointers,
            ctypes.c_uint64(len(arrays[0])),
            ctypes.c_void_p(hyper.ctypes.data),
            ctypes.c_float(step),
            ctypes.c_bool(decoupled),
            ctypes.c_bool(group["amsgrad"]),
            ctypes.c_bool(group["maximize"]),
        )

    @contextmanager
    def foreach(self) -> Iterator[None]:
        """Make torch's foreach functions that Adam uses round as they do on a device."""

        def call(name, values, *rest):
            dense = [t.contiguous() for t in (values, *rest[:-1])]
            arguments = [ctypes.c_void_p(t.data_ptr()) for t in dense]
            length = ctypes.c_uint64(values.numel())
            getattr(self._library, name)(*arguments, length, ctypes.c_float(rest[-1]))
            if dense[0] is not values:
                values.copy_(dense[0])

        def each(scalars, num):
            return scalars if isinstance(scalars, list) else [scalars] * num

        def lerp_(values, ends, weight):
            for value, end in zip(values, ends, strict=True):
                call("lerp_all", value, end, weight)

        def addcmul_(values, ones, others, value):
            for v, a, b in zip(values, ones, others, strict=True):
                call("addcmul_all", v, a, b, value)

        def addcdiv_(values, ones, others, scalars):
            for v, a, b, s in zip(values, ones, others, each(scalars, len(values)), strict=True):
                call("addcdiv_all", v, a, b, s)

        def sqrt(values):
            with np.errstate(invalid="ignore"):  # torch's of a CPU is not correctly rounded
                return [torch.from_numpy(np.asarray(np.sqrt(v.numpy()))) for v in values]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "_foreach_lerp_", lerp_)
            patch.setattr(torch, "_foreach_addcmul_", addcmul_)
            patch.setattr(torch, "_foreach_addcdiv_", addcdiv_)
            patch.setattr(torch, "_foreach_sqrt", sqrt)
            yield


def _header(name: str) -> str:
    path = _HEADERS / name
    if not path.exists():
        pytest.skip(f"torch {torch.__version__} has no {name} among its headers")
    return path.read_text()


def _function(text: str, start: str, name: str) -> str:
    """Return the text of a function template, from its head to its closing brace."""
    for found in re.finditer(start, text):
        opening = text.find("{", found.start())
        if name not in text[found.start() : opening]:
            continue
        depth = 0
        for at in range(opening, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[found.start() : at + 1]
    pytest.skip(f"torch {torch.__version__} has no {name}...) in its headers any more")
