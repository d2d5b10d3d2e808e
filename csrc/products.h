// Single products and searches, and what a step shares with them.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "kernels.h"

namespace sash {

// n floats of this thread's own, until it asks again.
float* scratch(int64_t n);

// Panels of one piece of work: some microseconds of it, and enough pieces for threads to end together.
int64_t panels_of_piece(const Linear& l, int threads);

// out [rows][stride] = x [rows][x_stride] times the weights; rows of x are read, not changed.
void linear(const Linear& l, const float* x, int64_t x_stride, int64_t rows, float* out, int64_t stride, int threads,
            Isa isa);

// int8 or int4 weights of rows [out][in], type 0 float32 or 1 bfloat16, to where the layer's pointers point.
void pack_rounded(const Linear& l, const void* rows, int type, int threads, Isa isa);

// Finds the largest results of a head of int8 weights; keeps 6 of their 8 bits. Searches of several threads take turns:
// the buffers are the leading one's.
class Search {
 public:
  Search(const Linear& head, int threads, Isa isa);
  // Of each row of x [rows][x_stride]: index of the largest result (the first of equals), and its value or NaN; the
  // same as those of all results.
  void best(const float* x, int64_t x_stride, int64_t rows, int64_t* index, float* value, int threads, Isa isa);

 private:
  void reserve(int64_t rows);
  void prepare(const Kernels& k, const float* x, int64_t r);

  Linear head_;
  bool finite_ = true;
  Screening screening_;
  Buffer weight_, offset_, bound_, acts_, scales_, totals_, lengths_, results_;
};

// Of each row of x [rows][stride]: index of the largest of n (the first of equals), and its value or NaN.
void argmax(const float* x, int64_t stride, int64_t rows, int64_t n, int64_t* index, float* value, int threads,
            Isa isa);

// Tokens of logits [n] that may win a race, in order; none where they are too many to tell.
std::vector<int64_t> race(const float* logits, int64_t n, float temperature, uint64_t key, int threads, Isa isa);

}  // namespace sash
