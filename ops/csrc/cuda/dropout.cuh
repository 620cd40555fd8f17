// Dropout on the GPU. A thread computes the random numbers of N neighbouring calls; they serve N neighbouring elements
// at each of eight offsets of a block of elements, which it reads and writes N at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "random.cuh"
#include "types.cuh"

namespace detr_bf::cuda {

constexpr int kThreadsOfDropout = 256;
#ifdef DETR_BF_MAX_GRID  // small in tests
constexpr int64_t kMaxDropoutBlocks = DETR_BF_MAX_GRID;
#else
constexpr int64_t kMaxDropoutBlocks = std::numeric_limits<int32_t>::max();
#endif

struct Elements {
  int64_t count;
  Dropping dropping;
};

// residual + dropout(input); residual may be null.
template <class T>
struct AddDropout {
  static constexpr bool kRandom = true;
  const T *input, *residual;

  template <int N>
  __device__ void operator()(int64_t at, const Sum<T> (&kept)[N], Sum<T> (&result)[N]) const {
    const Packed<T, N> numbers = load<N>(input + at);
#pragma unroll
    for (int n = 0; n < N; ++n) result[n] = kept[n] == 0 ? Sum<T>{0} : numbers[n] * kept[n];
    if (residual == nullptr) return;
    const Packed<T, N> more = load<N>(residual + at);
#pragma unroll
    for (int n = 0; n < N; ++n) result[n] += more[n];
  }
};

// dropout(max(input, 0)).
template <class T>
struct ReluDropout {
  static constexpr bool kRandom = true;
  const T* input;

  template <int N>
  __device__ void operator()(int64_t at, const Sum<T> (&kept)[N], Sum<T> (&result)[N]) const {
    const Packed<T, N> numbers = load<N>(input + at);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const Sum<T> number = numbers[n];
      result[n] = kept[n] == 0 || number < 0 ? Sum<T>{0} : number * kept[n];  // NaN stays NaN
    }
  }
};

// Gradient of the input of ReluDropout; the kept elements follow from the output.
template <class T>
struct ReluDropoutGradient {
  static constexpr bool kRandom = false;
  const T *gradient, *output;

  template <int N>
  __device__ void operator()(int64_t at, const Sum<T> (&kept)[N], Sum<T> (&result)[N]) const {
    const Packed<T, N> gradients = load<N>(gradient + at), outputs = load<N>(output + at);
#pragma unroll
    for (int n = 0; n < N; ++n) result[n] = outputs[n] > 0 ? gradients[n] * kept[n] : Sum<T>{0};
  }
};

template <class T, int N, class Step>
__global__ void __launch_bounds__(kThreadsOfDropout)
    dropout_kernel(const Elements elements, const Step step, int64_t first_block, T* result) {
  constexpr int threads = kCallsOfBlock / N;  // for a block of elements
  const int64_t thread = (first_block + blockIdx.x) * kThreadsOfDropout + threadIdx.x;
  const int64_t block = thread / threads, call = thread % threads * N;
  const int64_t first = block * kElementsOfBlock + call;
  if (first >= elements.count) return;
  uint32_t words[N][kNumbersOfCall / 2] = {};
  if constexpr (Step::kRandom) {
    const int64_t seed = read(elements.dropping.seed);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const Numbers numbers(seed, block * kCallsOfBlock + call + n);
#pragma unroll
      for (int word = 0; word < kNumbersOfCall / 2; ++word) words[n][word] = numbers.words[word];
    }
  }
#pragma unroll
  for (int number = 0; number < kNumbersOfCall; ++number) {
    const int64_t at = first + number * kCallsOfBlock;
    if (at >= elements.count) return;
    Sum<T> kept[N], results[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const uint32_t drawn = words[n][number / 2] >> number % 2 * 16 & 0xffffu;
      const bool dropped = Step::kRandom && drawn < elements.dropping.dropped;
      kept[n] = dropped ? 0 : static_cast<Sum<T>>(elements.dropping.scale);
    }
    step(at, kept, results);
    store<T, N>(result + at, results);
  }
}

template <class T, class Step>
void drop(const Elements& elements, const Step& step, std::initializer_list<const void*> tensors, T* result,
          Stream stream) {
  auto places = reinterpret_cast<uintptr_t>(result);
  for (const void* tensor : tensors) places |= reinterpret_cast<uintptr_t>(tensor);
  constexpr int wide = sizeof(T) == sizeof(double) ? 2 : 4;  // at most 16 bytes
  const bool fits = elements.count % wide == 0 && places % (wide * sizeof(T)) == 0;
  const int64_t threads = ceil_div(elements.count, kElementsOfBlock) * kCallsOfBlock / (fits ? wide : 1);
  const int64_t blocks = ceil_div(threads, kThreadsOfDropout);
  for (int64_t block = 0; block < blocks; block += kMaxDropoutBlocks) {
    const Grid grid(static_cast<unsigned>(std::min(blocks - block, kMaxDropoutBlocks)));
    const auto kernel = fits ? dropout_kernel<T, wide, Step> : dropout_kernel<T, 1, Step>;
    launch(kernel, grid, kThreadsOfDropout, stream, elements, step, block, result);
  }
}

inline void dropout_add(Type type, const Elements& elements, const void* input, const void* residual, void* output,
                        Stream stream) {
  with_type(type, [&](auto number) {
    using T = decltype(number);
    const AddDropout<T> step{static_cast<const T*>(input), static_cast<const T*>(residual)};
    drop(elements, step, {input, residual}, static_cast<T*>(output), stream);
  });
}

inline void relu_dropout(Type type, const Elements& elements, const void* input, void* output, Stream stream) {
  with_type(type, [&](auto number) {
    using T = decltype(number);
    drop(elements, ReluDropout<T>{static_cast<const T*>(input)}, {input}, static_cast<T*>(output), stream);
  });
}

inline void relu_dropout_backward(Type type, const Elements& elements, const void* gradient, const void* output,
                                  void* result, Stream stream) {
  with_type(type, [&](auto number) {
    using T = decltype(number);
    const ReluDropoutGradient<T> step{static_cast<const T*>(gradient), static_cast<const T*>(output)};
    drop(elements, step, {gradient, output}, static_cast<T*>(result), stream);
  });
}

}  // namespace detr_bf::cuda
