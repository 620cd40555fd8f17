// Backward: the probabilities are recomputed in two passes over the keys, one for the softmax statistics of each query
// and one for the gradients. Gradients of key and value are complete after one block of queries, or later blocks add to
// them; only the thread that wrote them does, so the order of the sums is fixed.
#pragma once

#include "batch_attention.cuh"

namespace detr_bf::cuda {

struct AttentionGradients {
  Rows output;             // read
  Rows query, key, value;  // written
};

// Statistics of a block of queries that turn gradients of probabilities into gradients of logits.
template <class A, int Q>
struct Statistics {
  A most[Q], inverse[Q];
  A mean[Q] = {};  // gradient of the probabilities, averaged with the probabilities as weights

  template <class T, class Block>
  __device__ Statistics(const Attention& a, const Pair& pair, const Block& queries, const Block& outputs, int first,
                        T) {
    Softmax<A, Q> softmax;
    for (int key = 0; key < a.images; ++key) {
      const Logits<A, Q> logits(a, pair, queries, pair.row<const T>(a.key, key), key);
      const Kept<A, Q> kept(a, pair, first, key);
      A gradients[Q];
      outputs.dot_products(pair.row<const T>(a.value, key), gradients);
#pragma unroll
      for (int q = 0; q < Q; ++q) {
        A factor;
        const A part = softmax.add(q, logits.at[q], factor);
        mean[q] = mean[q] * factor + part * kept.at[q] * gradients[q];
      }
    }
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      inverse[q] = softmax.inverse(q);
      most[q] = softmax.sum[q] == 0 ? 0 : softmax.most[q];
      mean[q] *= inverse[q];
    }
  }
  __device__ A probability(int q, A logit) const { return exp(logit - most[q]) * inverse[q]; }
};

// G: type of the written gradients; T if there is only one block of queries, else the type of sums.
template <class G, int N>
__device__ inline void write_or_add(G* to, const Sum<G> (&sums)[N], bool writes) {
  if constexpr (std::is_same_v<G, Sum<G>>) {
    if (!writes) return add(to, sums);
  }
  store<G, N>(to, sums);
}

template <class T, class G, int N, int Q, bool Held>
__global__ void __launch_bounds__(kThreadsOfBlock)
    attend_backward_kernel(const __grid_constant__ Attention a, int lanes, int64_t first_pair,
                           const __grid_constant__ AttentionGradients gradients) {
  using A = Sum<T>;
  const Pair pair(a, lanes, first_pair);
  for (int first = 0; first < a.images; first += Q) {
    const RowBlock<T, N, Q, Held> queries(a, pair, a.query, first), outputs(a, pair, gradients.output, first);
    const Statistics<A, Q> statistics(a, pair, queries, outputs, first, T{});
    for (int slice = 0; slice < a.channels; slice += N * lanes) {
      const int channel = slice + N * pair.lane;
      const bool active = pair.exists && channel < a.channels;
      A of_query[Q][N] = {};
      for (int key = 0; key < a.images; ++key) {
        const T* key_row = pair.row<const T>(a.key, key);
        const Logits<A, Q> logits(a, pair, queries, key_row, key);
        const Kept<A, Q> kept(a, pair, first, key);
        A products[Q];
        outputs.dot_products(pair.row<const T>(a.value, key), products);
        const Channels<A, N> of_row = channels_of<N>(key_row, channel, active);
        A of_key[N] = {}, of_value[N] = {};
#pragma unroll
        for (int q = 0; q < Q; ++q) {
          const A probability = statistics.probability(q, logits.at[q]), share = probability * kept.at[q];
          const A logit = probability * (kept.at[q] * products[q] - statistics.mean[q]) * static_cast<A>(a.scale);
          const Channels<A, N> query = queries.channels(q, channel), output = outputs.channels(q, channel);
#pragma unroll
          for (int n = 0; n < N; ++n) {
            of_query[q][n] += logit * of_row.at[n];
            of_key[n] += logit * query.at[n];
            of_value[n] += share * output.at[n];
          }
        }
        if (!active) continue;
        write_or_add<G>(pair.row<G>(gradients.key, key) + channel, of_key, first == 0);
        write_or_add<G>(pair.row<G>(gradients.value, key) + channel, of_value, first == 0);
      }
#pragma unroll
      for (int q = 0; q < Q; ++q) {
        if (active && q < queries.count()) store<G, N>(pair.row<G>(gradients.query, first + q) + channel, of_query[q]);
      }
    }
  }
}

}  // namespace detr_bf::cuda
