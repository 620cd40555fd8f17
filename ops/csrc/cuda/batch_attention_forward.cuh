// Forward: every group computes the attention of its pair, Q queries at a time.
#pragma once

#include "batch_attention.cuh"

namespace detr_bf::cuda {

template <class T, int N, int Q, bool Held>
__global__ void __launch_bounds__(kThreadsOfBlock)
    attend_kernel(const __grid_constant__ Attention a, int lanes, int64_t first_pair,
                  const __grid_constant__ Rows output) {
  using A = Sum<T>;
  const Pair pair(a, lanes, first_pair);
  for (int first = 0; first < a.images; first += Q) {
    const RowBlock<T, N, Q, Held> queries(a, pair, a.query, first);
    for (int slice = 0; slice < a.channels; slice += N * lanes) {
      const int channel = slice + N * pair.lane;
      const bool active = pair.exists && channel < a.channels;
      Softmax<A, Q> softmax;
      A sums[Q][N] = {};
      for (int key = 0; key < a.images; ++key) {
        const Logits<A, Q> logits(a, pair, queries, pair.row<const T>(a.key, key), key);
        const Kept<A, Q> kept(a, pair, first, key);
        const Channels<A, N> value = channels_of<N>(pair.row<const T>(a.value, key), channel, active);
#pragma unroll
        for (int q = 0; q < Q; ++q) {
          A factor;
          const A part = softmax.add(q, logits.at[q], factor) * kept.at[q];
#pragma unroll
          for (int n = 0; n < N; ++n) sums[q][n] = sums[q][n] * factor + part * value.at[n];
        }
      }
#pragma unroll
      for (int q = 0; q < Q; ++q) {
        if (!active || q >= queries.count()) continue;
        const A inverse = softmax.inverse(q);
#pragma unroll
        for (int n = 0; n < N; ++n) sums[q][n] *= inverse;
        store<T, N>(pair.row<T>(output, first + q) + channel, sums[q]);
      }
    }
  }
}

}  // namespace detr_bf::cuda
