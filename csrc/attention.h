// Attention over rings of pages: the call that every instruction set implements.
#pragma once

#include <cstdint>
#include <vector>

#include "isa.h"

namespace sash {

// One request's queries and keys in one KV group; the fields of sash.ops.paged.Segment.
struct Segment {
  int64_t q_row, q_start, q_count, kv_row, kv_start, kv_count, past, past_count, sinks;
};

// Strides count elements; the last dimension is contiguous. Types: 0 float32, 1 bfloat16, 2 int8.
struct AttentionCall {
  const void* q;         // [Nq, Hq, D]
  const void* k;         // [N, H, D] in hand
  const void* v;         // [N, H, Dv] in hand
  const void* k_pool;    // [H, slots, D]
  const void* v_pool;    // [H, slots, Dv]
  void* out;             // [Nq, Hq, Dv] contiguous, q's type
  float* lse;            // [Nq, Hq] contiguous, or null
  const float* sink_logits;  // [Hq] or null
  int64_t q_stride, q_head, k_stride, k_head, v_stride, v_head;
  int64_t slots, heads, folded, dim, v_dim;
  const Segment* segments;
  int64_t num_segments;
  const int64_t* past_positions;  // of all segments, one after the other
  const int64_t* past_slots;
  const int64_t* firsts;  // [Nq] first and last visible position of each query, sinks apart
  const int64_t* lasts;
  float scale, softcap;
  int threads, type, kv_type;  // type: of q and out; kv_type: of k, v and the pools, the same or narrower
  // What a row of whole numbers is to be multiplied with; null unless kv_type is int8.
  const float *k_scale, *v_scale;            // [N, H] in hand, contiguous
  const float *k_pool_scale, *v_pool_scale;  // [H, slots]
};

// A batch cut into pieces that any thread may run, in any order and at once. It depends on the segments,
// the shapes and the threads alone, so one plan serves all layers of a group, one layer after the other.
struct AttentionPlan {
  // A block of a chunk's queries.
  struct Chunk {
    int64_t segment, head, first, count;
  };
  // A range of the keys (columns) that a single query sees.
  struct Part {
    int64_t segment, head, low, high, merge;
  };
  // The parts of a single query and KV head; ``left`` are still to run: the last of them merges all.
  struct Merge {
    int64_t first, count, left;
  };

  // Reads the shapes, the segments and what they point to, and the threads of a call.
  explicit AttentionPlan(const AttentionCall&);
  int64_t pieces() const { return static_cast<int64_t>(chunks.size() + parts.size()); }

  std::vector<Chunk> chunks;
  std::vector<Part> parts;
  std::vector<Merge> merges;
  // Columns are indices into a segment's past rows followed by its rows in hand.
  std::vector<int64_t> low, high;  // [Nq] first visible column of each query and the one after its last
  std::vector<int64_t> sinks;      // [segments] columns of sinks
  std::vector<float> partial;      // [parts][folded][2 + Dv]: best logit, sum of weights, weighted values
};

// Piece i of plan.pieces(); the call's ``out`` is complete once all have run.
using AttentionPiece = void (*)(const AttentionCall&, AttentionPlan&, int64_t i);
namespace avx512 { void attention_piece(const AttentionCall&, AttentionPlan&, int64_t i); }
namespace avx2 { void attention_piece(const AttentionCall&, AttentionPlan&, int64_t i); }
namespace portable { void attention_piece(const AttentionCall&, AttentionPlan&, int64_t i); }
AttentionPiece attention_piece(Isa);

// All pieces, on the process's worker threads.
void attention(const AttentionCall&, Isa);

}  // namespace sash
