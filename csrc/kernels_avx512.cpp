#define SASH_NS avx512
#define SASH_VL 16
#include "kernels.inc"
