// Scratch memory of a kernel.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace detr_bf::cpu {
namespace {

inline int64_t round_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

// One allocation per call, split into pieces and freed at the end.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : start_(std::aligned_alloc(kAlignment, round_up(bytes, kAlignment))), next_(start_) {
    if (start_ == nullptr && bytes > 0) throw std::bad_alloc();
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(start_); }

  template <class S>
  static int64_t bytes(int64_t count) {
    return round_up(count * static_cast<int64_t>(sizeof(S)), kAlignment);
  }
  void clear() { next_ = start_; }
  template <class S>
  S* take(int64_t count) {
    S* taken = static_cast<S*>(next_);
    next_ = static_cast<char*>(next_) + bytes<S>(count);
    return taken;
  }

 private:
  static constexpr int64_t kAlignment = 64;
  void* start_;
  void* next_;
};

}  // namespace
}  // namespace detr_bf::cpu
