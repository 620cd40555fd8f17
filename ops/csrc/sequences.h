// Checked tensors of batch_attention and dropout: a direct call of torch.ops.detr_bf must not crash either.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "random.h"
#include "tensors.h"

namespace detr_bf {

inline void check_probability(double probability) {
  STD_TORCH_CHECK(probability >= 0 && probability <= 1, "dropout: the probability must be in [0, 1], got ",
                  probability);
}

inline void check_seed(const Tensor& seed) {
  STD_TORCH_CHECK(seed.numel() == 1 && seed.scalar_type() == ScalarType::Long, "dropout: the seed must be one int64");
}

inline bool are_alike(const Tensor& one, const Tensor& other) {
  if (one.dim() != other.dim() || one.scalar_type() != other.scalar_type()) return false;
  for (int64_t dim = 0; dim < one.dim(); ++dim) {
    if (one.size(dim) != other.size(dim)) return false;
  }
  return true;
}

// The arguments of dropout. `other` is an optional second input; without a seed no random numbers are drawn.
inline Type check_dropout(const char* operation, DeviceType device, const Tensor& input, const Tensor* other,
                          double probability, const Tensor* seed) {
  check_memory(operation, device, {{"the first tensor", &input}, {"the second tensor", other}, {"the seed", seed}});
  STD_TORCH_CHECK(other == nullptr || are_alike(input, *other), operation,
                  ": both tensors must have one shape, dtype and device");
  check_probability(probability);
  if (seed != nullptr) check_seed(*seed);
  return type_of(input, operation);
}

inline const Tensor* pointer(const std::optional<Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

// Views of query, key and value in (B, N, 3, H, D).
inline std::array<Tensor, 3> unpacked(const Tensor& packed) {
  STD_TORCH_CHECK(packed.dim() == 5 && packed.size(2) == 3, "batch_attention: packed must be (B, N, 3, H, D)");
  const auto part = [&](int64_t index) { return torch::stable::select(packed, 2, index); };
  return {part(0), part(1), part(2)};
}

// Query, key and value (B, N, H, D) with contiguous channels; mask (B, N) contiguous.
struct Sequences {
  Type type;
  Tensor query, key, value;
  std::optional<Tensor> key_mask;
  DropoutRate rate;
  std::optional<Tensor> seed;  // one int64; present if anything is dropped

  // Raises on inconsistent tensors; grad_output is null in the forward pass.
  Sequences(DeviceType device, const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
            double probability, const std::optional<Tensor>& seed, const Tensor* grad_output = nullptr)
      : type(checked(device, q, k, v, pointer(mask), probability, pointer(seed), grad_output)),
        query(with_channels_together(q)),
        key(with_channels_together(k)),
        value(with_channels_together(v)),
        rate(probability),
        seed(seed) {
    if (mask) key_mask = torch::stable::contiguous(*mask);
  }

  int64_t images() const { return query.size(0); }
  int64_t positions() const { return query.size(1); }
  int64_t heads() const { return query.size(2); }
  int64_t channels() const { return query.size(3); }
  bool empty() const { return query.numel() == 0; }

 private:
  static Type checked(DeviceType device, const Tensor& query, const Tensor& key, const Tensor& value,
                      const Tensor* key_mask, double probability, const Tensor* seed, const Tensor* grad_output) {
    constexpr const char* name = "batch_attention";
    check_memory(name, device,
                 {{"query", &query},
                  {"key", &key},
                  {"value", &value},
                  {"key_mask", key_mask},
                  {"the seed", seed},
                  {"grad_output", grad_output}});
    STD_TORCH_CHECK(query.dim() == 4, "batch_attention: query must be (B, N, H, D)");
    for (const Argument& other : {Argument{"key", &key}, {"value", &value}, {"grad_output", grad_output}}) {
      STD_TORCH_CHECK(other.tensor == nullptr || are_alike(query, *other.tensor), "batch_attention: ", other.name,
                      " must have the shape, dtype and device of query");
    }
    const int64_t images = query.size(0), positions = query.size(1), heads = query.size(2), channels = query.size(3);
    STD_TORCH_CHECK(key_mask == nullptr || (key_mask->scalar_type() == ScalarType::Bool && key_mask->dim() == 2 &&
                                            key_mask->size(0) == images && key_mask->size(1) == positions),
                    "batch_attention: key_mask must be (B, N), bool");
    check_probability(probability);
    STD_TORCH_CHECK(seed != nullptr || probability == 0, "batch_attention: dropout needs a seed");
    if (seed != nullptr) check_seed(*seed);
    // All products of sizes in kernels and launchers are bounded by these; the second is the number of probabilities.
    product(name, {images, positions, 3, heads, channels});
    if (query.numel() > 0) product(name, {images, images, positions, heads});
    return type_of(query, name);
  }
};

}  // namespace detr_bf
