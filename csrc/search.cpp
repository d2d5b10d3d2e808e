// The largest results of a head without computing all of them exactly.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "products.h"
#include "team.h"

namespace sash {
Search::Search(const Linear& head, int threads, Isa isa) : head_(head) {
  const int64_t width = head_.width();
  weight_.reserve(width * ((head_.in + 15) / 16) * 12);
  offset_.reserve(width * 4);
  bound_.reserve(width * 4);
  std::fill_n(weight_.as<char>(), width * ((head_.in + 15) / 16) * 12, 0);
  std::fill_n(offset_.as<int32_t>(), width, 0);
  std::fill_n(bound_.as<float>(), width, 0.0f);
  screening_.weight = weight_.as<void>();
  screening_.offset = offset_.as<int32_t>();
  screening_.bound = bound_.as<float>();
  for (int64_t row = 0; row < head_.out; row++) finite_ = finite_ && std::isfinite(head_.scale[row]);
  const Kernels& k = kernels(isa);
  Team::lead(threads, [&](Team& team) {
    team.each(head_.panels(), [&](int64_t panel) {
      for (int64_t row = panel * PANEL; row < std::min((panel + 1) * PANEL, head_.out); row++)
        k.screen_row(head_, screening_, row);
    });
  });
}

void Search::best(const float* x, int64_t x_stride, int64_t rows, int64_t* index, float* value, int threads, Isa isa) {
  const Kernels& k = kernels(isa);
  const Linear& l = head_;
  const int64_t width = l.width(), bytes = l.row_bytes();
  acts_.reserve(rows * bytes);
  scales_.reserve(rows * 4);
  totals_.reserve(rows * 4);
  lengths_.reserve(rows * 4);
  results_.reserve(rows * width * 4);
  const SearchRows all{{acts_.as<uint8_t>(), scales_.as<float>(), rows}, totals_.as<float>(), lengths_.as<float>()};
  const int64_t step = std::max<int64_t>(1, panels_of_piece(l, threads)), pieces = (l.panels() + step - 1) / step;
  std::vector<float> least(pieces * rows), highest(pieces * rows);
  std::vector<int64_t> found(pieces * rows);
  Team::lead(threads, [&](Team& team) {
    for (int64_t r = 0; r < rows; r++) {
      float* row = scratch(l.in);
      std::copy(x + r * x_stride, x + r * x_stride + l.in, row);
      uint8_t* act = acts_.as<uint8_t>() + r * bytes;
      std::fill(act, act + bytes, 128);
      k.prepare(l, row, act, scales_.as<float>() + r);
      int64_t sum = 0, squares = 0;
      for (int64_t i = 0; i < l.in; i++) {
        const int whole = act[i] - 128;
        sum += whole, squares += whole * whole;
      }
      totals_.as<float>()[r] = 1.5f * static_cast<float>(sum);
      // A result of n inputs is at most 127 √n times the row's length and rounds some six times, by 2^-24 each; what is
      // cut off is at least √n / 2 long, so that a thousandth of its bound is ten times more.
      lengths_.as<float>()[r] = std::sqrt(static_cast<float>(squares)) * scales_.as<float>()[r] * 1.001f;
    }
    team.each(pieces, [&](int64_t i) {
      k.screen(l, screening_, all, {results_.as<float>(), width, i * step, std::min((i + 1) * step, l.panels())},
               least.data() + i * rows);
    });
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 1; i < pieces; i++) least[r] = std::max(least[r], least[i * rows + r]);
    team.each(pieces * rows, [&](int64_t i) {
      const int64_t piece = i / rows, r = i % rows;
      const SearchRows one{{all.data + r * bytes, all.scales + r, 1}, all.totals + r, all.lengths + r};
      highest[i] = k.refine(l, screening_, one,
                            {results_.as<float>() + r * width, width, piece * step, std::min((piece + 1) * step, l.panels())},
                            least[r], &found[i]);
    });
  });
  for (int64_t r = 0; r < rows; r++) {
    index[r] = l.out;
    value[r] = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < pieces; i++)
      if (highest[i * rows + r] > value[r]) value[r] = highest[i * rows + r], index[r] = found[i * rows + r];
    if (!finite_ || !std::isfinite(scales_.as<float>()[r])) value[r] = std::numeric_limits<float>::quiet_NaN();
    index[r] = std::min(index[r], l.out - 1);
  }
}

}  // namespace sash
