// GPU primitives of the kernels: number types, memory access, exchange between lanes, launches.
//
// Kernels access memory only through read(), write() and add(). Compilers other than nvcc get the same names from
// emulation.h (tests/ops/emulation), which runs a grid on the host and checks every access.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <torch/csrc/stable/macros.h>

namespace detr_bf::cuda {

using Half = __half;
using BFloat16 = __nv_bfloat16;
using Stream = cudaStream_t;
using Grid = dim3;

__device__ inline float widen(Half number) { return __half2float(number); }
__device__ inline float widen(BFloat16 number) { return __bfloat162float(number); }
__device__ inline Half narrow(float number, Half) { return __float2half_rn(number); }
__device__ inline BFloat16 narrow(float number, BFloat16) { return __float2bfloat16_rn(number); }

// Load of 2, 4, 8 or 16 bytes in one access, from memory that is constant while the kernel runs.
template <class S>
__device__ inline S read(const S* from) {
  using Bits = std::conditional_t<
      sizeof(S) == 16, uint4,
      std::conditional_t<sizeof(S) == 8, uint2, std::conditional_t<sizeof(S) == 4, unsigned, unsigned short>>>;
  static_assert(sizeof(S) == sizeof(Bits));
  const Bits bits = __ldg(reinterpret_cast<const Bits*>(from));
  S value;
  std::memcpy(&value, &bits, sizeof(S));
  return value;
}

// Store in one access; otherwise the compiler splits 16 bytes into single numbers.
template <class S>
__device__ inline void write(S* to, S value) {
  if constexpr (sizeof(S) == 16) {
    uint4 bits;
    std::memcpy(&bits, &value, sizeof(S));
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(bits.x),
                 "r"(bits.y), "r"(bits.z), "r"(bits.w));
  } else {
    *to = value;
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kAddsVectors = true;
#else
constexpr bool kAddsVectors = false;
#endif

// Atomic addition, in no fixed order.
template <class A, int N>
__device__ inline void add(A* to, const A (&numbers)[N]) {
  if constexpr (kAddsVectors && std::is_same_v<A, float> && N % 4 == 0) {
#pragma unroll
    for (int n = 0; n < N; n += 4) {
      // No "memory" clobber: the kernels never read the memory they add to, so reads may be reordered.
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to + n)),
                   "f"(numbers[n]), "f"(numbers[n + 1]), "f"(numbers[n + 2]), "f"(numbers[n + 3]));
    }
  } else {
#pragma unroll
    for (int n = 0; n < N; ++n) atomicAdd(to + n, numbers[n]);
  }
}

__device__ inline __half2 narrow(float first, float second, Half) { return __floats2half2_rn(first, second); }
__device__ inline __nv_bfloat162 narrow(float first, float second, BFloat16) {
  return __floats2bfloat162_rn(first, second);
}

// Atomic addition of numbers rounded to 16 bits, to memory of that type: each sum is rounded as well.
template <class T>
__device__ inline void add_narrow(T* to, const float (&numbers)[8]) {
  using Two = decltype(narrow(0.0f, 0.0f, T{}));
  Two narrowed[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) narrowed[n] = narrow(numbers[2 * n], numbers[2 * n + 1], T{});
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint4 bits;
  std::memcpy(&bits, narrowed, sizeof(bits));
  const auto place = __cvta_generic_to_global(to);
  if constexpr (std::is_same_v<T, Half>) {
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(bits.x),
                 "r"(bits.y), "r"(bits.z), "r"(bits.w));
  } else {
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(bits.x),
                 "r"(bits.y), "r"(bits.z), "r"(bits.w));
  }
#else
#pragma unroll
  for (int n = 0; n < 4; ++n) atomicAdd(reinterpret_cast<Two*>(to) + n, narrowed[n]);
#endif
}

// Optimisation barrier: the compiler treats the number as new. It recomputes values derived from it earlier instead of
// keeping them in registers, and keeps the number itself instead of recomputing it.
__device__ inline void pin(uint32_t& number) { asm volatile("" : "+r"(number)); }
__device__ inline void pin(int32_t& number) { asm volatile("" : "+r"(number)); }
__device__ inline void pin(float& number) { asm volatile("" : "+f"(number)); }
template <class S>
__device__ inline void pin(S*& pointer) {
  asm volatile("" : "+l"(pointer));
}

constexpr unsigned kWholeWarp = 0xffffffffu;

// The value of another lane of the same group (`width` neighbouring lanes). All lanes of the warp must call it.
template <class S>
__device__ inline S shuffle(S value, int lane, int width) {
  return __shfl_sync(kWholeWarp, value, lane, width);
}

template <class S>
__device__ inline S shuffle_xor(S value, int mask) {
  return __shfl_xor_sync(kWholeWarp, value, mask);
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), Grid grid, int threads, Stream stream, Arguments... arguments) {
  kernel<<<grid, threads, 0, stream>>>(arguments...);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace detr_bf::cuda
#else
#include "emulation.h"
#endif

namespace detr_bf::cuda {

constexpr int kWarp = 32;

// Type of sums of numbers of type T.
template <class T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ inline float widen(float number) { return number; }
__device__ inline double widen(double number) { return number; }
__device__ inline float narrow(float number, float) { return number; }
__device__ inline double narrow(double number, double) { return number; }

// N neighbouring numbers that one lane loads or stores at once; pairs of 16 bits stay packed until they are used.
template <class T, int N>
struct alignas(N * sizeof(T)) Packed {
  static constexpr bool kPairs = sizeof(T) == 2 && N % 2 == 0;
  std::conditional_t<kPairs, uint32_t, T> at[kPairs ? N / 2 : N];

  __device__ Sum<T> operator[](int n) const {
    if constexpr (kPairs) {
      return widen_half(at[n / 2], n % 2, T{});
    } else {
      return widen(at[n]);
    }
  }

 private:
  __device__ static float widen_half(uint32_t word, bool second, BFloat16) {
    const uint32_t bits = second ? word & 0xffff0000u : word << 16;
    float number;
    std::memcpy(&number, &bits, sizeof(number));
    pin(number);  // otherwise the compiler widens it inside a branch, where it is used
    return number;
  }
  __device__ static float widen_half(uint32_t word, bool second, Half) {
    const auto bits = static_cast<uint16_t>(second ? word >> 16 : word);
    Half number;
    std::memcpy(&number, &bits, sizeof(number));
    return widen(number);
  }
};

template <int N, class T>
__device__ inline Packed<T, N> load(const T* from) {
  return read(reinterpret_cast<const Packed<T, N>*>(from));
}

template <class T, int N>
__device__ inline void store(T* to, const Sum<T> (&sums)[N]) {
  T narrowed[N];
#pragma unroll
  for (int n = 0; n < N; ++n) narrowed[n] = narrow(sums[n], T{});
  Packed<T, N> packed;
  std::memcpy(&packed, narrowed, sizeof(packed));
  write(reinterpret_cast<Packed<T, N>*>(to), packed);
}

inline int64_t ceil_div(int64_t number, int64_t unit) { return (number + unit - 1) / unit; }

}  // namespace detr_bf::cuda
