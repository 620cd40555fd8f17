// The tensors of batch_attention and dropout, checked: whoever calls the operators past detr_bf.ops must not crash
// either.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "random.h"
#include "tensors.h"

namespace detr_bf {

// What random numbers of a tensor on this device are made of.
inline void check_dropout(const Tensor& input, double probability, const std::optional<Tensor>& seed) {
  STD_TORCH_CHECK(probability >= 0 && probability <= 1, "dropout: the probability must be in [0, 1], got ",
                  probability);
  STD_TORCH_CHECK(seed.has_value() || probability == 0, "dropout: a seed is needed");
  STD_TORCH_CHECK(!seed.has_value() || (seed->numel() == 1 && seed->device() == input.device() &&
                                        seed->scalar_type() == ScalarType::Long),
                  "dropout: the seed must be one int64 on the device of the input");
}

// Two tensors that are read side by side.
inline void check_pair(const Tensor& one, const Tensor& other) {
  bool alike = one.dim() == other.dim() && one.scalar_type() == other.scalar_type() && one.device() == other.device();
  for (int64_t dim = 0; dim < one.dim() && alike; ++dim) alike = one.size(dim) == other.size(dim);
  STD_TORCH_CHECK(alike, "dropout: both tensors must have one shape, dtype and device");
}

// Views of query, key and value in (B, N, 3, H, D).
inline std::array<Tensor, 3> unpacked(const Tensor& packed) {
  STD_TORCH_CHECK(packed.dim() == 5 && packed.size(2) == 3, "batch_attention: packed must be (B, N, 3, H, D)");
  const auto part = [&](int64_t index) { return torch::stable::select(packed, 2, index); };
  return {part(0), part(1), part(2)};
}

// Query, key and value (B, N, H, D) with the channels of a row one after another; mask (B, N) contiguous.
struct Sequences {
  Tensor query, key, value;
  std::optional<Tensor> key_mask;
  DropoutRate rate;
  std::optional<Tensor> seed;  // 0-d int64; there where anything is dropped

  Sequences(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double probability,
            const std::optional<Tensor>& seed_in)
      : query(with_channels_together(checked(q))),
        key(readable(k, "key")),
        value(readable(v, "value")),
        rate((check_dropout(q, probability, seed_in), probability)),
        seed(seed_in) {
    if (mask.has_value()) {
      STD_TORCH_CHECK(mask->scalar_type() == ScalarType::Bool && mask->dim() == 2 && mask->size(0) == q.size(0) &&
                          mask->size(1) == q.size(1),
                      "batch_attention: key_mask must be (B, N), bool");
      STD_TORCH_CHECK(mask->device() == q.device(), "batch_attention: key_mask must be on the device of query");
      key_mask = torch::stable::contiguous(*mask);
    }
  }

  int64_t images() const { return query.size(0); }
  int64_t positions() const { return query.size(1); }
  int64_t heads() const { return query.size(2); }
  int64_t channels() const { return query.size(3); }
  bool empty() const { return query.numel() == 0; }

  // A tensor of the shape of query that may have any strides, as one whose rows can be read.
  Tensor readable(const Tensor& tensor, const char* name) const {
    check_alike(tensor, name);
    return with_channels_together(tensor);
  }

 private:
  static const Tensor& checked(const Tensor& query) {
    STD_TORCH_CHECK(query.dim() == 4, "batch_attention: query must be (B, N, H, D)");
    return query;
  }
  void check_alike(const Tensor& tensor, const char* name) const {
    bool alike = tensor.dim() == 4 && tensor.scalar_type() == query.scalar_type() && tensor.device() == query.device();
    for (int64_t dim = 0; dim < 4 && alike; ++dim) alike = tensor.size(dim) == query.size(dim);
    STD_TORCH_CHECK(alike, "batch_attention: ", name, " must have the shape, dtype and device of query");
  }
};

}  // namespace detr_bf
