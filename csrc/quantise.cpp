// Many rows to int8, on threads of their own.
#include "quantise.h"

namespace sash {

QuantiseRow quantise_row(Isa isa) {
  switch (isa) {
#if defined(SASH_X86)
    case Isa::avx512: return avx512::quantise_row;
    case Isa::avx2: return avx2::quantise_row;
#endif
    default: return portable::quantise_row;
  }
}

void quantise(const QuantiseCall& c, Isa isa) {
  const QuantiseRow row = quantise_row(isa);
  const int64_t bytes = c.type == 0 ? 4 : 2, count = c.rows * c.heads;
#pragma omp parallel for schedule(static) num_threads(c.threads) if (count * c.n > 1 << 14)
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = i / c.heads * c.row_stride + i % c.heads * c.head_stride;
    c.scale[i] = row(static_cast<const char*>(c.from) + at * bytes, c.type, c.n, c.to + i * c.n);
  }
}

}  // namespace sash
