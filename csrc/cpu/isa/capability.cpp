// The choice of the instruction set, made once.
#include <cstdlib>
#include <string>

#include "../../check.h"
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fastrl::cpu {
namespace {

bool machine_has_avx512() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool machine_has_avx2() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // not __builtin_cpu_supports("f16c"), which clang knows from version 17 on
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

const Kernels* choose() {
  const Kernels* avx512 = machine_has_avx512() ? kernels_avx512() : nullptr;
  const Kernels* avx2 = machine_has_avx2() ? kernels_avx2() : nullptr;
  const Kernels* plain = kernels_plain();
  const char* asked = std::getenv("FASTRL_CPU_CAPABILITY");
  if (asked == nullptr || *asked == '\0') return avx512 ? avx512 : avx2 ? avx2 : plain;
  const std::string name = asked;
  STD_TORCH_CHECK(name == "avx512" || name == "avx2" || name == "plain",
                  "FASTRL_CPU_CAPABILITY must be avx512, avx2 or plain, got ", name);
  const Kernels* chosen = name == "avx512" ? avx512 : name == "avx2" ? avx2 : plain;
  STD_TORCH_CHECK(chosen != nullptr, "FASTRL_CPU_CAPABILITY is ", name,
                  ", which this machine does not have");
  return chosen;
}

std::string cpu_capability() { return kernels().capability; }

}  // namespace

const Kernels& kernels() {
  static const Kernels* chosen = choose();  // if it throws, the next call tries again
  return *chosen;
}

}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", fastrl::boxed<fastrl::cpu::cpu_capability>);
}
