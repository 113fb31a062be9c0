// A stand-in for the update kernel, so that its build and its packaging can be tried.

#include <immintrin.h>

#include <cstddef>

#define OFFLOAD_EXPORT extern "C" __attribute__((visibility("default")))

// Digest of the sources that this library was compiled from: offload/update/kernel/sources.py.
OFFLOAD_EXPORT const char *offload_kernel_source(void) { return SOURCE_DIGEST; }

// Multiplies `count` values by a factor, in place.
OFFLOAD_EXPORT void offload_kernel_scale(float *values, size_t count, float factor) {
    size_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(values + i, _mm512_mul_ps(_mm512_loadu_ps(values + i), _mm512_set1_ps(factor)));
#else
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(values + i, _mm256_mul_ps(_mm256_loadu_ps(values + i), _mm256_set1_ps(factor)));
#endif
    for (; i < count; ++i) values[i] *= factor;
}
