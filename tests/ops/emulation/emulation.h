// A GPU emulated on the host, for tests: the primitives of device.cuh, and a grid run thread by thread.
//
// The threads of a block are contexts that run in turn; one that reaches an exchange waits for the other lanes of its
// warp. Memory must be registered by the test. Errors: accesses outside it, unaligned accesses, writes to read-only
// memory, and exchanges without all lanes.
#pragma once

#include <math.h>  // with the float overloads of device code
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

namespace detr_bf::cuda {

using std::max;
using std::min;

// ---- numbers ----

using Half = _Float16;

struct BFloat16 {
  uint16_t bits;
};

inline float widen(Half number) { return number; }
inline float widen(BFloat16 number) {
  const uint32_t bits = static_cast<uint32_t>(number.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}
inline Half narrow(float number, Half) { return static_cast<Half>(number); }
inline BFloat16 narrow(float number, BFloat16) {
  if (number != number) return {0x7fff};
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// ---- memory ----

struct Buffer {
  const char* name;
  void* begin;
  int64_t bytes;
  int32_t writable;
};

class Memory {
 public:
  std::vector<Buffer> buffers;

  void check(const void* at, size_t bytes, bool to_write) const {
    const auto place = reinterpret_cast<uintptr_t>(at);
    if (place % bytes != 0) fail(at, bytes, to_write, "is not aligned");
    for (const Buffer& buffer : buffers) {
      const auto begin = reinterpret_cast<uintptr_t>(buffer.begin);
      if (place < begin || place + bytes > begin + buffer.bytes) continue;
      if (to_write && !buffer.writable) fail(at, bytes, to_write, std::string("is to ") + buffer.name);
      return;
    }
    fail(at, bytes, to_write, "is outside all buffers");
  }

 private:
  [[noreturn]] void fail(const void* at, size_t bytes, bool to_write, const std::string& why) const {
    std::ostringstream message;
    message << (to_write ? "a write" : "a read") << " of " << bytes << " bytes " << why;
    for (const Buffer& buffer : buffers) {
      message << "; " << static_cast<const char*>(at) - static_cast<const char*>(buffer.begin) << " bytes into "
              << buffer.name << ", which has " << buffer.bytes;
    }
    throw std::runtime_error(message.str());
  }
};

inline Memory memory;

template <class S>
S read(const S* from) {
  memory.check(from, sizeof(S), false);
  return *from;
}

template <class S>
void write(S* to, S value) {
  memory.check(to, sizeof(S), true);
  *to = value;
}

template <class A, int N>
void add(A* to, const A (&numbers)[N]) {
  constexpr int together = std::is_same_v<A, float> && N % 4 == 0 ? 4 : 1;
  for (int n = 0; n < N; n += together) memory.check(to + n, together * sizeof(A), true);
  for (int n = 0; n < N; ++n) to[n] += numbers[n];
}

// Numbers and sums are rounded to the type of the memory.
template <class T>
void add_narrow(T* to, const float (&numbers)[8]) {
  memory.check(to, 8 * sizeof(T), true);
  for (int n = 0; n < 8; ++n) to[n] = narrow(widen(to[n]) + widen(narrow(numbers[n], T{})), T{});
}

template <class S>
void pin(S&) {}

// ---- threads ----

struct Grid {
  unsigned x, y, z;
  Grid(int64_t x = 1, int64_t y = 1, int64_t z = 1)
      : x(static_cast<unsigned>(x)), y(static_cast<unsigned>(y)), z(static_cast<unsigned>(z)) {}
};

inline Grid threadIdx(0), blockIdx(0);  // NOLINT: names of device code

using Stream = int;  // a single, synchronous stream

constexpr int kLanesOfWarp = 32;
constexpr size_t kStackBytes = 64 << 10;

// Threads of one block, run one after another up to their next exchange.
class Block {
 public:
  Block(int threads, std::function<void()> body) : body_(std::move(body)), threads_(threads) {
    for (int thread = 0; thread < threads; ++thread) start(thread);
  }

  void run() {
    for (bool all_done = false; !all_done;) {
      all_done = true;
      for (size_t first = 0; first < threads_.size(); first += kLanesOfWarp) all_done &= advance_warp(first);
    }
  }

  // Called by a thread: returns the value of lane `source` once every lane of the warp has provided one.
  uint64_t exchange(uint64_t offered, int source, int kind) {
    Thread& own = threads_[current_];
    const size_t from = current_ / kLanesOfWarp * kLanesOfWarp + source;
    own.offered = offered;
    own.kind = kind;
    own.state = State::kWaiting;
    swapcontext(&own.context, &scheduler_);
    return threads_[from].published;
  }
  int lane() const { return static_cast<int>(current_ % kLanesOfWarp); }

  static inline Block* running = nullptr;
  static inline std::vector<std::unique_ptr<char[]>> stacks;  // reused by one block after another

 private:
  enum class State { kReady, kWaiting, kDone };
  struct Thread {
    ucontext_t context;
    State state = State::kReady;
    uint64_t offered = 0, published = 0;
    int kind = 0;
  };

  void start(int index) {
    Thread& thread = threads_[index];
    if (stacks.size() <= static_cast<size_t>(index)) stacks.emplace_back(new char[kStackBytes]);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks[index].get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = &scheduler_;
    makecontext(&thread.context, &Block::enter, 0);
  }

  // An exception must not leave a context; run() rethrows it.
  static void enter() {
    Block& block = *running;
    try {
      block.body_();
    } catch (const std::exception& error) {
      block.error_ = error.what();
    }
    block.threads_[block.current_].state = State::kDone;
  }

  // Runs every lane to its next exchange and exchanges; true when all are done.
  bool advance_warp(size_t first) {
    const size_t end = std::min(first + kLanesOfWarp, threads_.size());
    size_t done = 0;
    for (size_t thread = first; thread < end; ++thread) {
      if (threads_[thread].state == State::kReady) resume(thread);
      done += threads_[thread].state == State::kDone;
    }
    if (done == end - first) return true;
    if (done > 0) throw std::runtime_error("an exchange without lanes that have ended");
    for (size_t thread = first; thread < end; ++thread) {
      Thread& lane = threads_[thread];
      if (lane.kind != threads_[first].kind) throw std::runtime_error("lanes meet in different exchanges");
      lane.published = lane.offered;
      lane.state = State::kReady;
    }
    return false;
  }

  void resume(size_t thread) {
    running = this;
    current_ = thread;
    threadIdx = Grid(static_cast<int64_t>(thread), 0, 0);
    swapcontext(&scheduler_, &threads_[thread].context);
    if (!error_.empty()) throw std::runtime_error(error_);
  }

  std::function<void()> body_;
  std::vector<Thread> threads_;
  ucontext_t scheduler_;
  size_t current_ = 0;
  std::string error_;
};

template <class S>
S exchange(S value, int source, int kind) {
  uint64_t offered = 0;
  static_assert(sizeof(S) <= sizeof(offered));
  std::memcpy(&offered, &value, sizeof(S));
  const uint64_t got = Block::running->exchange(offered, source, kind);
  std::memcpy(&value, &got, sizeof(S));
  return value;
}

template <class S>
S shuffle(S value, int lane, int width) {
  const int first = Block::running->lane() / width * width;
  return exchange(value, first + lane % width, width);
}

template <class S>
S shuffle_xor(S value, int mask) {
  return exchange(value, Block::running->lane() ^ mask, -mask);
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), Grid grid, int threads, Stream, Arguments... arguments) {
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = Grid(x, y, z);
        Block(threads, [&] { kernel(arguments...); }).run();
      }
    }
  }
}

}  // namespace detr_bf::cuda
