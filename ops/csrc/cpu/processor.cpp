#include "processor.h"

#include <cstdlib>
#include <cstring>

namespace detr_bf::cpu {
namespace {

Processor best() {
#ifdef DETR_BF_X86
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  return v4 ? Processor::kV4 : v3 ? Processor::kV3 : Processor::kBaseline;
#else
  return Processor::kBaseline;
#endif
}

Processor chosen() {
  const char* requested = std::getenv("DETR_BF_ISA");
  const Processor most = best();
  if (requested == nullptr) return most;
  if (std::strcmp(requested, "baseline") == 0) return Processor::kBaseline;
  return std::strcmp(requested, "v3") == 0 && most == Processor::kV4 ? Processor::kV3 : most;
}

}  // namespace

Processor processor() {
  static const Processor answer = chosen();
  return answer;
}

}  // namespace detr_bf::cpu
