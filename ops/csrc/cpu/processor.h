// Detection of the best compiled instruction set of this processor.
#pragma once

namespace detr_bf::cpu {

enum class Processor { kBaseline, kV3, kV4 };

// Checks single features, since tests for "haswell" or "skylake-avx512" fail on AMD. The environment variable
// DETR_BF_ISA (baseline, v3, v4) selects a lower set, for tests.
Processor processor();

}  // namespace detr_bf::cpu
