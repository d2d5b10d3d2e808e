#define SASH_NS portable
#define SASH_VL 4
#include "kernels.inc"
