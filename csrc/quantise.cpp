// Many rows to int8, on the process's worker threads.
#include "quantise.h"

#include "team.h"

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
  Team::lead(count * c.n > 1 << 14 ? c.threads : 1, [&](Team& team) {
    team.each(c.rows, [&](int64_t r) {
      for (int64_t h = 0; h < c.heads; h++) {
        const int64_t i = r * c.heads + h;
        c.scale[i] = row(static_cast<const char*>(c.from) + (r * c.row_stride + h * c.head_stride) * bytes, c.type, c.n,
                         c.to + i * c.n);
      }
    });
  });
}

}  // namespace sash
