// Attention over rings of pages: the call that every instruction set implements.
#pragma once

#include <cstdint>

namespace sash {

// One request's queries and keys in one KV group; the fields of sash.ops.paged.Segment.
struct Segment {
  int64_t q_row, q_start, q_count, kv_row, kv_start, kv_count, past, past_count, sinks;
};

// Strides count elements; the last dimension is contiguous. Types: 0 float32, 1 bfloat16.
struct AttentionCall {
  const void* q;         // [Nq, Hq, D]
  const void* k;         // [N, H, D] in hand
  const void* v;         // [N, H, Dv] in hand
  const void* k_pool;    // [H, slots, D]
  const void* v_pool;    // [H, slots, Dv]
  void* out;             // [Nq, Hq, Dv] contiguous, q's type
  float* lse;            // [Nq, Hq] contiguous
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
  int threads;
};

namespace avx512 { void attention(const AttentionCall&, int type); }
namespace avx2 { void attention(const AttentionCall&, int type); }
namespace portable { void attention(const AttentionCall&, int type); }

}  // namespace sash
