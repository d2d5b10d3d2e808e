// A decoder's layers, and one step through all of them in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "kernels.h"
#include "products.h"

namespace sash {

// One layer; the fields of sash.spec.model.LayerSpec and the addresses of its weights and its part of the pool.
struct Layer {
  Linear qkv, o, gate_up, down;
  const float *attn_norm = nullptr, *post_attn_norm = nullptr;  // [hidden] each, or null
  const float *mlp_norm = nullptr, *post_mlp_norm = nullptr;
  const float* head_norm = nullptr;                     // [heads + kv_heads][dim]: a norm of each head, or null
  const float *q_norm = nullptr, *k_norm = nullptr;     // of all heads at once, or null
  const float* sinks = nullptr;                         // [heads] or null
  int64_t heads = 0, kv_heads = 0, dim = 0, v_dim = 0;
  int rope = -1;  // which of the model's; -1: none
  bool interleaved = false;
  float scale = 1, softcap = 0;
  int activation = 0;
  int64_t key_block = 1;  // keys of an int8 pool, and queries, are rotated in blocks of so many; 1: they are not
  int kv_type = 0;  // of the pool's rows: 0 float32, 1 bfloat16, 2 int8
  void *k_pool = nullptr, *v_pool = nullptr;                // [kv_heads][slots][dim or v_dim]
  float *k_pool_scale = nullptr, *v_pool_scale = nullptr;   // [kv_heads][slots] with int8, or null
  int64_t slots = 0;
};

// One KV group in one step as a run of layers sees it: who attends to what, and which rows are stored where.
// Rows of `early` attend to the pool alone and are stored before the layer attends, those of `late` after it.
struct View {
  const Segment* segments = nullptr;
  int64_t num_segments = 0;
  const int64_t *past_positions = nullptr, *past_slots = nullptr, *firsts = nullptr, *lasts = nullptr;
  const int64_t *early_rows = nullptr, *early_slots = nullptr;
  int64_t early = 0;
  const int64_t *late_rows = nullptr, *late_slots = nullptr;
  int64_t late = 0;
};

// One rotary embedding: radians per position of each pair, and what cos and sin are multiplied with.
struct Rope {
  const float* inv_freq;  // [half]
  int64_t half;
  float factor;
};

struct Step {
  const int64_t* positions = nullptr;  // [rows]
  const int64_t* tokens = nullptr;     // [rows]: looked up in the model's head; null: `hidden` holds the embeddings
  float* hidden = nullptr;          // [rows][hidden], overwritten
  float* out = nullptr;             // [rows that are left][hidden], after the final norm
  int64_t rows = 0;
  int threads = 1;
  std::vector<View> views;
  std::vector<int> view_of;  // per layer
  // Per layer, the rows (ascending) that are still wanted once it has attended, and their number; -1: all are.
  std::vector<const int64_t*> keep;
  std::vector<int64_t> kept;
};

// All layers. Steps of several threads take turns: the buffers are the leading one's.
class Model {
 public:
  int64_t hidden = 0;
  float eps = 0;
  bool layer_norm = false;  // else root mean square
  bool parallel = false;    // attention and MLP side by side
  float embed_scale = 1;
  Linear head;              // where it is tied to the embeddings
  int type = 0;             // of queries and of what attention gives: 0 float32, 1 bfloat16
  const float* final_norm = nullptr;
  std::vector<Rope> ropes;
  std::vector<Layer> layers;

  void forward(const Step& step, Isa isa);

 private:
  friend class Run;
  void reserve(int64_t rows);
  Buffer acts_, scales_, wide_, normed_, q_, k_, v_, k_scale_, v_scale_, mixed_, angles_;
  int64_t act_bytes_ = 0, width_ = 0, turns_ = 0;  // of a row
};

}  // namespace sash
