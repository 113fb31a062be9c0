// The arithmetic of torch's single-tensor Adam, AdamW and SGD on a CPU.
//
// Which operations are fused, and their order, is torch's: `lerp_`, `addcmul_`, `addcdiv_` and
// `add(alpha=...)` round as written here on its AVX2 and AVX-512 paths, in vectors and at their
// ends. Numbers of Python are doubles, which are rounded to FP32 once.

#pragma once

#include "root.h"

namespace {

enum Flags : uint32_t {
  MAXIMIZE = 1,
  DECAY = 2,            // weight decay is added to the gradient
  DECOUPLED_DECAY = 4,  // weight decay scales the parameter
  NESTEROV = 8,
};

// Hyper-parameters of a group of parameters, as the caller passes them; `GROUP` in `forms.py`.
struct Group {
  float weight_decay;  // DECAY: the number itself; DECOUPLED_DECAY: 1 - lr * weight_decay
  float one_minus_beta1, beta2, one_minus_beta2, root_of_bias_correction2, eps, minus_step_size;
  float momentum, one_minus_dampening, minus_lr;
  uint32_t flags;
  uint32_t rule;
};

// The same, in vectors.
struct AdamNumbers {
  explicit INLINE AdamNumbers(const Group &g)
      : weight_decay(V::of(g.weight_decay)),
        beta2(V::of(g.beta2)),
        one_minus_beta2(V::of(g.one_minus_beta2)),
        root_of_bias_correction2(V::of(g.root_of_bias_correction2)),
        eps(V::of(g.eps)),
        minus_step_size(V::of(g.minus_step_size)),
        is_small(g.one_minus_beta1 < 0.5f && g.one_minus_beta1 > -0.5f),
        weight(V::of(is_small ? g.one_minus_beta1 : g.one_minus_beta1 - 1.0f)),
        flags(g.flags) {}
  F weight_decay, beta2, one_minus_beta2, root_of_bias_correction2, eps, minus_step_size;
  bool is_small;  // whether `lerp_` begins with its start, and not with its end
  F weight;
  uint32_t flags;
};

template <Root R, bool AMSGRAD, bool FUSED>
INLINE void step_adam(const AdamNumbers &h, F g, F &p, F &m, F &v, F &v_max) {
  if (FUSED && (h.flags & MAXIMIZE) && (h.flags & DECAY))
    g = V::fms(p, h.weight_decay, V::from_bits(V::bit_xor(V::bits(g), V::of_int(SIGN))));
  else if (h.flags & DECAY)
    g = V::fma(p, h.weight_decay, g);
  if (h.flags & DECOUPLED_DECAY) p = V::mul(p, h.weight_decay);
  m = V::fma(h.weight, V::sub(g, m), h.is_small ? m : g);
  v = V::fma(V::mul(h.one_minus_beta2, g), g, V::mul(v, h.beta2));
  F second = v;
  if constexpr (AMSGRAD) {  // torch.maximum: all bits set where either is NaN
    const Mask nan = V::either(V::is_nan(v_max), V::is_nan(v));
    const I all = V::of_int(0xFFFFFFFFu);
    v_max = V::from_bits(V::choose_int(nan, all, V::bits(V::max(v_max, v))));
    second = v_max;
  }
  const F root = V::div(square_root<R>(second), h.root_of_bias_correction2);
  p = V::add(p, V::div(V::mul(h.minus_step_size, m), V::add(root, h.eps)));
}

struct SgdNumbers {
  explicit INLINE SgdNumbers(const Group &g)
      : weight_decay(V::of(g.weight_decay)),
        momentum(V::of(g.momentum)),
        one_minus_dampening(V::of(g.one_minus_dampening)),
        minus_lr(V::of(g.minus_lr)),
        flags(g.flags) {}
  F weight_decay, momentum, one_minus_dampening, minus_lr;
  uint32_t flags;
};

template <bool MOMENTUM> INLINE void step_sgd(const SgdNumbers &h, F g, F &p, F &buffer) {
  if (h.flags & DECAY) g = V::fma(p, h.weight_decay, g);
  if constexpr (MOMENTUM) {
    buffer = V::fma(g, h.one_minus_dampening, V::mul(buffer, h.momentum));
    g = h.flags & NESTEROV ? V::fma(buffer, h.momentum, g) : buffer;
  }
  p = V::fma(g, h.minus_lr, p);
}

// One of the rules: its numbers, how many moments it keeps, and one step of one vector.
template <Root R, bool AMSGRAD, bool FUSED = false> struct Adam {
  using Numbers = AdamNumbers;
  static constexpr int MOMENTS = AMSGRAD ? 3 : 2;
  static INLINE void step(const Numbers &h, F g, F &p, F (&x)[3]) {
    step_adam<R, AMSGRAD, FUSED>(h, g, p, x[0], x[1], x[2]);
  }
};
template <bool MOMENTUM> struct Sgd {
  using Numbers = SgdNumbers;
  static constexpr int MOMENTS = MOMENTUM ? 1 : 0;
  static INLINE void step(const Numbers &h, F g, F &p, F (&x)[3]) {
    step_sgd<MOMENTUM>(h, g, p, x[0]);
  }
};

}  // namespace
