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

HIDDEN bool nan_bits(u32 bits) { return (bits & MAGNITUDE) > INFINITE; }

HIDDEN bool is_nan(float value) { return nan_bits(__float_as_uint(value)); }

// Rounds to nearest, ties to even. A NaN becomes the one that torch's vector code makes on a CPU.
HIDDEN u16 to_bfloat16(float value) {
  const u32 bits = __float_as_uint(value);
  if (nan_bits(bits)) return 0xFFFF;
  return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

HIDDEN float from_bfloat16(u16 value) { return __uint_as_float((u32)value << 16); }

HIDDEN u16 to_float16(float value) {
  const u32 bits = __float_as_uint(value), size = bits & MAGNITUDE, sign = bits >> 16 & 0x8000;
  if (size > INFINITE) return (u16)(sign | 0x7E00 | (size >> 13 & 0x1FF));
  if (size >= 0x47800000) return (u16)(sign | 0x7C00);  // 65536 and more
  if (size < 0x38800000) {                              // below 2**-14: a multiple of 2**-24
    const float sum = __fadd_rn(__uint_as_float(size), 0.5f);
    return (u16)(sign | (__float_as_uint(sum) - 0x3F000000));
  }
  return (u16)(sign | (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13);
}

HIDDEN float from_float16(u16 value) {
  const u32 sign = (u32)(value & 0x8000) << 16, exponent = value >> 10 & 31, rest = value & 0x3FF;
  if (exponent == 31) return __uint_as_float(sign | INFINITE | rest << 13);
  if (exponent) return __uint_as_float(sign | ((exponent + 112) << 23) | rest << 13);
  return __uint_as_float(sign | __float_as_uint(__fmul_rn((float)rest, 5.9604644775390625e-8f)));
}

// Split masters: `codecs.join_master` and `codecs.split_master`.

HIDDEN float join_master(u16 live, short low) {
  const u32 bits = ((u32)live << 16) + (u32)(int)low;
  return __uint_as_float(nan_bits(bits) ? (u32)live << 16 : bits);
}

HIDDEN u32 with_quiet_nan(float value) {
  const u32 bits = __float_as_uint(value);
  return nan_bits(bits) ? (bits & SIGN) | NOT_A_NUMBER : bits;
}

HIDDEN void split_master(float master, u16 *live, u16 *low) {
  const u32 bits = with_quiet_nan(master);
  *live = (u16)((bits + 0x8000) >> 16);
  *low = (u16)bits;
}

// Stochastic rounding: `rounding.round_stochastic`. One hash serves two elements.

HIDDEN u32 hash(u32 pair, u32 before, u32 inside) {
  u32 x = pair * 0x9E3779B9u + before;
  x ^= x >> 16;
  x = x * 0x7FEB352Du + inside;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ x >> 16;
}

HIDDEN u16 round_stochastic(float value, u64 element, u32 before, u32 inside) {
  const u32 random = hash((u32)(element >> 1), before, inside);
  return (u16)((with_quiet_nan(value) + (element & 1 ? random >> 16 : random & 0xFFFF)) >> 16);
}

// Blocks of 32 values in 8 bits: `blocks8.encode_blocks` and `blocks8.decode_blocks`.

#define ROUNDER 12582912.0f       /* 1.5 * 2**23 */
#define TOO_LARGE 0x7B800000u     /* 2**120 */
#define TINY 1.401298464324817e-45f
#define TINY_ROOT 7.888609052210118e-31f
#define ONE_255TH 0.003921568859368563f
#define NAN_SCALE 0x7FC0          /* all codes of its block are 0 */

// Sizes whose largest one sets a block's scale. Positive floats have the order of their bits.
HIDDEN u32 size_signed(float value) { return __float_as_uint(value) & MAGNITUDE; }

HIDDEN u32 size_unsigned(float value) {
  const u32 bits = __float_as_uint(value);
  if (bits == SIGN) return 0;
  return bits & SIGN || nan_bits(bits) ? NOT_A_NUMBER : bits;
}

HIDDEN float inverse_root(float value) { return __fdiv_rn(1.0f, __fsqrt_rn(value)); }

// Returns a block's scale, rounded up to bfloat16: its largest size, or the square root of that.
HIDDEN u16 round_scale(u32 largest, bool is_signed) {
  if (!is_signed) {
    const float root = __fdiv_rn(1.0f, inverse_root(__uint_as_float(largest)));
    largest = __float_as_uint(root);
  }
  if ((largest & MAGNITUDE) >= TOO_LARGE) return NAN_SCALE;
  return to_bfloat16(__uint_as_float(largest + 0x7FFD));
}

HIDDEN float at_least(float value, float smallest) { return value < smallest ? smallest : value; }

HIDDEN u8 low_byte(float rounded) { return is_nan(rounded) ? 0 : (u8)__float_as_uint(rounded); }

HIDDEN u8 encode_signed(float value, u16 scale) {
  if (scale == NAN_SCALE) return 0;
  const float size = __uint_as_float(size_signed(value));
  const float sum = __fadd_rn(size, at_least(from_bfloat16(scale), TINY));
  return low_byte(__fadd_rn(ROUNDER, __fdiv_rn(__fmul_rn(254.0f, value), sum)));
}

HIDDEN u8 encode_unsigned(float value, u16 scale) {
  if (scale == NAN_SCALE) return 0;
  const u32 size = size_unsigned(value);
  const float factor = __fdiv_rn(1.0f, at_least(from_bfloat16(scale), TINY_ROOT));
  const float root = inverse_root(__uint_as_float(size));
  const u8 code = low_byte(__fadd_rn(ROUNDER, __fdiv_rn(__fmul_rn(255.0f, factor), root)));
  return code == 0 && size ? 1 : code;
}

HIDDEN float decode_signed(u8 code, u16 scale) {
  const int c = (signed char)code;
  const float quotient = __fdiv_rn((float)c, (float)(254 - (c < 0 ? -c : c)));
  return __fmul_rn(quotient, from_bfloat16(scale));
}

HIDDEN float decode_unsigned(u8 code, u16 scale) {
  const float root = __fmul_rn(__fmul_rn((float)code, ONE_255TH), from_bfloat16(scale));
  return __fmul_rn(root, root);
}
