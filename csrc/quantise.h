// Rows of K or V as int8 with a scale each: x ≈ scale · q, scale = max |x| / 127.
#pragma once

#include <cstdint>

#include "isa.h"

namespace sash {

// One row of n values (type 0 float32, 1 bfloat16) to int8; returns its scale, NaN for a row that isn't finite.
using QuantiseRow = float (*)(const void* from, int type, int64_t n, int8_t* to);
namespace avx512 { float quantise_row(const void* from, int type, int64_t n, int8_t* to); }
namespace avx2 { float quantise_row(const void* from, int type, int64_t n, int8_t* to); }
namespace portable { float quantise_row(const void* from, int type, int64_t n, int8_t* to); }
QuantiseRow quantise_row(Isa);

// Rows [N, H, n] with strides in elements to int8 [N, H, n] and scales [N, H], both contiguous.
struct QuantiseCall {
  const void* from;
  int8_t* to;
  float* scale;
  int64_t rows, heads, n, row_stride, head_stride;
  int type, threads;
};
void quantise(const QuantiseCall&, Isa);

}  // namespace sash
