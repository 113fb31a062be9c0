// What the kernels use of CUDA, for a C++ compiler on a CPU without contraction of its own
// (-ffp-contract=off): operations that round once are plain operations there.
#include <math.h>
#include <string.h>

using namespace std;

#define __device__
#define __forceinline__ inline

struct uint2 {
  unsigned int x, y;
} __attribute__((aligned(8), may_alias));
struct uint4 {
  unsigned int x, y, z, w;
} __attribute__((aligned(16), may_alias));

static inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
  return {x, y, z, w};
}

static inline unsigned int __float_as_uint(float value) {
  unsigned int bits;
  memcpy(&bits, &value, 4);
  return bits;
}
static inline float __uint_as_float(unsigned int bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline float __double2float_rn(double a) { return (float)a; }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}

// Instructions that approximate, about as wrong as they may be: APPROXIMATE is the number of units
// in the last place that is added to the value rounded to nearest; undefined, it differs from
// argument to argument, from -1 to 1.
static inline float approximate(double exact, float argument) {
#ifdef APPROXIMATE
  const int units = APPROXIMATE;
  (void)argument;
#else
  const int units = (int)(__float_as_uint(argument) * 0x9E3779B1u >> 16) % 3 - 1;
#endif
  const float nearest = (float)exact;
  if (!(nearest > 0) || isinf(nearest)) return nearest;
  return __uint_as_float(__float_as_uint(nearest) + units);
}
static inline float about_reciprocal(float value) { return approximate(1.0 / value, value); }
static inline float about_inverse_root(float value) {
  return approximate(1.0 / sqrt((double)value), value);
}

static inline bool either_nan(float one, float other) { return one != one || other != other; }

// Conversions, which round to nearest, ties to even. A NaN of bfloat16 is 0x7FFF.
static inline unsigned int to_bfloat16s(float low, float high) {
  unsigned int halves[2] = {__float_as_uint(low), __float_as_uint(high)};
  for (int i = 0; i < 2; i++)
    halves[i] = (halves[i] & 0x7FFFFFFF) > 0x7F800000
                    ? 0x7FFF
                    : (halves[i] + 0x7FFF + (halves[i] >> 16 & 1)) >> 16;
  return halves[0] | halves[1] << 16;
}
static inline unsigned int to_float16(float value) {
  const unsigned int bits = __float_as_uint(value), size = bits & 0x7FFFFFFF;
  const unsigned int sign = bits >> 16 & 0x8000;
  if (size > 0x7F800000) return 0x7FFF;
  if (size >= 0x47800000) return sign | 0x7C00;  // 65536 and more
  if (size < 0x38800000)                         // below 2**-14: a multiple of 2**-24
    return sign | (__float_as_uint(__uint_as_float(size) + 0.5f) - 0x3F000000);
  return sign | (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
}
static inline unsigned int to_float16s(float low, float high) {
  return to_float16(low) | to_float16(high) << 16;
}
static inline float from_float16(unsigned short value) {
  const unsigned int sign = (unsigned int)(value & 0x8000) << 16, exponent = value >> 10 & 31;
  const unsigned int rest = value & 0x3FF;
  if (exponent == 31) return __uint_as_float(sign | 0x7F800000 | rest << 13);
  if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | rest << 13);
  return __uint_as_float(sign | __float_as_uint((float)rest * 5.9604644775390625e-8f));
}

// Four bytes of two words, each named by a digit of the selector; a shift of two words.
static inline unsigned int bytes_of(unsigned int low, unsigned int high, unsigned int selector) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned int found = 0;
  for (int i = 0; i < 4; i++)
    found |= (unsigned int)(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return found;
}
static inline unsigned int shifted(unsigned int low, unsigned int high, unsigned int bits) {
  return (unsigned int)(((unsigned long long)high << 32 | low) >> bits);
}
