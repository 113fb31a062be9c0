// Stored forms of the state: FP32, bf16 rounded at random, and 8 bits with a scale per 32 elements.
//
// Everything here works on groups of 32 elements, held in GROUP_VECTORS vectors. The forms are
// those of `offload.update.coding.rounding` and `offload.update.coding.blocks8`, bit for bit.

#pragma once

#include "values.h"

namespace {

enum State : uint32_t { STATE_FP32, STATE_BF16, STATE_INT8 };

constexpr size_t GROUP = 32;
constexpr int GROUP_VECTORS = GROUP / V::LANES;

struct Key {  // of stochastic rounding
  uint32_t before, inside;
};

// Round to bf16, up or down at random: `_hash` and `_add` of `offload.update.coding.rounding`.
// `element` is the index, within the parameter, of the first lane.
INLINE void store_bf16_at_random(uint16_t *p, F x, uint64_t element, Key key) {
  const I number = V::add_int(V::of_int(static_cast<uint32_t>(element & 1)), V::lanes());
  const I pair = V::add_int(V::of_int(static_cast<uint32_t>(element >> 1)),
                            V::shift_right<1>(number));
  I h = V::add_int(V::mul_int(pair, V::of_int(0x9E3779B9u)), V::of_int(key.before));
  h = V::bit_xor(h, V::shift_right<16>(h));
  h = V::add_int(V::mul_int(h, V::of_int(0x7FEB352Du)), V::of_int(key.inside));
  h = V::bit_xor(h, V::shift_right<15>(h));
  h = V::mul_int(h, V::of_int(0x846CA68Bu));
  h = V::bit_xor(h, V::shift_right<16>(h));
  const Mask is_odd = V::differ(V::bit_and(number, V::of_int(1)), V::of_int(0));
  const I random =
      V::choose_int(is_odd, V::shift_right<16>(h), V::bit_and(h, V::of_int(0xFFFF)));
  V::store_low_16(p, V::shift_right<16>(V::add_int(V::bits(quiet(x)), random)));
}

INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

constexpr float ROUNDER = 12582912.0f;  // its sum with a number rounds the number to an integer
constexpr uint32_t TOO_LARGE = 0x7B800000u;  // 2**120; NaN and infinity are larger still

// Round the largest value of a block, given as bits without sign, up to a bfloat16 scale; NaN if
// the value is too large.
INLINE uint16_t scale_of(uint32_t largest) {
  if (largest >= TOO_LARGE) return 0x7FC0;
  const uint32_t x = largest + 0x7FFD;  // half a unit of bf16, minus 3 units of FP32
  return static_cast<uint16_t>((x + 0x7FFF + (x >> 16 & 1)) >> 16);
}

INLINE I rounded_code(F numerator, F denominator) {
  return V::bits(V::add(V::of(ROUNDER), V::div(numerator, denominator)));
}

INLINE F decode_signed(const uint8_t *codes, F scale) {
  const I code = V::load_i8(codes);
  const F divisor = V::to_float(V::sub_int(V::of_int(254), V::abs_int(code)));
  return V::mul(V::div(V::to_float(code), divisor), scale);
}

INLINE F decode_unsigned(const uint8_t *codes, F scale) {
  const F code = V::to_float(V::load_u8(codes));
  const F root = V::mul(V::mul(code, V::of(1.0f / 255.0f)), scale);
  return V::mul(root, root);
}

INLINE void encode_signed(const F (&x)[GROUP_VECTORS], uint8_t *codes, uint16_t *scale) {
  I largest = V::of_int(0);
  for (const F &v : x)
    largest = V::max_unsigned(largest, V::bit_and(V::bits(v), V::of_int(MAGNITUDE)));
  *scale = scale_of(V::largest_unsigned(largest));
  const float s = float_of(static_cast<uint32_t>(*scale) << 16);
  if (s != s) {
    memset(codes, 0, GROUP);
    return;
  }
  const F divisor = V::of(bits_of(s) ? s : 0x1p-149f);  // avoids 0 / 0
  for (int k = 0; k < GROUP_VECTORS; k++) {
    const F size = V::from_bits(V::bit_and(V::bits(x[k]), V::of_int(MAGNITUDE)));
    V::store_low_8(codes + k * V::LANES,
                   rounded_code(V::mul(V::of(254.0f), x[k]), V::add(size, divisor)));
  }
}

INLINE void encode_unsigned(const F (&x)[GROUP_VECTORS], uint8_t *codes, uint16_t *scale) {
  I value[GROUP_VECTORS];
  I largest = V::of_int(0);
  for (int k = 0; k < GROUP_VECTORS; k++) {
    // A negative value counts as NaN, and -0.0 as 0.0.
    I b = V::bits(x[k]);
    b = V::choose_int(V::differ(b, V::of_int(SIGN)), b, V::of_int(0));
    b = V::choose_int(V::greater_int(V::of_int(0), b), V::of_int(QUIET_NAN), b);
    value[k] = b;
    largest = V::max_unsigned(largest, b);
  }
  // Roots of single numbers are computed in a vector, so that no compiler chooses another way.
  const F root = V::div(V::of(1.0f), V::sqrt(V::of(float_of(V::largest_unsigned(largest)))));
  float lanes[V::LANES];
  V::store(lanes, V::div(V::of(1.0f), root));
  *scale = scale_of(bits_of(lanes[0]) & MAGNITUDE);
  const float s = float_of(static_cast<uint32_t>(*scale) << 16);
  if (s != s) {
    memset(codes, 0, GROUP);
    return;
  }
  const F factor = V::mul(V::of(255.0f), V::div(V::of(1.0f), V::of(s < 0x1p-100f ? 0x1p-100f : s)));
  for (int k = 0; k < GROUP_VECTORS; k++) {
    const F inverse = V::div(V::of(1.0f), V::sqrt(V::from_bits(value[k])));
    const I code = V::bit_and(rounded_code(factor, inverse), V::of_int(0xFF));
    const Mask present = V::differ(value[k], V::of_int(0));
    const I least = V::choose_int(present, V::of_int(1), V::of_int(0));
    V::store_low_8(codes + k * V::LANES, V::max_unsigned(code, least));
  }
}

}  // namespace
