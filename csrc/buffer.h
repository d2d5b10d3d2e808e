// Memory that grows and is never initialised.
#pragma once

#include <cstdint>

namespace sash {

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();
  // Room for so many bytes; what was there is lost where it grows.
  void reserve(int64_t bytes);
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  // Room for n elements.
  template <class T>
  T* need(int64_t n) {
    reserve(n * static_cast<int64_t>(sizeof(T)));
    return as<T>();
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace sash
