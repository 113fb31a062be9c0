// Stored forms of numbers, and the codecs of state for single values. Their results are those of
// offload/update/coding/codecs.py and offload/update/coding/blocks8.py. All code is integer code, or
// FP32 operations that round once and are never contracted. Compiled for the CPU with the macros of
// tests/device/shim.h, the same source gives the same bits.

#if __CUDA_FTZ
#error "denormal numbers must be kept: compile with -ftz=false"
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define HIDDEN __device__ __forceinline__

#define NOT_A_NUMBER 0x7FC00000u
#define INFINITE 0x7F800000u
#define MAGNITUDE 0x7FFFFFFFu
#define SIGN 0x80000000u
#define WEYL 0x9E3779B9u  /* 2**32 divided by the golden ratio */

HIDDEN bool nan_bits(u32 bits) { return (bits & MAGNITUDE) > INFINITE; }

HIDDEN bool is_nan(float value) { return nan_bits(__float_as_uint(value)); }

// What a device has instructions for. tests/device/shim.h has the same for a CPU.

#ifdef __CUDACC__
// Approximations, with the errors that CUDA's documentation of PTX promises: 1 unit in the last
// place, and 2**-22.9 of the value. Arguments must be normal numbers. No result may depend on more
// than the promised bits: every use asks whether it could, and then computes exactly.
HIDDEN float about_reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

HIDDEN float about_inverse_root(float value) {
  float result;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// Returns whether a value or the other is NaN.
HIDDEN bool either_nan(float one, float other) {
  u32 result;
  asm("{.reg .pred p; setp.nan.f32 p, %1, %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(result)
      : "f"(one), "f"(other));
  return result;
}

// Returns two values rounded to bfloat16, to nearest, ties to even; the first one in the low half.
HIDDEN u32 to_bfloat16s(float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
#else
  u32 halves[2] = {__float_as_uint(low), __float_as_uint(high)};
  for (int i = 0; i < 2; i++)
    halves[i] = nan_bits(halves[i]) ? 0x7FFF : (halves[i] + 0x7FFF + (halves[i] >> 16 & 1)) >> 16;
  return halves[0] | halves[1] << 16;
#endif
}

HIDDEN u32 to_float16s(float low, float high) {
  u16 halves[2];
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(halves[0]) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(halves[1]) : "f"(high));
  return halves[0] | (u32)halves[1] << 16;
}

HIDDEN float from_float16(u16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
  return result;
}

// Returns four bytes of two words; each digit of the selector is a byte's number in `high:low`.
HIDDEN u32 bytes_of(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }

// Returns the low word of `high:low` after a shift to the right by 0 to 31 bits.
HIDDEN u32 shifted(u32 low, u32 high, u32 bits) { return __funnelshift_r(low, high, bits); }
#endif

HIDDEN float from_bfloat16(u16 value) { return __uint_as_float((u32)value << 16); }

// Split masters: `codecs.join_master` and `codecs.split_master`.

// Joins two masters. A word has two halves, the first one in its low half.
HIDDEN void join_masters(u32 live, u32 low, float *masters) {
  const u32 uppers[2] = {live << 16, live & 0xFFFF0000};
  const int lowers[2] = {(int)(low << 16) >> 16, (int)low >> 16};
  for (int i = 0; i < 2; i++) {
    const u32 bits = uppers[i] + (u32)lowers[i];
    masters[i] = __uint_as_float(nan_bits(bits) ? uppers[i] : bits);
  }
}

HIDDEN u32 with_quiet_nan(float value) {
  const u32 bits = __float_as_uint(value);
  return nan_bits(bits) ? (bits & SIGN) | NOT_A_NUMBER : bits;
}

// Bits of four values, each NaN replaced by the quiet one of its sign.
HIDDEN void with_quiet_nans(const float *values, u32 *bits) {
  for (int i = 0; i < 4; i++) bits[i] = __float_as_uint(values[i]);
  if (either_nan(values[0], values[1]) | either_nan(values[2], values[3]))
    for (int i = 0; i < 4; i++) bits[i] = with_quiet_nan(values[i]);
}

HIDDEN void split_masters(const float *masters, u32 *live, u32 *low) {
  u32 bits[4];
  with_quiet_nans(masters, bits);
  for (int i = 0; i < 2; i++) {
    live[i] = bytes_of(bits[2 * i] + 0x8000, bits[2 * i + 1] + 0x8000, 0x7632);
    low[i] = bytes_of(bits[2 * i], bits[2 * i + 1], 0x5410);
  }
}

// Stochastic rounding: `rounding.round_stochastic`. One hash serves two elements.

HIDDEN u32 hash(u32 x, u32 inside) {
  x ^= x >> 16;
  x = x * 0x7FEB352Du + inside;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ x >> 16;
}

// Rounds four neighbours, of which the first is the first or the second one of a pair.
HIDDEN void round_stochastic(const float *values, u32 pair, u32 is_odd, u32 before, u32 inside,
                             u32 *halves) {
  const u32 first = pair * WEYL + before;
  u32 bits[4], random[3] = {hash(first, inside), hash(first + WEYL, inside), 0};
  if (is_odd) random[2] = hash(first + 2 * WEYL, inside);
  with_quiet_nans(values, bits);
  for (int i = 0; i < 2; i++) {
    const u32 both = shifted(random[i], random[i + 1], 16 * is_odd);
    halves[i] = bytes_of(bits[2 * i] + (both & 0xFFFF), bits[2 * i + 1] + (both >> 16), 0x7632);
  }
}

// Blocks of 32 values in 8 bits: `blocks8.encode_blocks` and `blocks8.decode_blocks`.

#define ROUNDER 12582912.0f       /* 1.5 * 2**23: added to a number, leaves its integer as low bits */
#define ROUNDER_BITS 0x4B400000u
#define TOO_LARGE 0x7B800000u     /* 2**120 */
#define TINY 1.401298464324817e-45f
#define TINY_ROOT 7.888609052210118e-31f
#define ONE_255TH 0.003921568859368563f
#define NAN_SCALE 0x7FC0          /* all codes of its block are 0 */
#define SMALLEST_NORMAL 1.1754943508222875e-38f

// Sizes whose largest one sets a block's scale. Positive floats have the order of their bits.
HIDDEN u32 size_signed(float value) { return __float_as_uint(value) & MAGNITUDE; }

// Those of second moments are their bits. Zero is added, so that -0 is 0; negative numbers and NaN
// are larger than infinity.
HIDDEN u32 size_unsigned(float value) { return __float_as_uint(__fadd_rn(value, 0.0f)); }

HIDDEN float inverse_root(float value) { return __fdiv_rn(1.0f, __fsqrt_rn(value)); }

HIDDEN float at_least(float value, float smallest) { return value < smallest ? smallest : value; }

// Rounds a block's largest size up to bfloat16, but down if it is at most 3 units above one.
HIDDEN u16 round_up(u32 largest) {
  const u32 bits = largest + 0x7FFD;
  return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Returns a block's scale from its largest size.
HIDDEN u16 scale_signed(u32 largest) { return largest >= TOO_LARGE ? NAN_SCALE : round_up(largest); }

// Its square root, which two reciprocals round. The approximation is at most 7 units off them, and
// decides nothing within 8 units of the place where the scale changes.
HIDDEN u16 scale_unsigned(u32 largest) {
  const float size = __uint_as_float(largest);
  u32 root = __float_as_uint(__fmul_rn(size, about_inverse_root(at_least(size, SMALLEST_NORMAL))));
  if ((root + 5 & 0xFFFF) < 18 | size < SMALLEST_NORMAL)
    root = __float_as_uint(__fdiv_rn(1.0f, inverse_root(size)));
  return largest >= INFINITE ? NAN_SCALE : round_up(root);
}

// Codes. A quotient's approximation is rounded to an integer, which is that of the quotient unless
// a half is nearer than the error. If that is possible for one of four values, all are divided.

#define SIGNED_DOUBT 6.103515625e-5f      /* 2**-14: the error is at most 127 * 2**-22 */
#define UNSIGNED_DOUBT 2.44140625e-4f     /* 2**-12: the error is at most 255 * 2**-20 */
#define SIGNED_SMALLEST 7.888609052210118e-31f   /* 2**-100 */
#define UNSIGNED_SMALLEST 8.881784197001252e-16f /* 2**-50 */

// Returns the sum of a product with ROUNDER, and notes whether a half is too near.
HIDDEN float rounded_product(float one, float other, float doubt, bool &in_doubt) {
  const float sum = __fmaf_rn(one, other, ROUNDER);
  const float rest = __fmaf_rn(one, other, -__fadd_rn(sum, -ROUNDER));
  in_doubt |= !(fabsf(rest) < 0.5f - doubt);
  return sum;
}

HIDDEN u32 low_bytes(const u32 *words) {
  return bytes_of(bytes_of(words[0], words[1], 0x0040), bytes_of(words[2], words[3], 0x0040), 0x5410);
}

HIDDEN u32 encode_signed(const float *values, u32 largest, u16 scale_bits) {
  const float scale = from_bfloat16(scale_bits), divisor = at_least(scale, SIGNED_SMALLEST);
  bool in_doubt = largest != 0 & scale < SIGNED_SMALLEST;
  u32 sums[4];
  for (int i = 0; i < 4; i++) {
    const float inverse = about_reciprocal(__fadd_rn(fabsf(values[i]), divisor));
    const float product = __fmul_rn(254.0f, values[i]);
    sums[i] = __float_as_uint(rounded_product(product, inverse, SIGNED_DOUBT, in_doubt));
  }
  if (in_doubt)
    for (int i = 0; i < 4; i++) {
      const float sum = __fadd_rn(fabsf(values[i]), at_least(scale, TINY));
      const float quotient = __fdiv_rn(__fmul_rn(254.0f, values[i]), sum);
      sums[i] = __float_as_uint(__fadd_rn(ROUNDER, quotient));
    }
  return scale_bits == NAN_SCALE ? 0 : low_bytes(sums);
}

HIDDEN u32 encode_unsigned(const float *values, u32 largest, u16 scale_bits) {
  const float scale = from_bfloat16(scale_bits);
  const float factor = __fmul_rn(255.0f, about_reciprocal(at_least(scale, UNSIGNED_SMALLEST)));
  bool in_doubt = largest != 0 & scale < UNSIGNED_SMALLEST;
  u32 sums[4];
  for (int i = 0; i < 4; i++) {
    const float inverse = about_inverse_root(at_least(values[i], SMALLEST_NORMAL));
    const float root = __fmul_rn(values[i], inverse);
    sums[i] = __float_as_uint(rounded_product(root, factor, UNSIGNED_DOUBT, in_doubt));
  }
  if (in_doubt) {
    const float exact = __fmul_rn(255.0f, __fdiv_rn(1.0f, at_least(scale, TINY_ROOT)));
    for (int i = 0; i < 4; i++) {
      const float quotient = __fdiv_rn(exact, inverse_root(__uint_as_float(size_signed(values[i]))));
      sums[i] = __float_as_uint(__fadd_rn(ROUNDER, quotient));
    }
  }
  for (int i = 0; i < 4; i++)
    if (values[i] > 0.0f && sums[i] == ROUNDER_BITS) sums[i]++;
  return scale_bits == NAN_SCALE ? 0 : low_bytes(sums);
}

// Quotients of all codes c: c / (254 - |c|). Each block of threads makes a table of them.
HIDDEN float signed_quotient(u32 code) {
  const int c = (signed char)code;
  return __fdiv_rn((float)c, (float)(254 - (c < 0 ? -c : c)));
}

HIDDEN void decode_signed(u32 codes, u16 scale, const float *quotients, float *values) {
  for (int i = 0; i < 4; i++)
    values[i] = __fmul_rn(quotients[codes >> 8 * i & 0xFF], from_bfloat16(scale));
}

HIDDEN void decode_unsigned(u32 codes, u16 scale, float *values) {
  for (int i = 0; i < 4; i++) {
    // Below 2**23, an integer is the low bits of its sum with 2**23.
    const float code = __fadd_rn(__uint_as_float(bytes_of(codes, 0x4B000000, 0x7540 | i)), -8388608.0f);
    const float root = __fmul_rn(__fmul_rn(code, ONE_255TH), from_bfloat16(scale));
    values[i] = __fmul_rn(root, root);
  }
}
