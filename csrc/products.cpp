// Single products and searches, and what a step shares with them.
#include "products.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "team.h"

namespace sash {

const Kernels& kernels(Isa isa) {
  switch (isa) {
#if defined(SASH_X86)
    case Isa::avx512: return avx512::kernels();
    case Isa::avx2: return avx2::kernels();
#endif
    default: return portable::kernels();
  }
}

float* scratch(int64_t n) {
  static thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < n) memory.resize(n);
  return memory.data();
}

int64_t panels_of_piece(const Linear& l, int threads) {
  return std::clamp<int64_t>(l.panels() / (threads * 8), 1, 64);
}

void linear(const Linear& l, const float* x, int64_t x_stride, int64_t rows, float* out, int64_t stride, int threads,
            Isa isa) {
  const Kernels& k = kernels(isa);
  Buffer acts, scales;
  acts.reserve(std::max<int64_t>(1, rows * l.row_bytes()));
  scales.reserve(std::max<int64_t>(1, rows * 4));
  Team::lead(threads, [&](Team& team) {
    team.each(rows, [&](int64_t r) {
      float* row = scratch(l.in);
      std::copy(x + r * x_stride, x + r * x_stride + l.in, row);
      k.prepare(l, row, acts.as<uint8_t>() + r * l.row_bytes(), scales.as<float>() + r);
    });
    const int64_t step = panels_of_piece(l, threads);
    team.each((l.panels() + step - 1) / step, [&](int64_t i) {
      k.product(l, {acts.as<uint8_t>(), scales.as<float>(), rows},
                {out, stride, i * step, std::min((i + 1) * step, l.panels())});
    });
  });
}

void pack_rounded(const Linear& l, const void* rows, int type, int threads, Isa isa) {
  const Kernels& k = kernels(isa);
  const int64_t item = type == 0 ? 4 : 2;
  Team::lead(threads, [&](Team& team) {
    team.each(l.panels(), [&](int64_t panel) {
      for (int64_t row = panel * PANEL; row < std::min((panel + 1) * PANEL, l.out); row++) {
        float* x = scratch(l.in);
        k.unpack(static_cast<const char*>(rows) + row * l.in * item, l.in, type, x);
        k.pack_row(l, x, row);
      }
    });
  });
}

void argmax(const float* x, int64_t stride, int64_t rows, int64_t n, int64_t* index, float* value, int threads,
            Isa isa) {
  const Kernels& k = kernels(isa);
  Team::lead(static_cast<int>(std::min<int64_t>(threads, rows)), [&](Team& team) {
    team.each(rows, [&](int64_t r) { index[r] = k.argmax(x + r * stride, n, value + r); });
  });
}

void Finalists::enter(int64_t token, double sum) {
  if (!(sum > -HUGE_VAL && sum >= best - NEAR)) return;
  if (sum > best) {
    best = sum;
    if (count > ROOM) return;
    int kept = 0;
    for (int i = 0; i < count; i++)
      if (sums[i] >= best - NEAR) tokens[kept] = tokens[i], sums[kept++] = sums[i];
    count = kept;
  }
  if (count < ROOM) tokens[count] = token, sums[count] = sum;
  count = std::min(count + 1, ROOM + 1);
}

std::vector<int64_t> race(const float* logits, int64_t n, float temperature, uint64_t key, int threads, Isa isa) {
  constexpr int64_t PIECE = 8192;
  const Kernels& k = kernels(isa);
  const int64_t pieces = (n + PIECE - 1) / PIECE;
  std::vector<float> tops(pieces);
  std::vector<Finalists> found(pieces);
  std::atomic<double> best{-HUGE_VAL};
  Team::lead(threads, [&](Team& team) {
    team.each(pieces, [&](int64_t i) { tops[i] = k.highest(logits + i * PIECE, std::min(PIECE, n - i * PIECE)); });
    const Race r{*std::max_element(tops.begin(), tops.end()), temperature, key};
    team.each(pieces, [&](int64_t i) {
      Finalists& f = found[i];
      double known = f.best = best.load(std::memory_order_relaxed);
      k.race(logits, r, i * PIECE, std::min((i + 1) * PIECE, n), f);
      while (f.best > known && !best.compare_exchange_weak(known, f.best, std::memory_order_relaxed)) {
      }
    });
  });
  std::vector<int64_t> out;
  for (const Finalists& f : found) {
    if (f.count > Finalists::ROOM) return {};
    for (int i = 0; i < f.count; i++)
      if (f.sums[i] >= best.load(std::memory_order_relaxed) - Finalists::NEAR) out.push_back(f.tokens[i]);
  }
  return out;
}

}  // namespace sash
