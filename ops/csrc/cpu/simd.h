// Vectors as wide as the instruction set this file is compiled for: loads, stores, conversions, sums.
//
// All functions have internal linkage: the same source is compiled for several instruction sets into one library, and
// the linker must not merge functions built for different ones.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#ifdef DETR_BF_X86
#include <immintrin.h>
#endif

namespace detr_bf::cpu {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

namespace {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class S, int N>
struct VectorOf {
  typedef S type __attribute__((vector_size(N * sizeof(S))));
};
template <class S>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(S));
template <class S>
using Vec = typename VectorOf<S, kLanes<S>>::type;

template <class A>
struct IntegerOf;
template <>
struct IntegerOf<float> {
  using type = int32_t;
};
template <>
struct IntegerOf<double> {
  using type = int64_t;
};
// Integer of the same width: result of a comparison of two Vec<A>, and index of cells.
template <class A>
using Int = typename IntegerOf<A>::type;

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <class S>
inline S read(const void* from) {
  S value;
  std::memcpy(&value, from, sizeof(S));
  return value;
}

template <class A>
inline Vec<A> broadcast(A value) {
  return value - Vec<A>{};
}

// mask is all ones or all zeros, lane by lane.
template <class A>
inline Vec<A> select(Vec<Int<A>> mask, Vec<A> yes, Vec<A> no) {
  return mask ? yes : no;
}

using HalfBits = typename VectorOf<uint16_t, kLanes<float>>::type;
using FloatBits = Vec<uint32_t>;

// NaN stays NaN; infinity and subnormal numbers are converted exactly.
inline Vec<float> widen(Vec<float>, Half, HalfBits half) {
  const FloatBits bits = __builtin_convertvector(half, FloatBits);
  const FloatBits magnitude = (bits & 0x7fffu) << 13;
  const Vec<float> scaled = bits_as<Vec<float>>(magnitude) * 0x1p112f;
  const FloatBits special = bits_as<FloatBits>(magnitude >= 0x0f800000u);
  const FloatBits exponent = special & 0x7f800000u;
  return bits_as<Vec<float>>(bits_as<FloatBits>(scaled) | exponent | ((bits & 0x8000u) << 16));
}

inline Vec<float> widen(Vec<float>, BFloat16, HalfBits half) {
  return bits_as<Vec<float>>(__builtin_convertvector(half, FloatBits) << 16);
}

// To the nearest, ties to even.
inline HalfBits narrow(Half, Vec<float> from) {
  const FloatBits bits = bits_as<FloatBits>(from);
  const FloatBits sign = (bits >> 16) & 0x8000u;
  const FloatBits magnitude = bits & 0x7fffffffu;
  const FloatBits normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  const FloatBits tiny = bits_as<FloatBits>(bits_as<Vec<float>>(magnitude) + 0.5f) - 0x3f000000u;
  const FloatBits is_tiny = bits_as<FloatBits>(magnitude < 0x38800000u);
  const FloatBits is_large = bits_as<FloatBits>(magnitude >= 0x477ff000u);  // infinity after rounding, infinity, or NaN
  const FloatBits is_nan = bits_as<FloatBits>(magnitude > 0x7f800000u);
  FloatBits result = (tiny & is_tiny) | (normal & ~is_tiny);
  result = (result & ~is_large) | (is_large & 0x7c00u) | (is_nan & 0x0200u);
  return __builtin_convertvector(result | sign, HalfBits);
}

inline HalfBits narrow(BFloat16, Vec<float> from) {
  const FloatBits bits = bits_as<FloatBits>(from);
  const FloatBits is_nan = bits_as<FloatBits>((bits & 0x7fffffffu) > 0x7f800000u);
  const FloatBits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0u), HalfBits);
}

template <class A, class T>
inline Vec<A> load(const T* from) {
  if constexpr (sizeof(T) == sizeof(A)) {
    return read<Vec<A>>(from);
  } else {
    return widen(Vec<A>{}, T{}, read<HalfBits>(from));
  }
}

template <class A, class T>
inline void store(T* to, Vec<A> vector) {
  if constexpr (sizeof(T) == sizeof(A)) {
    std::memcpy(to, &vector, sizeof(vector));
  } else {
    const HalfBits narrowed = narrow(T{}, vector);
    std::memcpy(to, &narrowed, sizeof(narrowed));
  }
}

// True if stream() writes past the caches.
#ifdef DETR_BF_X86
template <class T, class A>
constexpr bool kStreams = sizeof(T) == sizeof(A);
#else
template <class T, class A>
constexpr bool kStreams = false;
#endif

// Results of this size or more are not kept in the caches until they are read.
constexpr int64_t kBytesToStream = int64_t{1} << 24;

// store() past the caches, to an aligned address. Other threads may read the data after finish_streams().
template <class A, class T>
inline void stream(T* to, Vec<A> vector) {
#ifdef DETR_BF_X86
  if constexpr (kStreams<T, A>) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits_as<__m512i>(vector));
#elif defined(__AVX2__)
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits_as<__m256i>(vector));
#else
    return _mm_stream_si128(reinterpret_cast<__m128i*>(to), bits_as<__m128i>(vector));
#endif
  }
#endif
  store<A>(to, vector);
}
inline void finish_streams() {
#ifdef DETR_BF_X86
  _mm_sfence();
#endif
}

// The first count lanes only; the others are read as zero and not written.
template <class A, class T>
inline Vec<A> load_first(const T* from, int64_t count) {
  T whole[kLanes<A>] = {};
  std::memcpy(whole, from, static_cast<size_t>(count) * sizeof(T));
  return load<A>(whole);
}

template <class A, class T>
inline void store_first(T* to, Vec<A> vector, int64_t count) {
  T whole[kLanes<A>];
  store<A>(whole, vector);
  std::memcpy(to, whole, static_cast<size_t>(count) * sizeof(T));
}

// Lane i of the result is lane Pick::at(i) of a followed by b.
template <class Pick, class A, std::size_t... I>
inline Vec<A> shuffle(Vec<A> a, Vec<A> b, std::index_sequence<I...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, Pick::at(static_cast<int>(I))...);
#else
  return __builtin_shuffle(a, b, Vec<Int<A>>{Pick::at(static_cast<int>(I))...});
#endif
}
template <class Pick, class A>
inline Vec<A> shuffle(Vec<A> a, Vec<A> b) {
  return shuffle<Pick, A>(a, b, std::make_index_sequence<kLanes<A>>{});
}

// De-interleaves pairs (x, y) stored in a and then b: all x for First 0, all y for First 1.
template <int First>
struct EverySecond {
  static constexpr int at(int lane) { return 2 * lane + First; }
};
// Interleaves pairs (lane of a, lane of b), of the lower half of the lanes and of the upper half.
template <class A, bool Upper>
struct Interleave {
  static constexpr int at(int lane) {
    return lane / 2 + (lane % 2 ? kLanes<A> : 0) + (Upper ? kLanes<A> / 2 : 0);
  }
};
// Adds lanes at a distance: those of a into lanes without that bit, those of b into lanes with it.
template <class A, int Distance, bool Set>
struct Neighbours {
  static constexpr int at(int lane) {
    const int source = Set ? lane | Distance : lane & ~Distance;
    return lane & Distance ? source + kLanes<A> : source;
  }
};

// Sums the lanes of Count parts into one vector: lane i of the result belongs to part i / Unit modulo Count.
// With Count = kLanes it is the sum of all lanes of parts[i]. A smaller Count leaves kLanes / Count lanes per part;
// a later call with Unit = Count completes the sum.
template <class A, int Count = kLanes<A>, int Unit = 1>
inline Vec<A> sums_of(const Vec<A>* parts) {
  if constexpr (Count == 1) {
    return parts[0];
  } else {
    constexpr int half = Count / 2, distance = Unit * half;
    const Vec<A> a = sums_of<A, half, Unit>(parts), b = sums_of<A, half, Unit>(parts + half);
    return shuffle<Neighbours<A, distance, false>, A>(a, b) + shuffle<Neighbours<A, distance, true>, A>(a, b);
  }
}

}  // namespace
}  // namespace detr_bf::cpu
