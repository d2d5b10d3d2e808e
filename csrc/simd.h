// Vectors of the instruction set that a file is compiled for; each such file sets SASH_NS and SASH_VL.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef SASH_NS
#error "SASH_NS names the instruction set"
#endif

namespace sash {
namespace SASH_NS {

constexpr int VL = SASH_VL;  // floats in a vector

typedef float vf __attribute__((vector_size(SASH_VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(SASH_VL * 4), aligned(4), may_alias));
typedef int8_t vb __attribute__((vector_size(SASH_VL), aligned(1), may_alias));
typedef uint16_t vh __attribute__((vector_size(SASH_VL * 2), aligned(2), may_alias));

using bf16 = uint16_t;

static inline vf splat(float x) { return x - vf{}; }
static inline vf load(const float* p) { return *reinterpret_cast<const vf*>(p); }
static inline void store(float* p, vf x) { *reinterpret_cast<vf*>(p) = x; }
static inline vf load(const bf16* p) {
  vi wide = __builtin_convertvector(*reinterpret_cast<const vh*>(p), vi) << 16;
  return (vf)(wide);
}

static inline vf load(const int8_t* p) {
  return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const vb*>(p), vi), vf);
}

static inline float to_float(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
static inline float to_float(float x) { return x; }
static inline float to_float(int8_t x) { return x; }

// Round to nearest even; NaN stays NaN.
static inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 64);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
static inline void store_as(float* p, float x) { *p = x; }
static inline void store_as(bf16* p, float x) { *p = to_bf16(x); }

static inline vf vmax(vf a, vf b) { return a > b ? a : b; }

// By halves: the order of a sum is the same on every machine of an instruction set.
static inline float sum(vf x) {
  float part[VL];
  store(part, x);
  for (int half = VL / 2; half; half /= 2)
    for (int i = 0; i < half; i++) part[i] += part[i + half];
  return part[0];
}
static inline float top(vf x) {
  float part[VL];
  store(part, x);
  for (int half = VL / 2; half; half /= 2)
    for (int i = 0; i < half; i++) part[i] = part[i + half] > part[i] ? part[i + half] : part[i];
  return part[0];
}

// 2^x for x <= 0 (any x below 127): a polynomial of degree 5 on [-1/2, 1/2], error under 2 ulp; 0 far below -126.
static inline vf vexp2(vf x) {
#if defined(__AVX512F__)
  const __m512 n = _mm512_roundscale_ps((__m512)(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vf f = x - (vf)(n);
#else
  const vi tiny = x < splat(-126.0f);
  x = tiny ? splat(0.0f) : x;
  // Adding 1.5 * 2^23 rounds to a whole number, which the low bits of the sum hold.
  const vf sum = x + 12582912.0f;
  const vf f = x - (sum - 12582912.0f);
#endif
  vf p = splat(1.3276471959e-03f) * f + 9.6755415026e-03f;
  p = p * f + 5.5507132751e-02f;
  p = p * f + 2.4022119721e-01f;
  p = p * f + 6.9314696706e-01f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  const __m512 out = _mm512_scalef_ps((__m512)(p), n);
  return (vf)(out);
#else
  vi bits = (vi)(p) + ((vi)(sum) << 23);
  return tiny ? splat(0.0f) : (vf)(bits);
#endif
}

}  // namespace SASH_NS
}  // namespace sash
