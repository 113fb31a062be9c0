// What the kernels use of CUDA, for a C++ compiler on a CPU without contraction of its own
// (-ffp-contract=off): operations that round once are plain operations there.
#include <math.h>
#include <string.h>

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
