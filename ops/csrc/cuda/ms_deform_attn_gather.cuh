// Gradient of value with its sums in a fixed order: the same bits in every run.
//
// Every sample gets a key, its top left cell. After sorting, the samples that touch a cell form two runs: those with
// their top left cell in the row of the cell or in the row above, in its column or in the one before. A warp finds the
// samples of a cell by bisection (a quarter of the data that sorting corners would move) and writes its sum once.
#pragma once

#include "ms_deform_attn.cuh"

namespace detr_bf::cuda {

constexpr int kGatherTogether = 4;  // samples of a lane loaded at once
constexpr int kGatherBlocks = 3;    // per multiprocessor: 80 registers a thread
constexpr int kGatherWarps = kThreads / kWarp;

// Samples sorted together: all samples of neighbouring (image, head) pairs, numbered pair by pair.
struct Chunk {
  int64_t first_pair;
  int32_t pairs;
  int32_t samples;  // per pair: Q x L x P

  __host__ __device__ int32_t entries() const { return pairs * samples; }
};

// An (image, head), by its number in the chunk.
struct Pair {
  int number, head;
  int64_t image, first_row;

  __device__ Pair(const Sampling& s, const Chunk& chunk, int number)
      : number(number),
        head(static_cast<int>((chunk.first_pair + number) % s.heads)),
        image((chunk.first_pair + number) / s.heads),
        first_row(image * s.queries * s.heads + head) {}
};

// One sample of a pair, by its number among the pair's.
struct Entry {
  int query, number;

  __device__ Entry(const Sampling& s, uint32_t entry)
      : query(entry / static_cast<uint32_t>(s.samples())), number(entry - query * s.samples()) {}

  template <class T>
  __device__ Sample<T> fetch(const Sampling& s, const Pair& pair, int level) const {
    const int64_t at = (pair.first_row + static_cast<int64_t>(query) * s.heads) * s.samples() + number;
    const Sum<T>* location = static_cast<const Sum<T>*>(s.locations) + 2 * at;
    return {read(location), read(location + 1), read(static_cast<const T*>(s.weights) + at), level};
  }
};

// One thread a sample. Samples that touch no cell get the largest key.
template <class T>
__global__ void __launch_bounds__(kThreads)
    key_kernel(const __grid_constant__ Sampling s, const __grid_constant__ Chunk chunk, int32_t* keys) {
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= static_cast<uint32_t>(chunk.entries())) return;
  const Pair pair(s, chunk, index / static_cast<uint32_t>(chunk.samples));
  const Entry entry(s, index - static_cast<uint32_t>(pair.number) * chunk.samples);
  const Sample<T> sample = entry.fetch<T>(s, pair, level_of(s, entry.number));
  const Corners<Sum<T>> corners(sample, s.level[sample.level]);
  const bool touches = corners.steps & 15u;
  const int32_t cells = static_cast<int32_t>(s.cells);
  write(keys + index, touches ? pair.number * cells + static_cast<int32_t>(corners.cell) : chunk.pairs * cells);
}

// First entry whose key is not below the given one.
__device__ inline int first_not_below(const int32_t* keys, int count, int32_t key) {
  int begin = 0;
  while (count > 0) {
    const int half = count / 2;
    const bool below = read(keys + begin + half) < key;
    begin = below ? begin + half + 1 : begin;
    count = below ? count - half - 1 : half;
  }
  return begin;
}

// A cell of value: its position and the entries that touch it.
struct Destination {
  int level = -1;  // -1: the cell belongs to no level
  int x = 0, y = 0;
  int begin[2] = {0, 0}, end[2] = {0, 0};  // entries of the row above, of its own row

  __device__ Destination(const Sampling& s, const Chunk& chunk, const int32_t* keys, int pair, int cell) {
    for (int l = 0; l < s.levels; ++l) {
      const int place = cell - s.level[l].start;
      if (place >= 0 && place < s.level[l].height * s.level[l].width) level = l;
    }
    if (level < 0) return;
    const int width = s.level[level].width, place = cell - s.level[level].start;
    y = place / width;
    x = place - y * width;
    // Lanes 0 and 1 find the ends of the run above, lanes 2 and 3 those of the other run.
    const int lane = threadIdx.x % kWarp, line = lane & 2 ? 0 : -width, column = lane & 1 ? 1 : x > 0 ? -1 : 0;
    const int key = pair * static_cast<int>(s.cells) + cell + line + column;
    const int found = lane < 4 ? first_not_below(keys, chunk.entries(), key) : 0;
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      begin[run] = shuffle(found, 2 * run, kWarp);
      end[run] = shuffle(found, 2 * run + 1, kWarp);
    }
    if (y == 0) end[0] = begin[0];
  }
};

// Contribution of one entry to a cell: the gradient of a query times a weight.
template <class A>
struct Addend {
  int query = 0;
  A weight = 0;
};

template <class T>
__device__ inline Addend<Sum<T>> addend(const Sampling& s, const Pair& pair, const Destination& to,
                                        const Entry& entry) {
  using A = Sum<T>;
  const Sample<T> sample = entry.fetch<T>(s, pair, to.level);
  const Level& level = s.level[to.level];
  const A x = hat(place_of(sample.x, level.width) - static_cast<A>(to.x));
  const A y = hat(place_of(sample.y, level.height) - static_cast<A>(to.y));
  return {entry.query, sample.weight() * x * y};
}

// Adds a run of entries: each lane of the warp loads one, then the groups process them in turn.
template <class T, int N>
__device__ inline void add_run(const Sampling& s, const Chunk& chunk, const Pair& pair, const Destination& to, int run,
                               const int64_t* order, const T* rows, bool active, int lanes, Sum<T> (&sums)[N]) {
  const int lane = threadIdx.x % kWarp, group = lane / lanes, groups = kWarp / lanes;
  const uint32_t stride = s.heads * s.channels * sizeof(T);
  for (int first = to.begin[run]; first < to.end[run]; first += kWarp) {
    const int count = min(kWarp, to.end[run] - first);
    Addend<Sum<T>> own;
    if (lane < count) {
      const auto entry = static_cast<uint32_t>(read(order + first + lane));
      own = addend<T>(s, pair, to, Entry(s, entry - static_cast<uint32_t>(pair.number) * chunk.samples));
    }
    for (int at = 0; at * groups < count; at += kGatherTogether) {
      Packed<T, N> channels[kGatherTogether];
      Sum<T> weights[kGatherTogether];
#pragma unroll
      for (int k = 0; k < kGatherTogether; ++k) {
        const int from = (at + k) * groups + group;
        const uint32_t query = shuffle(own.query, from, kWarp);
        weights[k] = shuffle(own.weight, from, kWarp);
        if (!active) weights[k] = 0;
        if (weights[k] != 0) channels[k] = load<N>(cell_at(rows, query, stride));
      }
#pragma unroll
      for (int k = 0; k < kGatherTogether; ++k) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const Sum<T> number = channels[k][n];
          if (weights[k] != 0) sums[n] += weights[k] * number;
        }
      }
    }
  }
}

// One warp per cell and pair, last cells first: cells of coarse levels have the most entries.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, kGatherBlocks)
    gather_kernel(const __grid_constant__ Sampling s, const __grid_constant__ Chunk chunk, int lanes,
                  const int32_t* keys, const int64_t* order, const T* grad_output, T* grad_value) {
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kGatherWarps + threadIdx.x / kWarp;
  if (place >= s.cells) return;  // the whole warp
  const int cell = static_cast<int>(s.cells - 1 - place);
  const Pair pair(s, chunk, blockIdx.y);
  const Destination to(s, chunk, keys, pair.number, cell);
  const int lane = threadIdx.x % kWarp;
  for (int part = 0; part < s.channels; part += N * lanes) {
    const int channel = part + N * (lane & (lanes - 1));
    const T* rows = grad_output + pair.first_row * s.channels + channel;
    Sum<T> sums[N] = {};
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      add_run<T, N>(s, chunk, pair, to, run, order, rows, channel < s.channels, lanes, sums);
    }
    for (int mask = lanes; mask < kWarp; mask *= 2) {
#pragma unroll
      for (int n = 0; n < N; ++n) sums[n] += shuffle_xor(sums[n], mask);
    }
    if (lane < lanes && channel < s.channels) {
      store<T, N>(grad_value + ((pair.image * s.cells + cell) * s.heads + pair.head) * s.channels + channel, sums);
    }
  }
}

}  // namespace detr_bf::cuda
