#define SASH_NS avx2
#define SASH_VL 8
#include "kernels.inc"
