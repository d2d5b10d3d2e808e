// Instruction sets, from least to most.
#pragma once

#if defined(__x86_64__) || defined(_M_X64)
#define SASH_X86 1
#endif

namespace sash {

enum class Isa { portable = 0, avx2 = 1, avx512 = 2 };

}  // namespace sash
