// How a batch is cut into pieces, and threads that run them.
#include "attention.h"

#include <algorithm>

#include "team.h"

namespace sash {
namespace {

constexpr int64_t QUERIES = 64;  // queries in a piece of a chunk
constexpr int64_t SPLIT = 256;   // least keys of a part of a single query
constexpr int64_t STEP = 64;     // parts are multiples of this many keys

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// First column of a segment whose position is not below `position`.
int64_t column_of(const AttentionCall& c, const Segment& s, int64_t position) {
  const int64_t columns = s.past_count + s.kv_count;
  if (s.kv_count && position >= s.kv_start) return std::min(columns, s.past_count + position - s.kv_start);
  if (!s.past_count) return 0;
  const int64_t* positions = c.past_positions + s.past;
  // Past rows end in a run of neighbours, sinks apart.
  const int64_t guess = s.past_count - 1 - (positions[s.past_count - 1] - position);
  if (guess >= 0 && guess < s.past_count && positions[guess] == position) return guess;
  return std::lower_bound(positions, positions + s.past_count, position) - positions;
}

}  // namespace

AttentionPlan::AttentionPlan(const AttentionCall& c) {
  int64_t queries = 0, singles = 0;
  for (int64_t i = 0; i < c.num_segments; i++) {
    const Segment& s = c.segments[i];
    queries = std::max(queries, s.q_row + s.q_count);
    singles += s.q_count && !s.kv_count;
  }
  low.resize(queries);
  high.resize(queries);
  for (int64_t i = 0; i < c.num_segments; i++) {
    const Segment& s = c.segments[i];
    sinks.push_back(column_of(c, s, s.sinks));
    for (int64_t row = s.q_row; row < s.q_row + s.q_count; row++) {
      low[row] = column_of(c, s, c.firsts[row]);
      high[row] = column_of(c, s, c.lasts[row] + 1);
    }
    for (int64_t h = 0; h < c.heads && s.q_count; h++) {
      if (s.kv_count) {
        for (int64_t a = 0; a < s.q_count; a += QUERIES)
          chunks.push_back({i, h, a, std::min(QUERIES, s.q_count - a)});
        continue;
      }
      const int64_t start = low[s.q_row], end = high[s.q_row], first = static_cast<int64_t>(parts.size());
      const int64_t merge = static_cast<int64_t>(merges.size()), pinned = std::min(sinks[i], start);
      const int64_t want = std::max<int64_t>(1, c.threads / std::max<int64_t>(1, singles * c.heads));
      const int64_t step = std::max(SPLIT, ceil_div(ceil_div(end - start, want), STEP) * STEP);
      if (pinned) parts.push_back({i, h, 0, pinned, merge});
      for (int64_t a = start; a < end; a += step) parts.push_back({i, h, a, std::min(a + step, end), merge});
      const int64_t count = static_cast<int64_t>(parts.size()) - first;
      merges.push_back({first, count, count});
    }
  }
  // The longest chunks come last in a prompt: take them first, so that threads end together.
  std::reverse(chunks.begin(), chunks.end());
  partial.resize(parts.size() * c.folded * (2 + c.v_dim));
}

AttentionPiece attention_piece(Isa isa) {
  switch (isa) {
#if defined(SASH_X86)
    case Isa::avx512: return avx512::attention_piece;
    case Isa::avx2: return avx2::attention_piece;
#endif
    default: return portable::attention_piece;
  }
}

void attention(const AttentionCall& c, Isa isa) {
  AttentionPlan plan(c);
  const AttentionPiece piece = attention_piece(isa);
  const int64_t pieces = plan.pieces();
  Team::lead(c.threads, [&](Team& team) { team.each(pieces, [&](int64_t i) { piece(c, plan, i); }); });
}

}  // namespace sash
