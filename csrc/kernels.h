// What every instruction set implements besides attention: linear layers and the work on single rows.
#pragma once

#include <cmath>
#include <cstdint>

#include "isa.h"

namespace sash {

constexpr int64_t PANEL = 64;  // outputs whose weights lie together
constexpr int64_t GROUP = 32;  // inputs of an output whose int4 weights share a scale
constexpr int64_t GROUP_BYTES = PANEL * (GROUP / 2 + 4);  // of a panel's int4 weights and scales

// One linear layer. Outputs are padded with zeros to whole panels.
//
// kind 0, float32: weight [panel][in][64].
// kind 1, bfloat16: weight [panel][in / 2][64][2], an odd `in` padded with zeros.
// kind 2, int8: weight [panel][in / 4][64][4], `in` padded with zeros to a multiple of 4. Weights and
// activations are rotated by Hadamard matrices in blocks of `block` inputs first (QuaRot, arXiv
// 2404.00456), then scaled per output and per row. Activations are stored plus 128, `offset` [out] is
// 128 times the sum of an output's weights.
// kind 3, int4: weight [panel][in / 32], each [4][64][4] bytes and [2][64] bfloat16: scales and least weights. A byte
// [t][output][b] has the weight of input 8 · t + b in its low half, of 8 · t + 4 + b in its high half; a weight is
// least + scale · half. Rotated and with activations as int8; `scale` [out] is 128 times the sum of scale · half.
struct Linear {
  int kind = 0;
  int64_t in = 0, out = 0, block = 1;
  // What packing writes, and everything else reads.
  void* weight = nullptr;
  float* scale = nullptr;
  int32_t* offset = nullptr;
  const float* bias = nullptr;  // padded to whole panels, or null

  int64_t panels() const { return (out + PANEL - 1) / PANEL; }
  int64_t width() const { return panels() * PANEL; }  // floats of a row of results
  int64_t steps() const { return kind == 0 ? in : kind == 1 ? (in + 1) / 2 : (in + 3) / 4; }  // of 4 bytes
  int64_t groups() const { return (in + GROUP - 1) / GROUP; }  // of int4
  // Bytes of one row of prepared activations.
  int64_t row_bytes() const { return ((kind == 3 ? groups() * (GROUP + 4) : steps() * 4) + 63) / 64 * 64; }
};

// 6 of the 8 bits of a head's int8 weights, [panel][in / 16] of [2][64][4] bytes and [64][4]: a byte of the first two
// has bits 4 to 7 of two inputs, one of the last bits 2 and 3 of four; see screen.inc. `offset` [out] is 128 times the
// sum of an output's weights so cut, `bound` [out] the length of what is cut off, about 3/2, times the scale.
struct Screening {
  static constexpr int64_t DEEP = 16, BYTES = PANEL * 12;  // inputs and bytes of a panel's step
  static int64_t steps(const Linear& l) { return (l.in + DEEP - 1) / DEEP; }

  // What screen_row writes, and a search reads.
  void* weight = nullptr;
  int32_t* offset = nullptr;
  float* bound = nullptr;
};

// Prepared rows of activations [count][row_bytes], and each one's scale where the kind has them.
struct Rows {
  const uint8_t* data;
  const float* scales;
  int64_t count;
};

// Rows of a search, and of each one's whole numbers: 3/2 of their sum; and their length times the row's scale, with
// room for rounding.
struct SearchRows : Rows {
  const float *totals, *lengths;
};

// Of results [rows][stride], the columns of panels first … last - 1.
struct Columns {
  float* out;
  int64_t stride, first, last;
};

// A token drawn from logits: the one with the largest (logit - top) / temperature + noise, where noise is Gumbel's, of
// the mixed bits of key + token; see sash.ops.sampling. `top` is the largest logit.
struct Race {
  float top, temperature;
  uint64_t key;
};

// Tokens whose sums come near the largest that was seen: rounding decides among them.
struct Finalists {
  static constexpr int ROOM = 32;
  static constexpr double NEAR = 1e-3;
  double best = -HUGE_VAL;
  int count = 0;  // more than ROOM: some were lost
  int64_t tokens[ROOM];
  double sums[ROOM];

  void enter(int64_t token, double sum);
};

enum class Activation : int { silu, gelu, gelu_tanh };

struct Kernels {
  // One row of activations x [in], which is overwritten, as the weights want it; its scale where the kind has one.
  void (*prepare)(const Linear&, float* x, uint8_t* to, float* scale);
  void (*product)(const Linear&, const Rows&, const Columns&);
  // Results from 6 bits and the largest that one of each row is at least; then of a single row the largest, exact, with
  // its index.
  void (*screen)(const Linear&, const Screening&, const SearchRows&, const Columns&, float* least);
  float (*refine)(const Linear&, const Screening&, const SearchRows& row, const Columns&, float least, int64_t* index);
  void (*screen_row)(const Linear&, const Screening&, int64_t output);
  // Weights x [in] of one output, which is overwritten, as int8 or int4 to where the layer's pointers point.
  void (*pack_row)(const Linear&, float* x, int64_t output);
  // Weights [in] of one output, from before they were packed: an embedding's row.
  void (*unpack_row)(const Linear&, int64_t output, float* to);
  // x over its root mean square, or less its mean over its deviation, times weight [n].
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  void (*layer_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  // cos and sin [half] of position · inv_freq [half], times factor.
  void (*angles)(float position, const float* inv_freq, int64_t half, float factor, float* cos, float* sin);
  // Rotate the first 2 · half of x by angles of cos and sin [half].
  void (*rope)(float* x, const float* cos, const float* sin, int64_t half, bool interleaved);
  // x [n] times an orthonormal Hadamard matrix in blocks of `block`, a power of two that divides n.
  void (*turn)(float* x, int64_t n, int64_t block);
  // activation(gate) · up of a row [gate, up] of n each.
  void (*gated)(const float* gate_up, Activation, int64_t n, float* out);
  void (*add)(float* to, const float* x, int64_t n);
  // Between float32 and a storage type: 0 float32, 1 bfloat16.
  void (*pack)(const float* x, int64_t n, int type, void* to);
  void (*unpack)(const void* x, int64_t n, int type, float* to);
  // Index of the largest of x [n] (the first of equals) and its value; NaN anywhere gives NaN.
  int64_t (*argmax)(const float* x, int64_t n, float* best);
  // The largest of x [n] but for NaN.
  float (*highest)(const float* x, int64_t n);
  // Tokens first … last - 1 enter a race; NaN never wins.
  void (*race)(const float* logits, const Race&, int64_t first, int64_t last, Finalists&);
};

namespace avx512 { const Kernels& kernels(); }
namespace avx2 { const Kernels& kernels(); }
namespace portable { const Kernels& kernels(); }
const Kernels& kernels(Isa);

}  // namespace sash
