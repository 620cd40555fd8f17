// Which of the compiled instruction sets this processor has.
#pragma once

namespace detr_bf::cpu {

enum class Processor { kBaseline, kV3, kV4 };

// Asked feature by feature: a question for "haswell" or "skylake-avx512" is answered no on AMD. The environment variable
// DETR_BF_ISA (baseline, v3, v4) chooses a lower one, for tests.
Processor processor();

}  // namespace detr_bf::cpu
