// Gradients, live parameters and their masters: how they are read, and written.

#pragma once

#include "vectors.h"

namespace {

// Numbers that `offload.update.kernel.forms` passes.
enum DType : uint32_t { FP32, BF16, FP16 };
enum Master : uint32_t {
  OWN,    // an FP32 parameter is its own master
  FULL,   // FP32 copy of a 16-bit parameter
  SPLIT,  // lower 16 bits; the upper half is the bf16 parameter, rounded to nearest
};

constexpr size_t size_of(uint32_t dtype) { return dtype == FP32 ? 4 : 2; }

INLINE const uint16_t *as_u16(const uint8_t *p) { return reinterpret_cast<const uint16_t *>(p); }
INLINE uint16_t *as_u16(uint8_t *p) { return reinterpret_cast<uint16_t *>(p); }
INLINE const float *as_f32(const uint8_t *p) { return reinterpret_cast<const float *>(p); }
INLINE float *as_f32(uint8_t *p) { return reinterpret_cast<float *>(p); }

INLINE F load_bf16(const uint16_t *p) {
  return V::from_bits(V::shift_left<16>(V::load_u16(p)));
}

// Round to nearest, ties to even. NaN becomes 0xFFFF, as in ATen's vector code.
INLINE I bf16_bits(F x) {
  const I b = V::bits(x);
  const I is_odd = V::bit_and(V::shift_right<16>(b), V::of_int(1));
  const I rounded = V::shift_right<16>(V::add_int(b, V::add_int(V::of_int(0x7FFF), is_odd)));
  return V::choose_int(V::is_nan(x), V::of_int(0xFFFF), rounded);
}

INLINE F quiet(F x) {  // NaN becomes the quiet NaN of its sign
  const I b = V::bits(x);
  const I nan = V::bit_or(V::bit_and(b, V::of_int(SIGN)), V::of_int(QUIET_NAN));
  return V::from_bits(V::choose_int(V::is_nan(x), nan, b));
}

INLINE F load_values(uint32_t dtype, const uint8_t *p, size_t i) {
  if (dtype == BF16) return load_bf16(as_u16(p) + i);
  if (dtype == FP32) return V::load(as_f32(p) + i);
  return V::load_fp16(as_u16(p) + i);
}

// Return FP32 parameters. The live parameter wins: where it is not the rounded master, it has been
// edited, and replaces the master. (See `offload.update.updater` and `codecs.join_master`.)
INLINE F load_master(uint32_t form, uint32_t dtype, const uint8_t *live, const uint8_t *master,
                     size_t i) {
  if (form == OWN) return V::load(as_f32(live) + i);
  const I bits = V::load_u16(as_u16(live) + i);
  if (form == SPLIT) {
    const I joined = V::add_int(V::shift_left<16>(bits), V::load_i16(as_u16(master) + i));
    const Mask nan = V::is_nan(V::from_bits(joined));
    return V::from_bits(V::choose_int(nan, V::shift_left<16>(bits), joined));
  }
  const F exact = V::load(as_f32(master) + i);
  const Mask edited = V::differ(dtype == BF16 ? bf16_bits(exact) : V::fp16_bits(exact), bits);
  if (__builtin_expect(V::any(edited), 0))
    return V::choose(edited, load_values(dtype, live, i), exact);
  return exact;
}

INLINE void store_master(uint32_t form, uint32_t dtype, uint8_t *live, uint8_t *master, size_t i,
                         F x) {
  if (form == OWN) {
    V::store(as_f32(live) + i, x);
  } else if (form == SPLIT) {
    const I b = V::bits(quiet(x));
    V::store_low_16(as_u16(live) + i, V::shift_right<16>(V::add_int(b, V::of_int(0x8000))));
    V::store_low_16(as_u16(master) + i, b);
  } else {
    V::store(as_f32(master) + i, x);
    if (dtype == BF16)
      V::store_low_16(as_u16(live) + i, bf16_bits(x));
    else
      V::store_fp16(as_u16(live) + i, x);
  }
}

}  // namespace
