// The square roots of torch.
//
// torch.sqrt of FP32 on a CPU is a function of Intel's Math Kernel Library. It is not correctly
// rounded: up to a sixth of its results are one unit in the last place away. MKL has several
// versions, and chooses by the maker of the processor and by its instructions. Each is an estimate
// and one step of Newton's method, so that it can be computed here, in registers.

#pragma once

#include "vectors.h"

namespace {

// Numbers that `offload.update.kernel.loading` passes.
enum Root : uint32_t {
  CORRECTLY_ROUNDED,  // the processor's own instruction; torch's fused steps, and torch without MKL
  MKL_SSE,            // MKL on processors of other makers than Intel
  MKL_AVX2,
  MKL_AVX512,
};

template <Root R> INLINE F square_root(F x) {
  if constexpr (R == CORRECTLY_ROUNDED) return V::sqrt(x);
  const F half = V::of(0.5f);
  F out;
  if constexpr (R == MKL_AVX512) {
#ifdef __AVX512F__
    const F estimate = V::rsqrt_14_bits(x);
    const F h = V::mul(estimate, half);
    const F s = V::mul(estimate, x);
    out = V::fma(V::fnma(s, s, x), h, s);
    // The error term of a tiny x would be denormal: it is computed with scaled numbers.
    const Mask tiny = V::less(V::of(0x1p39f), estimate);
    if (__builtin_expect(V::any(tiny), 0)) {
      const F scaled = V::mul(s, V::of(0x1p39f));
      const F error = V::fnma(scaled, scaled, V::mul(x, V::of(0x1p78f)));
      out = V::choose(tiny, V::fma(V::mul(h, V::of(0x1p-78f)), error, s), out);
    }
#else
    out = x;
#endif
  } else {
    const F estimate = V::rsqrt_12_bits(x);
    const F s = V::mul(x, estimate);
    const F h = V::mul(estimate, half);
    if constexpr (R == MKL_SSE) {
      const F error = V::sub(half, V::mul(s, h));
      const F s1 = V::add(V::mul(s, error), s);
      const F h1 = V::add(V::mul(error, h), h);
      out = V::add(V::mul(V::sub(x, V::mul(s1, s1)), h1), s1);
    } else {
      const F error = V::fnma(s, h, half);
      const F s1 = V::fma(error, s, s);
      const F h1 = V::fma(error, h, h);
      out = V::fma(V::fnma(s1, s1, x), h1, s1);
    }
  }
  // Zeros, denormal numbers, infinities and NaN are those of the instruction. A negative number
  // gives a NaN without a sign.
  constexpr uint32_t FIRST = R == MKL_AVX512 ? 1 : 0x00800000u;
  constexpr uint32_t LAST = R == MKL_SSE ? 0x7F7FF000u : 0x7F7FFFFFu;
  const Mask special = V::greater_int(V::add_int(V::bits(x), V::of_int(SIGN - FIRST)),
                                      V::of_int(SIGN + LAST - FIRST));
  if (__builtin_expect(V::any(special), 0)) {
    const F zero = V::of(0.0f);
    const F exact = V::choose(V::less(x, zero), V::from_bits(V::of_int(QUIET_NAN)), V::sqrt(x));
    out = V::choose(special, exact, out);
  }
  return out;
}

}  // namespace
