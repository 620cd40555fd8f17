// Rows of the tensors of batch attention: their addresses, and requests ahead of their use.
#pragma once

#include <cstdint>

#include "batch_attention.h"
#include "simd.h"

namespace detr_bf::cpu {
namespace {

template <class T>
struct TypedRows {
  T* data;
  int64_t image_stride, position_stride, head_stride;

  TypedRows() = default;
  explicit TypedRows(const Rows& rows)
      : data(static_cast<T*>(rows.data)),
        image_stride(rows.image_stride),
        position_stride(rows.position_stride),
        head_stride(rows.head_stride) {}
  T* at(int64_t image, int64_t position, int64_t head) const {
    return data + image * image_stride + position * position_stride + head * head_stride;
  }
};

// Requests the rows of the next block from memory, one at a time, while the current block is computed. The distance
// from the row of an image to that of the next is too large for the processor to foresee the addresses.
template <class T, int Tensors>
class RowsAhead {
 public:
  RowsAhead(const BatchAttention& b, const Rows (&tensors)[Tensors]) : b_(b) {
    for (int tensor = 0; tensor < Tensors; ++tensor) rows_[tensor] = TypedRows<T>(tensors[tensor]);
  }

  // The rows to request: positions [position, end).
  void start(int64_t position, int64_t end) {
    position_ = position;
    end_ = end;
    image_ = head_ = tensor_ = 0;
  }

  // At each of the equal steps of a block: two rows in the forward pass, which has two steps for three rows, and one in
  // the backward pass, which has five for four.
  void request() {
    for (int row = 0; row < (Tensors == 3 ? 2 : 1); ++row) request_row();
  }

 private:
  static constexpr int64_t kLineBytes = 64;

  void request_row() {
    if (position_ >= end_) return;
    const char* row = reinterpret_cast<const char*>(rows_[tensor_].at(image_, position_, head_));
    const int64_t bytes = b_.channels * static_cast<int64_t>(sizeof(T));
    for (int64_t byte = 0; byte < bytes; byte += kLineBytes) __builtin_prefetch(row + byte, 0, 2);
    if (++head_ < b_.heads) return;
    head_ = 0;
    if (++tensor_ < Tensors) return;
    tensor_ = 0;
    if (++image_ < b_.images) return;
    image_ = 0;
    ++position_;
  }

  const BatchAttention& b_;
  TypedRows<T> rows_[Tensors];
  int64_t position_ = 0, end_ = 0, image_ = 0, head_ = 0;
  int tensor_ = 0;
};

// True if results of this size are not kept in the caches until they are read: they are then written past the caches,
// which saves reading the memory that they replace. Requires rows of whole, aligned vectors.
template <class T, class A>
bool streams_to(const BatchAttention& b, const Rows& rows) {
  constexpr auto size = static_cast<int64_t>(sizeof(T)), unit = kLanes<A> * size;
  const int64_t bytes = b.images * b.positions * b.heads * b.channels * size;
  const int64_t strides = (rows.image_stride | rows.position_stride | rows.head_stride) * size;
  const auto start = reinterpret_cast<uintptr_t>(rows.data);
  const bool aligned = strides % unit == 0 && start % static_cast<uintptr_t>(unit) == 0;
  return kStreams<T, A> && bytes >= kBytesToStream && aligned;
}

}  // namespace
}  // namespace detr_bf::cpu
