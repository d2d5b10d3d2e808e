// The largest results of a head without computing all of them exactly.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "products.h"
#include "team.h"

namespace sash {

Search::Search(const Linear& head, int threads, Isa isa) : head_(head) {
  const int64_t width = head_.width(), bytes = head_.panels() * Screening::steps(head_) * Screening::BYTES;
  screening_.weight = weight_.need<char>(bytes);
  screening_.offset = offset_.need<int32_t>(width);
  screening_.bound = bound_.need<float>(width);
  std::fill_n(weight_.as<char>(), bytes, 0);
  std::fill_n(screening_.offset, width, 0);
  std::fill_n(screening_.bound, width, 0.0f);
  for (int64_t row = 0; row < head_.out; row++) finite_ = finite_ && std::isfinite(head_.scale[row]);
  const Kernels& k = kernels(isa);
  Team::lead(threads, [&](Team& team) {
    team.each(head_.panels(), [&](int64_t panel) {
      for (int64_t row = panel * PANEL; row < std::min((panel + 1) * PANEL, head_.out); row++)
        k.screen_row(head_, screening_, row);
    });
  });
}

void Search::reserve(int64_t rows) {
  acts_.reserve(rows * head_.row_bytes());
  scales_.reserve(rows * 4);
  totals_.reserve(rows * 4);
  lengths_.reserve(rows * 4);
  results_.reserve(rows * head_.width() * 4);
}

// Row r as the head wants it, and what its bounds need.
void Search::prepare(const Kernels& k, const float* x, int64_t r) {
  float* row = scratch(head_.in);
  std::copy(x, x + head_.in, row);
  uint8_t* act = acts_.as<uint8_t>() + r * head_.row_bytes();
  std::fill(act, act + head_.row_bytes(), 128);
  k.prepare(head_, row, act, scales_.as<float>() + r);
  int64_t sum = 0, squares = 0;
  for (int64_t i = 0; i < head_.in; i++) {
    const int whole = act[i] - 128;
    sum += whole, squares += whole * whole;
  }
  totals_.as<float>()[r] = 1.5f * static_cast<float>(sum);
  // A result of n inputs is at most 127 √n times the row's length and rounds some six times, by 2^-24 each; what is
  // cut off is at least √n / 2 long, so that a thousandth of its bound is ten times more.
  lengths_.as<float>()[r] = std::sqrt(static_cast<float>(squares)) * scales_.as<float>()[r] * 1.001f;
}

void Search::best(const float* x, int64_t x_stride, int64_t rows, int64_t* index, float* value, int threads, Isa isa) {
  const Kernels& k = kernels(isa);
  const Linear& l = head_;
  const int64_t step = panels_of_piece(l, threads), pieces = (l.panels() + step - 1) / step;
  std::vector<float> least(pieces * rows), highest(pieces * rows);
  std::vector<int64_t> found(pieces * rows);
  Team::lead(threads, [&](Team& team) {
    reserve(rows);
    for (int64_t r = 0; r < rows; r++) prepare(k, x + r * x_stride, r);
    const SearchRows all{{acts_.as<uint8_t>(), scales_.as<float>(), rows}, totals_.as<float>(), lengths_.as<float>()};
    const auto columns = [&](int64_t piece, int64_t r) {
      return Columns{results_.as<float>() + r * l.width(), l.width(), piece * step,
                     std::min((piece + 1) * step, l.panels())};
    };
    team.each(pieces, [&](int64_t i) { k.screen(l, screening_, all, columns(i, 0), least.data() + i * rows); });
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 1; i < pieces; i++) least[r] = std::max(least[r], least[i * rows + r]);
    team.each(pieces * rows, [&](int64_t i) {
      const int64_t r = i % rows;
      const SearchRows one{{all.data + r * l.row_bytes(), all.scales + r, 1}, all.totals + r, all.lengths + r};
      highest[i] = k.refine(l, screening_, one, columns(i / rows, r), least[r], &found[i]);
    });
    for (int64_t r = 0; r < rows; r++) {
      index[r] = l.out;
      value[r] = -std::numeric_limits<float>::infinity();
      for (int64_t i = 0; i < pieces; i++)
        if (highest[i * rows + r] > value[r]) value[r] = highest[i * rows + r], index[r] = found[i * rows + r];
      if (!finite_ || !std::isfinite(all.scales[r])) value[r] = std::numeric_limits<float>::quiet_NaN();
      index[r] = std::min(index[r], l.out - 1);
    }
  });
}

}  // namespace sash
