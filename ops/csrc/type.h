// Scalar types of the kernels, as a runtime value.
#pragma once

namespace detr_bf {

enum class Type { kFloat64, kFloat32, kFloat16, kBFloat16 };

}  // namespace detr_bf
