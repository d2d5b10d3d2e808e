// Vectors of the instruction set that a file is compiled for; each such file sets SASH_NS and SASH_VL.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
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
typedef uint16_t vh __attribute__((vector_size(SASH_VL * 2), aligned(2), may_alias));

using bf16 = uint16_t;

static inline vf splat(float x) { return x - vf{}; }
static inline vf load(const float* p) { return *reinterpret_cast<const vf*>(p); }
static inline void store(float* p, vf x) { *reinterpret_cast<vf*>(p) = x; }
static inline vf load(const bf16* p) {
  vi wide = __builtin_convertvector(*reinterpret_cast<const vh*>(p), vi) << 16;
  return reinterpret_cast<vf&>(wide);
}

static inline float to_float(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
static inline float to_float(float x) { return x; }

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

static inline float sum(vf x) {
  float out = 0;
  for (int i = 0; i < VL; i++) out += x[i];
  return out;
}
static inline float top(vf x) {
  float out = x[0];
  for (int i = 1; i < VL; i++) out = x[i] > out ? x[i] : out;
  return out;
}

// exp for x <= 0 (any x below 88): range reduction and a polynomial of degree 6, error under 2 ulp; exactly 0 below -87.
static inline vf vexp(vf x) {
  const vi tiny = x < splat(-87.0f);
  x = tiny ? splat(0.0f) : x;
  vf n = x * 1.44269504089f;
  n = n + (n < splat(0.0f) ? splat(-0.5f) : splat(0.5f));
  vi k = __builtin_convertvector(n, vi);
  n = __builtin_convertvector(k, vf);
  vf r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f) * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vi scale = (k + 127) << 23;
  vf out = p * reinterpret_cast<vf&>(scale);
  return tiny ? splat(0.0f) : out;
}

}  // namespace SASH_NS
}  // namespace sash
