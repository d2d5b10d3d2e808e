#include "step.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "quantise.h"
#include "team.h"

namespace sash {

namespace {

// Rows from which each thread takes a block of them through all of a layer's products, instead of
// all rows through a part of each product.
constexpr int64_t MANY = 32;
constexpr int64_t BLOCK_ROWS = 64;  // rows of such a block: they stay in a core's cache

}  // namespace

// One step on its way through the layers.
class Run {
 public:
  Run(Model& model, const Step& step, Isa isa)
      : m_(model), s_(step), k_(kernels(isa)), attend_(attention_piece(isa)), quantise_(quantise_row(isa)),
        rows_(step.rows) {
    for (std::size_t i = 0; i < m_.layers.size(); i++) plan_of_.push_back(plan(i));
    origin_.resize(rows_);
    for (int64_t r = 0; r < rows_; r++) origin_[r] = r;
  }

  void all(Team& team) {
    team_ = &team;
    const int last = static_cast<int>(m_.layers.size()) - 1;
    wanted(0);
    chain({{&Run::begin, 0}, {&Run::enter, 0}, {&Layer::qkv, 0}, {&Run::place, 0}});
    for (int i = 0; i < last; i++) {
      attention(i);
      wanted(i + 1);
      chain({{&Run::open, i}, {&Layer::o, i}, {&Run::join, i}, {&Layer::gate_up, i}, {&Run::gate, i}, {&Layer::down, i},
             {&Run::leave, i}, {&Run::enter, i + 1}, {&Layer::qkv, i + 1}, {&Run::place, i + 1}});
    }
    attention(last);
    chain({{&Run::open, last}, {&Layer::o, last}, {&Run::join, last}, {&Layer::gate_up, last}, {&Run::gate, last},
           {&Layer::down, last}, {&Run::leave, last}, {&Run::finish, last}});
  }

 private:
  // Work on single rows, or a product.
  struct Stage {
    Stage(void (Run::*f)(int, int64_t, int64_t), int i) : row(f), layer(i) {}
    Stage(Linear Layer::*l, int i) : product(l), layer(i) {}
    void (Run::*row)(int layer, int64_t block, int64_t row) = nullptr;
    Linear Layer::*product = nullptr;
    int layer;
  };

  // The stages on all rows: block by block where there are many, else stage by stage.
  void chain(std::initializer_list<Stage> stages) {
    if (rows_ < MANY * team_->threads()) {
      for (const Stage& stage : stages) spread(stage);
      return;
    }
    const int64_t turns = (rows_ + BLOCK_ROWS * team_->threads() - 1) / (BLOCK_ROWS * team_->threads());
    const int64_t size = (rows_ + turns * team_->threads() - 1) / (turns * team_->threads());
    const int64_t block = (size + 5) / 6 * 6;  // whole register tiles
    team_->each((rows_ + block - 1) / block, [&](int64_t piece) {
      const int64_t a = piece * block, b = std::min(a + block, rows_);
      for (const Stage& stage : stages) {
        if (stage.product) {
          const Linear& l = m_.layers[stage.layer].*stage.product;
          k_.product(l, {act(l, a, a), scale(a), b - a}, {wide(l, a, a), l.width(), 0, l.panels()});
        } else {
          for (int64_t r = a; r < b; r++) (this->*stage.row)(stage.layer, a, r);
        }
      }
    });
  }

  void spread(const Stage& stage) {
    if (!stage.product) {
      if (rows_ <= 2) {
        for (int64_t r = 0; r < rows_; r++) (this->*stage.row)(stage.layer, 0, r);
      } else {
        team_->each(rows_, [&](int64_t r) { (this->*stage.row)(stage.layer, 0, r); });
      }
      return;
    }
    const Linear& l = m_.layers[stage.layer].*stage.product;
    const int64_t step = panels_of_piece(l, team_->threads());
    team_->each((l.panels() + step - 1) / step, [&](int64_t i) {
      k_.product(l, {act(l, 0, 0), scale(0), rows_},
                 {wide(l, 0, 0), l.width(), i * step, std::min((i + 1) * step, l.panels())});
    });
  }

  // Blocks may be at different products at the same time: each has its own part of the buffers.
  uint8_t* act(const Linear& l, int64_t block, int64_t r) const {
    return m_.acts_.as<uint8_t>() + block * m_.act_bytes_ + (r - block) * l.row_bytes();
  }
  float* wide(const Linear& l, int64_t block, int64_t r) const {
    return m_.wide_.as<float>() + block * m_.width_ + (r - block) * l.width();
  }
  float* scale(int64_t r) const { return m_.scales_.as<float>() + r; }
  float* hidden(int64_t r) const { return s_.hidden + r * m_.hidden; }
  float* angles(int64_t r) const { return m_.angles_.as<float>() + r * m_.turns_; }
  float* normed(int64_t r) const { return m_.normed_.as<float>() + r * m_.hidden; }
  void norm(const float* x, const float* weight, int64_t n, float* out) const {
    (m_.layer_norm ? k_.layer_norm : k_.rms_norm)(x, weight, m_.eps, n, out);
  }
  int64_t item() const { return m_.type == 0 ? 4 : 2; }
  static int64_t kv_item(const Layer& l) { return l.kv_type == 0 ? 4 : l.kv_type == 1 ? 2 : 1; }
  void prepare(const Linear& l, float* x, int64_t block, int64_t r) const {
    k_.prepare(l, x, act(l, block, r), scale(r));
  }

  // ---- work on rows

  // A row's embedding and angles.
  void begin(int, int64_t, int64_t r) {
    if (s_.tokens) {
      k_.unpack_row(m_.head, s_.tokens[r], hidden(r));
      for (int64_t i = 0; i < m_.hidden; i++) hidden(r)[i] *= m_.embed_scale;
    }
    float* to = angles(r);
    for (const Rope& rope : m_.ropes) {
      k_.angles(static_cast<float>(s_.positions[r]), rope.inv_freq, rope.half, rope.factor, to, to + rope.half);
      to += 2 * rope.half;
    }
  }

  void enter(int i, int64_t block, int64_t r) {
    const Layer& l = m_.layers[i];
    float* x = scratch(m_.hidden);
    if (l.attn_norm) norm(hidden(r), l.attn_norm, m_.hidden, x);
    else std::copy(hidden(r), hidden(r) + m_.hidden, x);
    if (m_.parallel) std::copy(x, x + m_.hidden, normed(r));
    prepare(l.qkv, x, block, r);
  }

  void place(int i, int64_t block, int64_t r) {
    const Layer& l = m_.layers[i];
    float* q = wide(l.qkv, block, r);
    const int64_t q_size = l.heads * l.dim, k_size = l.kv_heads * l.dim;
    float *k = q + q_size, *v = k + k_size;
    const int64_t q_row = narrows(i) ? q_row_[r] : r;
    if (l.q_norm) {
      norm(q, l.q_norm, q_size, q);
      norm(k, l.k_norm, k_size, k);
    }
    for (int64_t h = q_row < 0 ? l.heads : 0; h < l.heads + l.kv_heads; h++) {
      float* x = q + h * l.dim;
      if (l.head_norm) norm(x, l.head_norm + h * l.dim, l.dim, x);
      if (l.rope >= 0) {
        const float* cos = angles(origin_[r]);
        for (int before = 0; before < l.rope; before++) cos += 2 * m_.ropes[before].half;
        const int64_t half = m_.ropes[l.rope].half;
        k_.rope(x, cos, cos + half, half, l.interleaved);
      }
      if (l.key_block > 1) k_.turn(x, l.dim, l.key_block);
    }
    if (q_row >= 0) k_.pack(q, q_size, m_.type, m_.q_.as<char>() + q_row * q_size * item());
    hold(l, k, l.dim, r, m_.k_, m_.k_scale_);
    hold(l, v, l.v_dim, r, m_.v_, m_.v_scale_);
  }

  // Keys or values x [kv_heads][n] of row r as the pool stores rows.
  void hold(const Layer& l, const float* x, int64_t n, int64_t r, const Buffer& rows, const Buffer& scales) const {
    char* to = rows.as<char>() + r * l.kv_heads * n * kv_item(l);
    if (l.kv_type < 2) return k_.pack(x, l.kv_heads * n, l.kv_type, to);
    // Rounded as queries are first: what int8 is made of doesn't depend on who makes it.
    char* rounded = reinterpret_cast<char*>(scratch(l.kv_heads * n));
    k_.pack(x, l.kv_heads * n, m_.type, rounded);
    for (int64_t h = 0; h < l.kv_heads; h++)
      scales.as<float>()[r * l.kv_heads + h] =
          quantise_(rounded + h * n * item(), m_.type, n, reinterpret_cast<int8_t*>(to) + h * n);
  }

  void open(int i, int64_t block, int64_t r) {
    const Layer& l = m_.layers[i];
    float* x = scratch(l.o.in);
    k_.unpack(m_.mixed_.as<char>() + r * l.o.in * item(), l.o.in, m_.type, x);
    prepare(l.o, x, block, r);
  }

  void join(int i, int64_t block, int64_t r) {
    const Layer& l = m_.layers[i];
    float *y = wide(l.o, block, r), *x = scratch(m_.hidden);
    if (l.post_attn_norm) norm(y, l.post_attn_norm, m_.hidden, y);
    k_.add(hidden(r), y, m_.hidden);
    const float* from = m_.parallel ? normed(r) : hidden(r);
    if (!m_.parallel && l.mlp_norm) norm(from, l.mlp_norm, m_.hidden, x);
    else std::copy(from, from + m_.hidden, x);
    prepare(l.gate_up, x, block, r);
  }

  void gate(int i, int64_t block, int64_t r) {
    const Layer& l = m_.layers[i];
    float* x = scratch(l.down.in);
    k_.gated(wide(l.gate_up, block, r), static_cast<Activation>(l.activation), l.down.in, x);
    prepare(l.down, x, block, r);
  }

  void leave(int i, int64_t block, int64_t r) {
    const Layer& l = m_.layers[i];
    float* y = wide(l.down, block, r);
    if (l.post_mlp_norm) norm(y, l.post_mlp_norm, m_.hidden, y);
    k_.add(hidden(r), y, m_.hidden);
  }

  void finish(int, int64_t, int64_t r) { norm(hidden(r), m_.final_norm, m_.hidden, s_.out + r * m_.hidden); }

  // ---- attention

  AttentionCall call(int i) const {
    const Layer& l = m_.layers[i];
    const View& v = s_.views[s_.view_of[i]];
    AttentionCall c{};
    c.q = m_.q_.as<void>(), c.k = m_.k_.as<void>(), c.v = m_.v_.as<void>(), c.out = m_.mixed_.as<void>();
    c.k_pool = l.k_pool, c.v_pool = l.v_pool, c.sink_logits = l.sinks;
    c.q_head = c.k_head = l.dim, c.v_head = l.v_dim;
    c.q_stride = l.heads * l.dim, c.k_stride = l.kv_heads * l.dim, c.v_stride = l.kv_heads * l.v_dim;
    c.slots = l.slots, c.heads = l.kv_heads, c.folded = l.heads / l.kv_heads, c.dim = l.dim, c.v_dim = l.v_dim;
    c.segments = v.segments, c.num_segments = v.num_segments;
    c.past_positions = v.past_positions, c.past_slots = v.past_slots, c.firsts = v.firsts, c.lasts = v.lasts;
    c.scale = l.scale, c.softcap = l.softcap, c.threads = s_.threads, c.type = m_.type;
    c.kv_type = l.kv_type;
    if (l.kv_type == 2) {
      c.k_scale = m_.k_scale_.as<float>(), c.v_scale = m_.v_scale_.as<float>();
      c.k_pool_scale = l.k_pool_scale, c.v_pool_scale = l.v_pool_scale;
    }
    return c;
  }

  // Number of the plan for layer i; layers of one view and shape share it.
  std::size_t plan(std::size_t i) {
    const Layer& l = m_.layers[i];
    for (std::size_t j = 0; j < i; j++) {
      const Layer& o = m_.layers[j];
      if (s_.view_of[j] == s_.view_of[i] && o.heads == l.heads && o.kv_heads == l.kv_heads && o.dim == l.dim &&
          o.v_dim == l.v_dim && o.kv_type == l.kv_type)
        return plan_of_[j];
    }
    plans_.push_back(std::make_unique<AttentionPlan>(call(static_cast<int>(i))));
    return plans_.size() - 1;
  }

  void attention(int i) {
    const View& v = s_.views[s_.view_of[i]];
    for (int64_t e = 0; e < v.early; e++) store(i, v.early_rows[e], v.early_slots[e]);
    const AttentionCall c = call(i);
    AttentionPlan& plan = *plans_[plan_of_[i]];
    team_->each(plan.pieces(), [&](int64_t piece) { attend_(c, plan, piece); });
    team_->each((v.late + BLOCK_ROWS - 1) / BLOCK_ROWS, [&](int64_t b) {
      const int64_t end = std::min((b + 1) * BLOCK_ROWS, v.late);
      for (int64_t e = b * BLOCK_ROWS; e < end; e++) store(i, v.late_rows[e], v.late_slots[e]);
    });
    if (narrows(i)) narrow(i);
  }

  // Row r of the keys and values in hand to a slot of the pool.
  void store(int i, int64_t r, int64_t slot) const {
    const Layer& l = m_.layers[i];
    for (int64_t h = 0; h < l.kv_heads; h++) {
      const int64_t k = l.dim * kv_item(l), v = l.v_dim * kv_item(l);
      std::memcpy(static_cast<char*>(l.k_pool) + (h * l.slots + slot) * k,
                  m_.k_.as<char>() + (r * l.kv_heads + h) * k, k);
      std::memcpy(static_cast<char*>(l.v_pool) + (h * l.slots + slot) * v,
                  m_.v_.as<char>() + (r * l.kv_heads + h) * v, v);
      if (l.kv_type < 2) continue;
      l.k_pool_scale[h * l.slots + slot] = m_.k_scale_.as<float>()[r * l.kv_heads + h];
      l.v_pool_scale[h * l.slots + slot] = m_.v_scale_.as<float>()[r * l.kv_heads + h];
    }
  }

  bool narrows(int i) const { return s_.kept[i] >= 0; }

  // Before layer i: which of its rows have a query.
  void wanted(int i) {
    if (!narrows(i)) return;
    q_row_.assign(rows_, -1);
    for (int64_t j = 0; j < s_.kept[i]; j++) q_row_[s_.keep[i][j]] = j;
  }

  // Behind layer i's attention only the rows in `keep` go on.
  void narrow(int i) {
    for (int64_t j = 0; j < s_.kept[i]; j++) {
      const int64_t r = s_.keep[i][j];
      origin_[j] = origin_[r];
      if (r == j) continue;
      std::copy(hidden(r), hidden(r) + m_.hidden, hidden(j));
      if (m_.parallel) std::copy(normed(r), normed(r) + m_.hidden, normed(j));
    }
    rows_ = s_.kept[i];
  }

  Model& m_;
  const Step& s_;
  const Kernels& k_;
  const AttentionPiece attend_;
  const QuantiseRow quantise_;
  Team* team_ = nullptr;
  int64_t rows_;                  // that are still wanted
  std::vector<int64_t> origin_;   // each one's row of the step
  std::vector<int64_t> q_row_;    // each one's query in a layer that narrows, or -1
  std::vector<std::unique_ptr<AttentionPlan>> plans_;
  std::vector<std::size_t> plan_of_;
};

void Model::reserve(int64_t rows) {
  int64_t q = 0, k = 0, v = 0, mixed = 0, heads = 0;
  act_bytes_ = width_ = 0;
  for (const Layer& l : layers) {
    for (const Linear* linear : {&l.qkv, &l.o, &l.gate_up, &l.down}) {
      act_bytes_ = std::max(act_bytes_, linear->row_bytes());
      width_ = std::max(width_, linear->width());
    }
    q = std::max(q, l.heads * l.dim), k = std::max(k, l.kv_heads * l.dim), v = std::max(v, l.kv_heads * l.v_dim);
    mixed = std::max(mixed, l.heads * l.v_dim), heads = std::max(heads, l.kv_heads);
  }
  turns_ = 0;
  for (const Rope& rope : ropes) turns_ += 2 * rope.half;
  angles_.reserve(rows * turns_ * 4);
  acts_.reserve(rows * act_bytes_);
  scales_.reserve(rows * 4);
  wide_.reserve(rows * width_ * 4);
  if (parallel) normed_.reserve(rows * hidden * 4);
  q_.reserve(rows * q * 4);
  k_.reserve(rows * k * 4);
  v_.reserve(rows * v * 4);
  k_scale_.reserve(rows * heads * 4);
  v_scale_.reserve(rows * heads * 4);
  mixed_.reserve(rows * mixed * 4);
}

void Model::forward(const Step& step, Isa isa) {
  Team::lead(step.threads, [&](Team& team) {
    reserve(step.rows);
    Run(*this, step, isa).all(team);
  });
}

}  // namespace sash
