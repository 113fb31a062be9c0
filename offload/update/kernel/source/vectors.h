// Vectors of floats, integers and masks: 16 lanes with AVX-512, 8 lanes with AVX2.
//
// These are intrinsics rather than the compiler's vector extensions, so that every rounding is
// visible. The file is compiled with -ffp-contract=off: only `fma` fuses.

#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#define INLINE __attribute__((always_inline)) inline

namespace {

#ifdef __AVX512F__

struct V {
  static constexpr int LANES = 16;
  using F = __m512;
  using I = __m512i;
  using Mask = __mmask16;

  static INLINE F of(float x) { return _mm512_set1_ps(x); }
  static INLINE I of_int(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static INLINE I lanes() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }

  static INLINE F load(const float *p) { return _mm512_loadu_ps(p); }
  static INLINE void store(float *p, F x) { _mm512_storeu_ps(p, x); }
  static INLINE I load_u16(const uint16_t *p) { return _mm512_cvtepu16_epi32(half_load(p)); }
  static INLINE I load_i16(const uint16_t *p) { return _mm512_cvtepi16_epi32(half_load(p)); }
  static INLINE void store_low_16(uint16_t *p, I x) { half_store(p, _mm512_cvtepi32_epi16(x)); }
  static INLINE F load_fp16(const uint16_t *p) { return _mm512_cvtph_ps(half_load(p)); }
  static INLINE void store_fp16(uint16_t *p, F x) { half_store(p, _mm512_cvtps_ph(x, 0)); }
  static INLINE I load_i8(const uint8_t *p) { return _mm512_cvtepi8_epi32(quarter_load(p)); }
  static INLINE I load_u8(const uint8_t *p) { return _mm512_cvtepu8_epi32(quarter_load(p)); }
  static INLINE void store_low_8(uint8_t *p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(x));
  }
  static INLINE I fp16_bits(F x) { return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, 0)); }

  static INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  static INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
  static INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
  static INLINE F fms(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }    // a * b - c
  static INLINE F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
  static INLINE F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
  static INLINE F rsqrt_12_bits(F a) {  // an instruction of at most 8 lanes
    const __m256 low = _mm256_rsqrt_ps(_mm512_castps512_ps256(a));
    const __m256 high = _mm256_rsqrt_ps(_mm512_extractf32x8_ps(a, 1));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }
  static INLINE F rsqrt_14_bits(F a) { return _mm512_rsqrt14_ps(a); }

  static INLINE I bits(F a) { return _mm512_castps_si512(a); }
  static INLINE F from_bits(I a) { return _mm512_castsi512_ps(a); }
  static INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static INLINE I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
  static INLINE I sub_int(I a, I b) { return _mm512_sub_epi32(a, b); }
  static INLINE I mul_int(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static INLINE I abs_int(I a) { return _mm512_abs_epi32(a); }
  static INLINE I max_unsigned(I a, I b) { return _mm512_max_epu32(a, b); }
  static INLINE uint32_t largest_unsigned(I a) { return _mm512_reduce_max_epu32(a); }
  static INLINE I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
  static INLINE I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
  static INLINE I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
  template <int N> static INLINE I shift_left(I a) { return _mm512_slli_epi32(a, N); }
  template <int N> static INLINE I shift_right(I a) { return _mm512_srli_epi32(a, N); }

  static INLINE Mask greater_int(I a, I b) { return _mm512_cmpgt_epi32_mask(a, b); }
  static INLINE Mask differ(I a, I b) { return _mm512_cmpneq_epi32_mask(a, b); }
  static INLINE Mask is_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
  static INLINE Mask less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static INLINE Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
  static INLINE bool any(Mask a) { return a != 0; }
  static INLINE F choose(Mask m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
  static INLINE I choose_int(Mask m, I yes, I no) { return _mm512_mask_blend_epi32(m, no, yes); }

 private:
  static INLINE __m256i half_load(const uint16_t *p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
  }
  static INLINE void half_store(uint16_t *p, __m256i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), x);
  }
  static INLINE __m128i quarter_load(const uint8_t *p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  }
};

#else

struct V {
  static constexpr int LANES = 8;
  using F = __m256;
  using I = __m256i;
  using Mask = __m256i;

  static INLINE F of(float x) { return _mm256_set1_ps(x); }
  static INLINE I of_int(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static INLINE I lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

  static INLINE F load(const float *p) { return _mm256_loadu_ps(p); }
  static INLINE void store(float *p, F x) { _mm256_storeu_ps(p, x); }
  static INLINE I load_u16(const uint16_t *p) { return _mm256_cvtepu16_epi32(half_load(p)); }
  static INLINE I load_i16(const uint16_t *p) { return _mm256_cvtepi16_epi32(half_load(p)); }
  static INLINE void store_low_16(uint16_t *p, I x) {
    x = _mm256_and_si256(x, of_int(0xFFFF));
    half_store(p, _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
  }
  static INLINE F load_fp16(const uint16_t *p) { return _mm256_cvtph_ps(half_load(p)); }
  static INLINE void store_fp16(uint16_t *p, F x) { half_store(p, _mm256_cvtps_ph(x, 0)); }
  static INLINE I load_i8(const uint8_t *p) { return _mm256_cvtepi8_epi32(quarter_load(p)); }
  static INLINE I load_u8(const uint8_t *p) { return _mm256_cvtepu8_epi32(quarter_load(p)); }
  static INLINE void store_low_8(uint8_t *p, I x) {
    x = _mm256_and_si256(x, of_int(0xFF));
    const __m128i w =
        _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm_packus_epi16(w, w));
  }
  static INLINE I fp16_bits(F x) { return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x, 0)); }

  static INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
  static INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
  static INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }    // a * b + c
  static INLINE F fms(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }    // a * b - c
  static INLINE F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
  static INLINE F sqrt(F a) { return _mm256_sqrt_ps(a); }
  static INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
  static INLINE F rsqrt_12_bits(F a) { return _mm256_rsqrt_ps(a); }

  static INLINE I bits(F a) { return _mm256_castps_si256(a); }
  static INLINE F from_bits(I a) { return _mm256_castsi256_ps(a); }
  static INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  static INLINE I add_int(I a, I b) { return _mm256_add_epi32(a, b); }
  static INLINE I sub_int(I a, I b) { return _mm256_sub_epi32(a, b); }
  static INLINE I mul_int(I a, I b) { return _mm256_mullo_epi32(a, b); }
  static INLINE I abs_int(I a) { return _mm256_abs_epi32(a); }
  static INLINE I max_unsigned(I a, I b) { return _mm256_max_epu32(a, b); }
  static INLINE uint32_t largest_unsigned(I a) {
    __m128i x = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4E));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(x));
  }
  static INLINE I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
  static INLINE I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
  static INLINE I bit_xor(I a, I b) { return _mm256_xor_si256(a, b); }
  template <int N> static INLINE I shift_left(I a) { return _mm256_slli_epi32(a, N); }
  template <int N> static INLINE I shift_right(I a) { return _mm256_srli_epi32(a, N); }

  static INLINE Mask greater_int(I a, I b) { return _mm256_cmpgt_epi32(a, b); }
  static INLINE Mask differ(I a, I b) {
    return _mm256_xor_si256(_mm256_cmpeq_epi32(a, b), of_int(0xFFFFFFFFu));
  }
  static INLINE Mask is_nan(F a) { return bits(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
  static INLINE Mask less(F a, F b) { return bits(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static INLINE Mask either(Mask a, Mask b) { return _mm256_or_si256(a, b); }
  static INLINE bool any(Mask a) { return !_mm256_testz_si256(a, a); }
  static INLINE F choose(Mask m, F yes, F no) { return _mm256_blendv_ps(no, yes, from_bits(m)); }
  static INLINE I choose_int(Mask m, I yes, I no) { return _mm256_blendv_epi8(no, yes, m); }

 private:
  static INLINE __m128i half_load(const uint16_t *p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  }
  static INLINE void half_store(uint16_t *p, __m128i x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), x);
  }
  static INLINE __m128i quarter_load(const uint8_t *p) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
  }
};

#endif

using F = V::F;
using I = V::I;
using Mask = V::Mask;

constexpr uint32_t SIGN = 0x80000000u;
constexpr uint32_t MAGNITUDE = 0x7FFFFFFFu;
constexpr uint32_t QUIET_NAN = 0x7FC00000u;

}  // namespace
