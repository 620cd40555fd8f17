// Forward: every group sums the weighted corners of the samples of its row.
#pragma once

#include "ms_deform_attn.cuh"

namespace detr_bf::cuda {

template <class T>
constexpr int kForwardBlocks = std::is_same_v<T, double> ? 2 : 3;  // per multiprocessor: 80 registers a thread
constexpr int kForwardTogether = 2;  // samples whose corners are loaded at once: 8 loads in flight a lane

template <class T, int N>
__device__ inline void add_up(const Visit<T, N, kForwardTogether>& visit, Sum<T> (&sums)[N]) {
#pragma unroll
  for (int k = 0; k < kForwardTogether; ++k) {
#pragma unroll
    for (int corner = 0; corner < kCorners; ++corner) {
      const Sum<T> weight = visit.corners[k].weights[corner];
      const bool inside = visit.corners[k].inside_again(corner);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const Sum<T> number = visit.channels[k][corner][n];
        if (inside) sums[n] += weight * number;
      }
    }
  }
}

template <class T, int N, class L>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<T>)
    forward_kernel(const __grid_constant__ Sampling s, const __grid_constant__ L layout, T* output) {
  using A = Sum<T>;
  Row row(s, layout);
  const int lanes = layout.lanes();
  const char* value = static_cast<const char*>(s.value) + row.image * s.image_stride + row.head * s.head_stride;
  for (int chunk = 0; chunk < s.channels; chunk += N * lanes) {
    // Keep one number, not what follows from it: registers are few, and test_cuda_binary.py shows which kernels need it.
    if constexpr (std::is_same_v<L, Patches> && std::is_same_v<T, float>) {
      pin(row.offset);
      row.exists = row.offset >= 0;
    }
    const int channel = chunk + N * row.lane;
    const bool active = row.exists && channel < s.channels;
    const T* rows = reinterpret_cast<const T*>(value) + channel;
    A sums[N] = {};
    Samples<T> samples(s, row);
    Sample<T> next = samples.take(s, lanes);
    for (int first = 0; first < s.samples(); first += lanes) {
      const Corners<A> ready(next, s.level[next.level]);
      next = samples.take(s, lanes);  // loads overlap with the additions below
      const int count = min(lanes, s.samples() - first);
      for (int at = 0; at < count; at += kForwardTogether) {
        const Visit<T, N, kForwardTogether> visit(ready, at, lanes, active, rows, s.cell_stride);
        add_up(visit, sums);
      }
    }
    if (active) store<T, N>(row.of(output, s.channels) + channel, sums);
  }
}

}  // namespace detr_bf::cuda
