// Shared by the CPU bindings: the kernels of this processor.
#pragma once

#include "../tensors.h"
#include "processor.h"

namespace detr_bf::cpu {

// The one of three kernel tables that fits this processor.
template <class Kernels>
const Kernels& best_of(const Kernels& baseline, const Kernels* v3, const Kernels* v4) {
  switch (processor()) {
    case Processor::kV4: return *v4;
    case Processor::kV3: return *v3;
    case Processor::kBaseline: break;
  }
  return baseline;
}

}  // namespace detr_bf::cpu
