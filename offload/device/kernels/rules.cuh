// The rules: `prepare` computes values once per thread, `step` updates one element. Every operation
// rounds once, as its name says. Compiled after quads.cuh.

#if RULE != SGD && ARITHMETIC == FUSED
HIDDEN void prepare(const Arguments &a, float *h) {
  for (int i = 0; i < 5; i++) h[i] = a.hyper[i];
  const float step = a.hyper[5];
  const float correction1 = __fadd_rn(1.0f, -powf(h[1], step));
  h[5] = __fsqrt_rn(__fadd_rn(1.0f, -powf(h[2], step)));
  h[6] = __fdiv_rn(h[0], correction1);
}
#else
HIDDEN void prepare(const Arguments &a, float *h) {
  for (int i = 0; i < 7; i++) h[i] = a.hyper[i];
}
#endif

#if RULE == SGD && ARITHMETIC == FOREACH
// hyper: weight_decay, momentum, 1 - dampening, -lr
HIDDEN void step(const Arguments &a, const float *h, Lane &lane, int i) {
  const u32 flags = a.flags;
  float g = lane.gradient[i];
  if (flags & DECAY) g = __fmaf_rn(h[0], lane.master[i], g);
#if NUM_MOMENTS
  const float momentum = h[1];
  float &buffer = lane.moments[0][i];
  if (flags & IS_NEW)
    buffer = g;
  else
    buffer = __fmaf_rn(h[2], g, __fmul_rn(buffer, momentum));
  g = flags & NESTEROV ? __fmaf_rn(momentum, buffer, g) : buffer;
#endif
  lane.master[i] = __fmaf_rn(h[3], g, lane.master[i]);
}
#elif RULE == SGD
// Computes in FP64, like torch's kernel. hyper: weight_decay, momentum, dampening, lr
HIDDEN void step(const Arguments &a, const float *h, Lane &lane, int i) {
  const u32 flags = a.flags;
  const double p = (double)lane.master[i];
  float g = lane.gradient[i];
  if (flags & DECAY) g = __double2float_rn(__fma_rn(a.wide_hyper[0], p, (double)g));
#if NUM_MOMENTS
  double buffer = (double)g;
  if (!(flags & IS_NEW))
    buffer = __fma_rn(__dadd_rn(1.0, -a.wide_hyper[2]), (double)g,
                      __dmul_rn(a.wide_hyper[1], (double)lane.moments[0][i]));
  lane.moments[0][i] = __double2float_rn(buffer);
  g = __double2float_rn(flags & NESTEROV ? __fma_rn(a.wide_hyper[1], buffer, (double)g) : buffer);
#endif
  const double change = __dmul_rn(a.wide_hyper[3], (double)g);
  lane.master[i] = __double2float_rn(__dadd_rn(p, flags & MAXIMIZE ? change : -change));
}
#elif ARITHMETIC == FOREACH
// hyper: weight_decay (ADAMW: 1 - lr * weight_decay, or 1), 1 - beta1, beta2, 1 - beta2,
//        sqrt(1 - beta2**step), eps, -lr / (1 - beta1**step)
HIDDEN void step(const Arguments &a, const float *h, Lane &lane, int i) {
  const float weight = h[1], value = h[3], size = h[6];
  float g = lane.gradient[i], p = lane.master[i];
  if (RULE == ADAMW)
    p = __fmul_rn(p, h[0]);
  else if (a.flags & DECAY)
    g = __fmaf_rn(h[0], p, g);
  float &average = lane.moments[0][i], &square = lane.moments[1][i];
  // From the average towards the gradient, or back from the gradient, as torch's lerp.
  const bool is_near = weight < 0.5f && weight > -0.5f;
  const float share = is_near ? weight : -__fadd_rn(1.0f, -weight);
  average = __fmaf_rn(share, __fadd_rn(g, -average), is_near ? average : g);
  square = __fmul_rn(square, h[2]);
  // torch treats 1 as no factor at all, and then rounds once less.
  square = value == 1.0f ? __fmaf_rn(g, g, square) : __fmaf_rn(value, __fmul_rn(g, g), square);
  float root = square;
#if NUM_MOMENTS == 3
  float &largest = lane.moments[2][i];
  if (is_nan(square) || largest < square) largest = square;
  root = largest;
#endif
  root = __fadd_rn(__fdiv_rn(__fsqrt_rn(root), h[4]), h[5]);
  lane.master[i] = __fmaf_rn(size, __fdiv_rn(average, root), p);
}
#else
// hyper: lr, beta1, beta2, weight_decay, eps, step
// h: the same up to eps, then sqrt(1 - beta2**step) and lr / (1 - beta1**step)
HIDDEN void step(const Arguments &a, const float *h, Lane &lane, int i) {
  const float beta1 = h[1], beta2 = h[2];
  float g = lane.gradient[i], p = lane.master[i];
  if (a.flags & DECAY) {
    if (RULE == ADAMW)
      p = __fmaf_rn(-__fmul_rn(h[0], h[3]), p, p);
    else
      g = __fmaf_rn(p, h[3], g);
  }
  float &average = lane.moments[0][i], &square = lane.moments[1][i];
  average = __fmaf_rn(beta1, average, __fmaf_rn(-beta1, g, g));
  const float gg = __fmul_rn(g, g);
  square = __fmaf_rn(beta2, square, __fmaf_rn(-beta2, gg, gg));
  float root = square;
#if NUM_MOMENTS == 3
  float &largest = lane.moments[2][i];
  if (largest < square) largest = square;
  root = largest;
#endif
  root = __fadd_rn(__fdiv_rn(__fsqrt_rn(root), h[5]), h[4]);
  lane.master[i] = __fadd_rn(p, -__fdiv_rn(__fmul_rn(h[6], average), root));
}
#endif
