// Batch attention on the GPU: code shared by its kernels.
//
// A pair is one position and head: B queries and B keys of D channels. A group of neighbouring lanes processes a pair,
// each lane N channels of every row, and holds Q queries at a time while it loops over the keys; if B <= Q, every row
// is read once. If the channels do not fit into the registers of a warp, or are not aligned for wide loads, rows are
// read again for every slice of channels.
#pragma once

#include "device.cuh"
#include "random.cuh"

namespace detr_bf::cuda {

constexpr int kThreadsOfBlock = 128;

// A tensor (B, N, H, D) with contiguous channels. Strides in elements.
struct Rows {
  void* data;
  int64_t image_stride, position_stride, head_stride;
};

struct Attention {
  int64_t positions;
  int32_t images, heads, channels;
  Rows query, key, value;
  const int16_t* key_mask;  // (B, N), not zero: ignored; null: none is
  Dropping dropping;
  double scale;  // of the products

  __host__ __device__ int64_t pairs() const { return positions * heads; }
};

// The pair of this thread's group, and the lane within it. exists is false beyond the last pair; these lanes still take
// part in every exchange.
struct Pair {
  int lanes, lane, head;
  int64_t index, position;
  bool exists;

  __device__ Pair(const Attention& a, int lanes, int64_t first_pair) : lanes(lanes), lane(threadIdx.x % lanes) {
    const int groups = kThreadsOfBlock / lanes;
    index = first_pair + static_cast<int64_t>(blockIdx.x) * groups + threadIdx.x / lanes;
    exists = index < a.pairs();
    position = index / a.heads;
    head = static_cast<int>(index % a.heads);
  }
  template <class T>
  __device__ T* row(const Rows& rows, int64_t image) const {
    return static_cast<T*>(rows.data) + image * rows.image_stride + position * rows.position_stride +
           head * rows.head_stride;
  }
};

// ---- rows ----

template <class A, int N>
struct Channels {
  A at[N];
};

template <int N, class T>
__device__ inline Channels<Sum<T>, N> channels_of(const T* row, int channel, bool there) {
  Channels<Sum<T>, N> channels = {};
  if (there) {
    const Packed<T, N> packed = load<N>(row + channel);
#pragma unroll
    for (int n = 0; n < N; ++n) channels.at[n] = packed[n];
  }
  return channels;
}

// Sum over the lanes of a group, returned to every lane.
template <int Q, class A>
__device__ inline void sum_over_lanes(A (&numbers)[Q], int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int q = 0; q < Q; ++q) numbers[q] += shuffle_xor(numbers[q], distance);
  }
}

// Q rows of neighbouring images; rows beyond the last image are zero. A lane keeps its channels if Held.
template <class T, int N, int Q, bool Held>
class RowBlock {
 public:
  using A = Sum<T>;

  __device__ RowBlock(const Attention& a, const Pair& pair, const Rows& rows, int first)
      : pair_(pair), rows_(pair.row<const T>(rows, first)), stride_(rows.image_stride), channels_(a.channels),
        count_(pair.exists ? min(Q, a.images - first) : 0) {
    if constexpr (Held) {
#pragma unroll
      for (int q = 0; q < Q; ++q) held_[q] = read_channels(q, N * pair.lane);
    }
  }

  __device__ Channels<A, N> channels(int q, int channel) const {
    if constexpr (Held) {
      return held_[q];
    } else {
      return read_channels(q, channel);
    }
  }

  // Dot products with one row, the same in every lane.
  __device__ void dot_products(const T* row, A (&products)[Q]) const {
#pragma unroll
    for (int q = 0; q < Q; ++q) products[q] = 0;
    for (int first = 0; first < channels_; first += N * pair_.lanes) {
      const int channel = first + N * pair_.lane;
      const Channels<A, N> other = channels_of<N>(row, channel, pair_.exists && channel < channels_);
#pragma unroll
      for (int q = 0; q < Q; ++q) {
        const Channels<A, N> own = channels(q, channel);
#pragma unroll
        for (int n = 0; n < N; ++n) products[q] += own.at[n] * other.at[n];
      }
      if (Held) break;
    }
    sum_over_lanes(products, pair_.lanes);
  }

  __device__ int count() const { return count_; }

 private:
  __device__ Channels<A, N> read_channels(int q, int channel) const {
    return channels_of<N>(rows_ + q * stride_, channel, q < count_ && channel < channels_);
  }

  const Pair& pair_;
  const T* rows_;
  int64_t stride_;
  int channels_, count_;
  Channels<A, N> held_[Held ? Q : 1];
};

// ---- probabilities ----

// Logits and probabilities of Q queries for one key.
template <class A, int Q>
struct Logits {
  A at[Q];

  template <class Block, class T>
  __device__ Logits(const Attention& a, const Pair& pair, const Block& queries, const T* key_row, int key) {
    queries.dot_products(key_row, at);
    bool ignored = false;
    if (a.key_mask != nullptr && pair.exists) ignored = read(a.key_mask + key * a.positions + pair.position) != 0;
#pragma unroll
    for (int q = 0; q < Q; ++q) at[q] = ignored ? -static_cast<A>(INFINITY) : at[q] * static_cast<A>(a.scale);
  }
};

// Dropout factors of the probabilities of Q queries for one key. A lane computes the number of one query.
template <class A, int Q>
struct Kept {
  A at[Q];

  __device__ Kept(const Attention& a, const Pair& pair, int first, int key) {
    if (a.dropping.dropped == 0) {
#pragma unroll
      for (int q = 0; q < Q; ++q) at[q] = 1;
      return;
    }
    const int64_t element = (key * a.pairs() + pair.index) * a.images + first + pair.lane % Q;
    const uint32_t number = number_of(read(a.dropping.seed), element);
    const A own = number < a.dropping.dropped ? 0 : static_cast<A>(a.dropping.scale);
#pragma unroll
    for (int q = 0; q < Q; ++q) at[q] = shuffle(own, q, pair.lanes);
  }
};

// Online softmax of Q queries: sums of exp(logit - most), where most is the largest logit so far.
template <class A, int Q>
struct Softmax {
  A most[Q], sum[Q];

  __device__ Softmax() {
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      most[q] = -static_cast<A>(INFINITY);
      sum[q] = 0;
    }
  }
  // The term of this key, and the factor for all earlier terms.
  __device__ A add(int q, A logit, A& factor) {
    const A larger = fmax(most[q], logit);
    const bool nothing = larger == -static_cast<A>(INFINITY) && logit == larger;  // every key so far is ignored
    factor = nothing ? 1 : exp(most[q] - larger);
    const A part = nothing ? 0 : exp(logit - larger);
    most[q] = larger;
    sum[q] = sum[q] * factor + part;
    return part;
  }
  // Normalisation of a query after the last key. If every key is ignored, all probabilities are zero.
  __device__ A inverse(int q) const { return sum[q] == 0 ? 0 : 1 / sum[q]; }
};

}  // namespace detr_bf::cuda
