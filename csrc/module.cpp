// The Python side of the kernels. Tensors come as addresses and strides: sash.ops.native has checked them.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention.h"
#include "isa.h"
#include "quantise.h"

namespace nb = nanobind;

namespace sash {

Isa best_isa() {
#if defined(SASH_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
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
const T* at(int64_t address) {
  return reinterpret_cast<const T*>(static_cast<intptr_t>(address));
}

void attention_call(const std::vector<int64_t>& a, float scale, float softcap, int type) {
  AttentionCall c{};
  c.q = at<void>(a[0]);
  c.k = at<void>(a[1]);
  c.v = at<void>(a[2]);
  c.k_pool = at<void>(a[3]);
  c.v_pool = at<void>(a[4]);
  c.out = const_cast<void*>(at<void>(a[5]));
  c.lse = const_cast<float*>(at<float>(a[6]));
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

void quantise_call(const std::vector<int64_t>& a) {
  QuantiseCall c{};
  c.from = at<void>(a[0]);
  c.to = const_cast<int8_t*>(at<int8_t>(a[1]));
  c.scale = const_cast<float*>(at<float>(a[2]));
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
  m.def("quantise", &sash::quantise_call);
}
