// The Python side of the kernels. Tensors come as addresses and strides: sash.ops.native has checked them.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "attention.h"
#include "isa.h"
#include "quantise.h"
#include "step.h"
#include "team.h"

namespace nb = nanobind;

namespace sash {

Isa best_isa() {
#if defined(SASH_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
    return Isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#endif
  return Isa::portable;
}

namespace {

Isa chosen = best_isa();

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    default: return "portable";
  }
}

Isa isa_of(const std::string& name) {
  for (Isa isa : {Isa::avx512, Isa::avx2, Isa::portable})
    if (name == name_of(isa)) {
      if (isa > best_isa()) throw std::invalid_argument("this processor has no " + name);
      return isa;
    }
  throw std::invalid_argument("unknown instruction set " + name);
}

template <class T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(static_cast<intptr_t>(address));
}

void attention_call(const std::vector<int64_t>& a, float scale, float softcap, int type) {
  AttentionCall c{};
  c.q = at<void>(a[0]);
  c.k = at<void>(a[1]);
  c.v = at<void>(a[2]);
  c.k_pool = at<void>(a[3]);
  c.v_pool = at<void>(a[4]);
  c.out = at<void>(a[5]);
  c.lse = at<float>(a[6]);
  c.sink_logits = at<float>(a[7]);
  c.q_stride = a[8];
  c.q_head = a[9];
  c.k_stride = a[10];
  c.k_head = a[11];
  c.v_stride = a[12];
  c.v_head = a[13];
  c.slots = a[14];
  c.heads = a[15];
  c.folded = a[16];
  c.dim = a[17];
  c.v_dim = a[18];
  c.segments = at<Segment>(a[19]);
  c.num_segments = a[20];
  c.past_positions = at<int64_t>(a[21]);
  c.past_slots = at<int64_t>(a[22]);
  c.firsts = at<int64_t>(a[23]);
  c.lasts = at<int64_t>(a[24]);
  c.threads = static_cast<int>(a[25]);
  c.scale = scale;
  c.softcap = softcap;
  c.type = type;
  c.kv_type = static_cast<int>(a[26]);
  c.k_scale = at<float>(a[27]);
  c.v_scale = at<float>(a[28]);
  c.k_pool_scale = at<float>(a[29]);
  c.v_pool_scale = at<float>(a[30]);
  nb::gil_scoped_release release;
  attention(c, chosen);
}

// A pointer member as an address.
template <class T, class P>
void address(nb::class_<T>& type, const char* name, P T::*member) {
  type.def_prop_rw(
      name, [member](const T& self) { return reinterpret_cast<intptr_t>(self.*member); },
      [member](T& self, int64_t value) { self.*member = reinterpret_cast<P>(static_cast<intptr_t>(value)); });
}

void add_view(Step& step, const std::vector<int64_t>& a) {
  View v;
  v.segments = at<Segment>(a[0]);
  v.num_segments = a[1];
  v.past_positions = at<int64_t>(a[2]);
  v.past_slots = at<int64_t>(a[3]);
  v.firsts = at<int64_t>(a[4]);
  v.lasts = at<int64_t>(a[5]);
  v.early_rows = at<int64_t>(a[6]);
  v.early_slots = at<int64_t>(a[7]);
  v.early = a[8];
  v.late_rows = at<int64_t>(a[9]);
  v.late_slots = at<int64_t>(a[10]);
  v.late = a[11];
  step.views.push_back(v);
}

void bind_layers(nb::module_& m) {
  nb::class_<Linear> linear_type(m, "Linear");
  linear_type.def(nb::init<>())
      .def_rw("kind", &Linear::kind)
      .def_rw("inputs", &Linear::in)
      .def_rw("outputs", &Linear::out)
      .def_rw("block", &Linear::block);
  address(linear_type, "weight", &Linear::weight);
  address(linear_type, "scale", &Linear::scale);
  address(linear_type, "offset", &Linear::offset);
  address(linear_type, "bias", &Linear::bias);

  nb::class_<Layer> layer(m, "Layer");
  layer.def(nb::init<>())
      .def_rw("qkv", &Layer::qkv)
      .def_rw("o", &Layer::o)
      .def_rw("gate_up", &Layer::gate_up)
      .def_rw("down", &Layer::down)
      .def_rw("heads", &Layer::heads)
      .def_rw("kv_heads", &Layer::kv_heads)
      .def_rw("dim", &Layer::dim)
      .def_rw("v_dim", &Layer::v_dim)
      .def_rw("rope", &Layer::rope)
      .def_rw("interleaved", &Layer::interleaved)
      .def_rw("scale", &Layer::scale)
      .def_rw("softcap", &Layer::softcap)
      .def_rw("activation", &Layer::activation)
      .def_rw("key_block", &Layer::key_block)
      .def_rw("kv_type", &Layer::kv_type)
      .def_rw("slots", &Layer::slots);
  address(layer, "attn_norm", &Layer::attn_norm);
  address(layer, "post_attn_norm", &Layer::post_attn_norm);
  address(layer, "mlp_norm", &Layer::mlp_norm);
  address(layer, "post_mlp_norm", &Layer::post_mlp_norm);
  address(layer, "head_norm", &Layer::head_norm);
  address(layer, "q_norm", &Layer::q_norm);
  address(layer, "k_norm", &Layer::k_norm);
  address(layer, "sinks", &Layer::sinks);
  address(layer, "k_pool", &Layer::k_pool);
  address(layer, "v_pool", &Layer::v_pool);
  address(layer, "k_pool_scale", &Layer::k_pool_scale);
  address(layer, "v_pool_scale", &Layer::v_pool_scale);
}

void bind_step(nb::module_& m) {
  nb::class_<Step> step(m, "Step");
  step.def(nb::init<>())
      .def_rw("rows", &Step::rows)
      .def_rw("threads", &Step::threads)
      .def("view", &add_view)
      .def("layer", [](Step& self, int view, int64_t keep, int64_t kept) {
        self.view_of.push_back(view);
        self.keep.push_back(at<int64_t>(keep));
        self.kept.push_back(kept);
      });
  address(step, "positions", &Step::positions);
  address(step, "tokens", &Step::tokens);
  address(step, "hidden", &Step::hidden);
  address(step, "out", &Step::out);

  nb::class_<Model> model(m, "Model");
  model.def(nb::init<>())
      .def_rw("hidden", &Model::hidden)
      .def_rw("eps", &Model::eps)
      .def_rw("layer_norm", &Model::layer_norm)
      .def_rw("parallel", &Model::parallel)
      .def_rw("embed_scale", &Model::embed_scale)
      .def_rw("head", &Model::head)
      .def_rw("type", &Model::type)
      .def("rope", [](Model& self, int64_t inv_freq, int64_t half, float factor) {
        self.ropes.push_back({at<float>(inv_freq), half, factor});
      })
      .def("add", [](Model& self, const Layer& l) { self.layers.push_back(l); })
      .def("forward", [](Model& self, const Step& s) { self.forward(s, chosen); },
           nb::call_guard<nb::gil_scoped_release>());
  address(model, "final_norm", &Model::final_norm);
}

void bind_products(nb::module_& m) {
  m.def("linear", [](const Linear& l, int64_t x, int64_t x_stride, int64_t rows, int64_t out, int64_t stride,
                     int threads) {
    nb::gil_scoped_release release;
    linear(l, at<float>(x), x_stride, rows, at<float>(out), stride, threads, chosen);
  });
  nb::class_<Search>(m, "Search")
      .def("__init__", [](Search* self, const Linear& head, int threads) {
        nb::gil_scoped_release release;
        new (self) Search(head, threads, chosen);
      })
      .def("best", [](Search& self, int64_t x, int64_t stride, int64_t rows, int threads) {
        std::pair<std::vector<int64_t>, std::vector<float>> out{std::vector<int64_t>(rows), std::vector<float>(rows)};
        nb::gil_scoped_release release;
        self.best(at<float>(x), stride, rows, out.first.data(), out.second.data(), threads, chosen);
        return out;
      });
  m.def("pack_rounded", [](const Linear& l, int64_t rows, int type, int threads) {
    nb::gil_scoped_release release;
    pack_rounded(l, at<void>(rows), type, threads, chosen);
  });
  m.def("pin", &Team::pin);
  m.def("unpack_row", [](const Linear& l, int64_t row, int64_t to) {
    kernels(chosen).unpack_row(l, row, at<float>(to));
  });
  m.def("race", [](int64_t logits, int64_t n, float temperature, uint64_t key, int threads) {
    nb::gil_scoped_release release;
    return race(at<float>(logits), n, temperature, key, threads, chosen);
  });
  m.def("argmax", [](int64_t x, int64_t stride, int64_t rows, int64_t n, int threads) {
    std::pair<std::vector<int64_t>, std::vector<float>> out{std::vector<int64_t>(rows), std::vector<float>(rows)};
    nb::gil_scoped_release release;
    argmax(at<float>(x), stride, rows, n, out.first.data(), out.second.data(), threads, chosen);
    return out;
  });
}

void quantise_call(const std::vector<int64_t>& a) {
  QuantiseCall c{};
  c.from = at<void>(a[0]);
  c.to = at<int8_t>(a[1]);
  c.scale = at<float>(a[2]);
  c.rows = a[3];
  c.heads = a[4];
  c.n = a[5];
  c.row_stride = a[6];
  c.head_stride = a[7];
  c.type = static_cast<int>(a[8]);
  c.threads = static_cast<int>(a[9]);
  nb::gil_scoped_release release;
  quantise(c, chosen);
}

}  // namespace
}  // namespace sash

NB_MODULE(_native, m) {
  m.def("isa", [] { return std::string(sash::name_of(sash::chosen)); });
  m.def("set_isa", [](const std::string& name) { sash::chosen = sash::isa_of(name); });
  m.def("attention", &sash::attention_call);
  sash::bind_layers(m);
  sash::bind_step(m);
  sash::bind_products(m);
  m.def("quantise", &sash::quantise_call);
}
