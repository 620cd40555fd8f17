// Variant of batch attention for up to eight images: every row is read once, and all logits of a pair are computed once.
//
// The rows stay in registers. The partial dot products of all Q queries with a key are summed over the lanes by
// recursive halving, so that a lane ends with the complete product of one query, number lane % Q, for every key. It
// computes the softmax of its query, and the lanes get a probability by an exchange when they use it. Each exponential is
// computed by lanes / Q lanes instead of all, and a key takes Q - 1 + log2(lanes / Q) exchanges for the sums instead of
// Q log2(lanes).
#pragma once

#include "batch_attention_backward.cuh"
#include "batch_attention_forward.cuh"

namespace detr_bf::cuda {

constexpr int kOnePassBlocks = 5;  // per multiprocessor: 96 registers a thread
template <int Q>
constexpr int kOnePassBackwardBlocks = Q <= 4 ? 4 : 3;  // 128 and 168 registers

// The channels of this lane of every image; zero beyond the last image.
template <class A, int N, int Q>
struct AllRows {
  Channels<A, N> at[Q];

  template <class T>
  __device__ AllRows(const Attention& a, const Pair& pair, const Rows& rows, T) {
    const int channel = N * pair.lane, count = pair.exists && channel < a.channels ? a.images : 0;
    const T* row = pair.row<const T>(rows, 0) + channel;
    Packed<T, N> packed[Q] = {};
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      if (q < count) packed[q] = load<N>(row);
      row += rows.image_stride;
    }
#pragma unroll
    for (int q = 0; q < Q; ++q) {
#pragma unroll
      for (int n = 0; n < N; ++n) at[q].at[n] = packed[q][n];
    }
  }
};

// Keys are skipped in pairs beyond the last image: two of them at a time hide the latency of exchanges.
template <int Q, class Body>
__device__ inline void for_keys(int images, Body body) {
#pragma unroll
  for (int k = 0; k < Q; k += 2) {
    if (k >= images) continue;
    body(k);
    body(k + 1);
  }
}

// Sum over Q neighbouring lanes of number lane % Q, by recursive halving: Q - 1 exchanges.
template <int Q, class A>
__device__ inline A sum_of_own(A (&numbers)[Q], int lane) {
#pragma unroll
  for (int distance = 1; distance < Q; distance *= 2) {
    const bool second = lane & distance;
#pragma unroll
    for (int i = 0; i < Q / (2 * distance); ++i) {
      const A kept = second ? numbers[2 * i + 1] : numbers[2 * i], given = second ? numbers[2 * i] : numbers[2 * i + 1];
      numbers[i] = kept + shuffle_xor(given, distance);
    }
  }
  return numbers[0];
}

// Dot products of the own query of this lane, lane % Q, with every key; zero beyond the last image.
template <class A, int N, int Q>
__device__ inline void multiply_all(const Attention& a, const Pair& pair, const AllRows<A, N, Q>& queries,
                                    const AllRows<A, N, Q>& keys, A (&own)[Q]) {
#pragma unroll
  for (int k = 0; k < Q; ++k) own[k] = 0;
  for_keys<Q>(a.images, [&](int k) {
    A products[Q] = {};
#pragma unroll
    for (int q = 0; q < Q; ++q) {
#pragma unroll
      for (int n = 0; n < N; ++n) products[q] += queries.at[q].at[n] * keys.at[k].at[n];
    }
    own[k] = sum_of_own<Q>(products, pair.lane);
  });
  for (int distance = Q; distance < pair.lanes; distance *= 2) {
#pragma unroll
    for (int k = 0; k < Q; ++k) own[k] += shuffle_xor(own[k], distance);
  }
}

// One bit for every key: ignored, or beyond the last image.
template <int Q>
__device__ inline uint32_t ignored_keys(const Attention& a, const Pair& pair) {
  uint32_t ignored = ~0u << a.images;
  if (a.key_mask != nullptr && pair.exists) {
#pragma unroll
    for (int k = 0; k < Q; ++k) {
      if (k < a.images && read(a.key_mask + k * a.positions + pair.position) != 0) ignored |= 1u << k;
    }
  }
  return ignored;
}

// Products of the own query turned into probabilities. If every key is ignored, all are zero.
template <class A, int Q>
__device__ inline void softmax_of_own(const Attention& a, uint32_t ignored, A (&own)[Q]) {
  const A scale = static_cast<A>(a.scale) * static_cast<A>(1.4426950408889634);  // log2(e): exp2 is cheaper than exp
  A most = -static_cast<A>(INFINITY), sum = 0;
#pragma unroll
  for (int k = 0; k < Q; ++k) {
    own[k] = ignored & (1u << k) ? -static_cast<A>(INFINITY) : own[k] * scale;
    most = fmax(most, own[k]);
  }
  if (most == -static_cast<A>(INFINITY)) most = 0;
#pragma unroll
  for (int k = 0; k < Q; ++k) {
    own[k] = exp2(own[k] - most);
    sum += own[k];
  }
  const A inverse = sum == 0 ? 0 : 1 / sum;
#pragma unroll
  for (int k = 0; k < Q; ++k) own[k] *= inverse;
}

// Multiplies the numbers of the own query by the dropout factors of its probabilities.
template <class A, int Q>
__device__ inline void drop_of_own(const Attention& a, const Pair& pair, A (&own)[Q]) {
  if (a.dropping.dropped == 0) return;
  const int64_t seed = read(a.dropping.seed), step = a.pairs() * a.images;
  int64_t element = pair.index * a.images + pair.lane % Q;
  uint32_t kept = 0;  // one bit for every key
#pragma unroll 1
  for (int k = 0; k < a.images; ++k) {
    if (number_of(seed, element) >= a.dropping.dropped) kept |= 1u << k;
    element += step;
  }
#pragma unroll
  for (int k = 0; k < Q; ++k) own[k] *= kept & (1u << k) ? static_cast<A>(a.dropping.scale) : 0;
}

template <class T, int N, int Q>
__global__ void __launch_bounds__(kThreadsOfBlock, kOnePassBlocks)
    one_pass_kernel(const __grid_constant__ Attention a, int lanes, int64_t first_pair,
                    const __grid_constant__ Rows output) {
  using A = Sum<T>;
  const Pair pair(a, lanes, first_pair);
  const uint32_t ignored = ignored_keys<Q>(a, pair);
  A own[Q];
  multiply_all(a, pair, AllRows<A, N, Q>(a, pair, a.query, T{}), AllRows<A, N, Q>(a, pair, a.key, T{}), own);
  const AllRows<A, N, Q> values(a, pair, a.value, T{});
  softmax_of_own(a, ignored, own);
  drop_of_own(a, pair, own);
  const int channel = N * pair.lane;
  const bool active = pair.exists && channel < a.channels;
  T* to = pair.row<T>(output, 0) + channel;
  for (int q = 0; q < a.images; ++q) {
    A sums[N] = {};
    for_keys<Q>(a.images, [&](int k) {
      const A probability = shuffle(own[k], q, pair.lanes);
#pragma unroll
      for (int n = 0; n < N; ++n) sums[n] += probability * values.at[k].at[n];
    });
    if (active) store<T, N>(to, sums);
    to += output.image_stride;
  }
}

template <class T, int N, int Q>
__global__ void __launch_bounds__(kThreadsOfBlock, kOnePassBackwardBlocks<Q>)
    one_pass_backward_kernel(const __grid_constant__ Attention a, int lanes, int64_t first_pair,
                             const __grid_constant__ AttentionGradients gradients) {
  using A = Sum<T>;
  const Pair pair(a, lanes, first_pair);
  const int channel = N * pair.lane;
  const bool active = pair.exists && channel < a.channels;
  const uint32_t ignored = ignored_keys<Q>(a, pair);
  A of_probability[Q], own[Q];  // of the own query: gradients of the probabilities, then of the logits; probabilities
  const AllRows<A, N, Q> outputs(a, pair, gradients.output, T{});
  multiply_all(a, pair, outputs, AllRows<A, N, Q>(a, pair, a.value, T{}), of_probability);
  const AllRows<A, N, Q> queries(a, pair, a.query, T{}), keys(a, pair, a.key, T{});
  multiply_all(a, pair, queries, keys, own);
  softmax_of_own(a, ignored, own);
  A share[Q], mean = 0;  // share: what is left of the probabilities
#pragma unroll
  for (int k = 0; k < Q; ++k) share[k] = own[k];
  drop_of_own(a, pair, share);
#pragma unroll
  for (int k = 0; k < Q; ++k) mean += share[k] * of_probability[k];
#pragma unroll
  for (int k = 0; k < Q; ++k) {
    of_probability[k] = (share[k] * of_probability[k] - own[k] * mean) * static_cast<A>(a.scale);
  }
  T* to = pair.row<T>(gradients.value, 0) + channel;
#pragma unroll
  for (int k = 0; k < Q; ++k) {
    if (k >= a.images) continue;
    A of_value[N] = {};
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      const A factor = shuffle(share[k], q, pair.lanes);
#pragma unroll
      for (int n = 0; n < N; ++n) of_value[n] += factor * outputs.at[q].at[n];
    }
    if (active) store<T, N>(to, of_value);
    to += gradients.value.image_stride;
  }
  to = pair.row<T>(gradients.key, 0) + channel;
  A of_query[Q][N] = {};
#pragma unroll
  for (int k = 0; k < Q; ++k) {
    if (k >= a.images) continue;
    A of_key[N] = {};
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      const A factor = shuffle(of_probability[k], q, pair.lanes);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        of_key[n] += factor * queries.at[q].at[n];
        of_query[q][n] += factor * keys.at[k].at[n];
      }
    }
    if (active) store<T, N>(to, of_key);
    to += gradients.key.image_stride;
  }
  to = pair.row<T>(gradients.query, 0) + channel;
#pragma unroll
  for (int q = 0; q < Q; ++q) {
    if (active && q < a.images) store<T, N>(to, of_query[q]);
    to += gradients.query.image_stride;
  }
}

}  // namespace detr_bf::cuda
