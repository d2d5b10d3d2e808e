#include "buffer.h"

#include <cstdlib>
#include <new>

namespace sash {

Buffer::~Buffer() { std::free(data_); }

void Buffer::reserve(int64_t bytes) {
  if (bytes <= bytes_) return;
  std::free(data_);
  data_ = nullptr, bytes_ = 0;
  data_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!data_) throw std::bad_alloc();
  bytes_ = bytes;
}

}  // namespace sash
