#include "buffer.h"

#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sash {

namespace {

// A size of large pages, and from how many bytes on memory asks for them: whoever streams it misses fewer of them.
constexpr int64_t LARGE_PAGE = 1 << 21, LARGE = 2 * LARGE_PAGE;

void* allocate(int64_t bytes) {
  const int64_t unit = bytes >= LARGE ? LARGE_PAGE : 64;
  const int64_t whole = (bytes + unit - 1) / unit * unit;
  void* data = std::aligned_alloc(unit, whole);
#if defined(__linux__)
  if (data && unit == LARGE_PAGE) madvise(data, whole, MADV_HUGEPAGE);  // a wish: without them all goes on, slower
#endif
  return data;
}

}  // namespace

Buffer::~Buffer() { std::free(data_); }

void Buffer::reserve(int64_t bytes) {
  if (bytes <= bytes_) return;
  std::free(data_);
  data_ = nullptr, bytes_ = 0;
  data_ = allocate(bytes);
  if (!data_) throw std::bad_alloc();
  bytes_ = bytes;
}

}  // namespace sash
