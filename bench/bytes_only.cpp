// The bytes of an AdamW step of a bf16 parameter with FP32 state, moved without its arithmetic:
// gradient, parameter, master and two moments are read, and all but the gradient are written.
// Built by bench/update_cpu.py.

#include <cstdint>

extern "C" void bytes_only(const uint16_t *__restrict gradient, uint16_t *__restrict parameter,
                           uint32_t *__restrict master, uint32_t *__restrict first,
                           uint32_t *__restrict second, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) {
    const uint32_t bits = static_cast<uint32_t>(gradient[i]) ^ parameter[i];
    master[i] ^= bits;
    first[i] ^= bits;
    second[i] ^= bits;
    parameter[i] = static_cast<uint16_t>(bits);
  }
}
