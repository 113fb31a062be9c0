// One optimizer step over a flat block, in a single pass: every value is read and written once.
// Compiled after values.cuh. These macros select a variant (forms.py sets them):
//
//   RULE        SGD, ADAM or ADAMW
//   ARITHMETIC  FOREACH or FUSED: operations and their order
//   LIVE, GRADIENT   FLOAT32, BFLOAT16 or FLOAT16
//   MASTER      OWN (the live parameter is FP32), FULL or SPLIT
//   STATE       FLOAT32, BFLOAT16 (stochastically rounded) or INT8 (blocks of 32)
//   NUM_MOMENTS 0 to 3: exp_avg or momentum_buffer, exp_avg_sq, max_exp_avg_sq
//
// Every operation rounds once, as its name says. Compiler flags change nothing.

#define SGD 0
#define ADAM 1
#define ADAMW 2
#define FOREACH 0
#define FUSED 1
#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2
#define INT8 3
#define OWN 0
#define FULL 1
#define SPLIT 2

#define QUAD 4
#define GROUP 8  /* lanes that share a scale: 8 quads are a block of 32 */

#define IS_NEW 1u      /* there is no state yet */
#define MAXIMIZE 2u
#define NESTEROV 4u
#define DECAY 8u       /* weight_decay is not zero */
#define ALIGNED 16u    /* every array is aligned to its quads */

struct Arguments {
  u64 num_elements;
  u64 first_element;  // index that stochastic rounding depends on, counted as its keys are
  const void *gradient;
  void *live;
  void *master;  // FULL: FP32; SPLIT: the lower halves
  void *moments[3];
  u16 *scales[3];
  const float *inverse_scale;  // each of these three may be null
  const float *clip;
  const float *found_inf;
  double hyper[8];
  u32 keys[6];  // keys of stochastic rounding: two words for each array
  u32 flags;
  u32 unused;
};

#ifdef __CUDACC__
// A thread is one lane. 8 neighbours of a warp are a group and run in step with one another.
#define LANES 1
#define FOR_LANES(l) for (int l = 0; l < LANES; l++)
#define LANE_INDEX(l) (threadIdx.x % GROUP)

HIDDEN u32 group_max(const u32 *values) {
  const u32 group = 0xFFu << (threadIdx.x & 24);
  u32 largest = values[0];
  for (int distance = 1; distance < GROUP; distance *= 2) {
    const u32 other = __shfl_xor_sync(group, largest, distance);
    if (other > largest) largest = other;
  }
  return largest;
}
#endif

// Elements of one lane.
struct Lane {
  u64 first;
  int num;     // elements of its quad that exist, 0 to 4
  bool whole;  // whether all exist and every array is aligned
  float master[QUAD];
  float gradient[QUAD];
  float moments[3][QUAD];
  u16 live[QUAD];
};

// Loads and stores of a quad: in one access if it is whole and aligned, else element by element.
// Loops run over all four elements, so that arrays stay in registers.

#define EACH(i) _Pragma("unroll") for (int i = 0; i < QUAD; i++)

HIDDEN void load_words(const void *from, const Lane &lane, u32 *out) {
  const u32 *words = (const u32 *)from + lane.first;
  if (lane.whole) {
    const uint4 quad = *(const uint4 *)words;
    out[0] = quad.x, out[1] = quad.y, out[2] = quad.z, out[3] = quad.w;
  } else {
    EACH(i) out[i] = i < lane.num ? words[i] : 0;
  }
}

HIDDEN void store_words(void *to, const Lane &lane, const u32 *in) {
  u32 *words = (u32 *)to + lane.first;
  if (lane.whole) {
    *(uint4 *)words = make_uint4(in[0], in[1], in[2], in[3]);
  } else {
    EACH(i) if (i < lane.num) words[i] = in[i];
  }
}

HIDDEN void load_halves(const void *from, const Lane &lane, u16 *out) {
  const u16 *halves = (const u16 *)from + lane.first;
  if (lane.whole) {
    const uint2 quad = *(const uint2 *)halves;
    out[0] = (u16)quad.x, out[1] = (u16)(quad.x >> 16);
    out[2] = (u16)quad.y, out[3] = (u16)(quad.y >> 16);
  } else {
    EACH(i) out[i] = i < lane.num ? halves[i] : 0;
  }
}

HIDDEN void store_halves(void *to, const Lane &lane, const u16 *in) {
  u16 *halves = (u16 *)to + lane.first;
  if (lane.whole) {
    *(uint2 *)halves = make_uint2(in[0] | (u32)in[1] << 16, in[2] | (u32)in[3] << 16);
  } else {
    EACH(i) if (i < lane.num) halves[i] = in[i];
  }
}

HIDDEN void load_bytes(const void *from, const Lane &lane, u8 *out) {
  const u8 *bytes = (const u8 *)from + lane.first;
  if (lane.whole) {
    const u32 quad = *(const u32 *)bytes;
    EACH(i) out[i] = (u8)(quad >> 8 * i);
  } else {
    EACH(i) out[i] = i < lane.num ? bytes[i] : 0;
  }
}

HIDDEN void store_bytes(void *to, const Lane &lane, const u8 *in) {
  u8 *bytes = (u8 *)to + lane.first;
  if (lane.whole) {
    *(u32 *)bytes = in[0] | (u32)in[1] << 8 | (u32)in[2] << 16 | (u32)in[3] << 24;
  } else {
    EACH(i) if (i < lane.num) bytes[i] = in[i];
  }
}

HIDDEN void load_floats(const void *from, const Lane &lane, int dtype, float *out) {
  if (dtype == FLOAT32) {
    u32 words[QUAD];
    load_words(from, lane, words);
    EACH(i) out[i] = __uint_as_float(words[i]);
  } else {
    u16 halves[QUAD];
    load_halves(from, lane, halves);
    EACH(i) out[i] = dtype == BFLOAT16 ? from_bfloat16(halves[i]) : from_float16(halves[i]);
  }
}

HIDDEN void store_floats(void *to, const Lane &lane, const float *in) {
  u32 words[QUAD];
  EACH(i) words[i] = __float_as_uint(in[i]);
  store_words(to, lane, words);
}

// The rules: `prepare` computes values once per thread, `step` updates one element.

#if RULE != SGD && ARITHMETIC == FUSED
HIDDEN void prepare(const Arguments &a, float *h) {
  for (int i = 0; i < 5; i++) h[i] = (float)a.hyper[i];
  const float step = (float)a.hyper[5];
  const float correction1 = __fadd_rn(1.0f, -powf(h[1], step));
  h[5] = __fsqrt_rn(__fadd_rn(1.0f, -powf(h[2], step)));
  h[6] = __fdiv_rn(h[0], correction1);
}
#else
HIDDEN void prepare(const Arguments &a, float *h) {
  for (int i = 0; i < 7; i++) h[i] = (float)a.hyper[i];
}
#endif

#if RULE == SGD && ARITHMETIC == FOREACH
// hyper: weight_decay, momentum, 1 - dampening, -lr
HIDDEN void step(const Arguments &a, const float *h, Lane &lane, int i) {
  const u32 flags = a.flags;
  float g = lane.gradient[i];
  if (flags & MAXIMIZE) g = -g;
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
  if (flags & DECAY) g = __double2float_rn(__fma_rn(a.hyper[0], p, (double)g));
#if NUM_MOMENTS
  double buffer = (double)g;
  if (!(flags & IS_NEW))
    buffer = __fma_rn(__dadd_rn(1.0, -a.hyper[2]), (double)g,
                      __dmul_rn(a.hyper[1], (double)lane.moments[0][i]));
  lane.moments[0][i] = __double2float_rn(buffer);
  g = __double2float_rn(flags & NESTEROV ? __fma_rn(a.hyper[1], buffer, (double)g) : buffer);
#endif
  const double change = __dmul_rn(a.hyper[3], (double)g);
  lane.master[i] = __double2float_rn(__dadd_rn(p, flags & MAXIMIZE ? change : -change));
}
#elif ARITHMETIC == FOREACH
// hyper: weight_decay (ADAMW: 1 - lr * weight_decay), 1 - beta1, beta2, 1 - beta2,
//        sqrt(1 - beta2**step), eps, -lr / (1 - beta1**step)
HIDDEN void step(const Arguments &a, const float *h, Lane &lane, int i) {
  const float weight = h[1], value = h[3], size = h[6];
  float g = lane.gradient[i], p = lane.master[i];
  if (a.flags & MAXIMIZE) g = -g;
  if (a.flags & DECAY) {
    if (RULE == ADAMW)
      p = __fmul_rn(p, h[0]);
    else
      g = __fmaf_rn(h[0], p, g);
  }
  float &average = lane.moments[0][i], &square = lane.moments[1][i];
  const float way = __fadd_rn(g, -average);
  average = weight < 0.5f && weight > -0.5f ? __fmaf_rn(weight, way, average)
                                            : __fmaf_rn(-way, __fadd_rn(1.0f, -weight), g);
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
  if (a.flags & MAXIMIZE) g = -g;
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

HIDDEN void load(const Arguments &a, u64 group, Lane &lane) {
  const bool is_new = a.flags & IS_NEW;
  load_floats(a.gradient, lane, GRADIENT, lane.gradient);
  if (a.inverse_scale) {
    const float factor = *a.inverse_scale;
    EACH(i) lane.gradient[i] = __fmul_rn(lane.gradient[i], factor);
  }
  if (a.clip) {
    const float factor = *a.clip;
    EACH(i) lane.gradient[i] = __fmul_rn(lane.gradient[i], factor);
  }
#if MASTER == OWN
  load_floats(a.live, lane, FLOAT32, lane.master);
#else
  load_halves(a.live, lane, lane.live);
  float live[QUAD];
  EACH(i) live[i] = LIVE == BFLOAT16 ? from_bfloat16(lane.live[i]) : from_float16(lane.live[i]);
  if (is_new) {
    EACH(i) lane.master[i] = live[i];
  } else {
#if MASTER == SPLIT
    u16 low[QUAD];
    load_halves(a.master, lane, low);
    EACH(i) lane.master[i] = join_master(lane.live[i], (short)low[i]);
#else
    load_floats(a.master, lane, FLOAT32, lane.master);
    EACH(i) {
      const float m = lane.master[i];
      const u16 rounded = LIVE == BFLOAT16 ? to_bfloat16(m) : to_float16(m);
      // The parameter has been edited since the last step: the live value wins.
      if (rounded != lane.live[i]) lane.master[i] = live[i];
    }
#endif
  }
#endif
#pragma unroll
  for (int k = 0; k < NUM_MOMENTS; k++) {
    float *moment = lane.moments[k];
    if (is_new) {
      EACH(i) moment[i] = 0.0f;
      continue;
    }
#if STATE == INT8
    u8 codes[QUAD];
    load_bytes(a.moments[k], lane, codes);
    const u16 scale = a.scales[k][group];
    EACH(i) moment[i] = k == 0 ? decode_signed(codes[i], scale) : decode_unsigned(codes[i], scale);
#else
    load_floats(a.moments[k], lane, STATE, moment);
#endif
  }
}

HIDDEN void store(const Arguments &a, Lane &lane) {
#if MASTER == OWN
  store_floats(a.live, lane, lane.master);
#elif MASTER == SPLIT
  u16 low[QUAD];
  EACH(i) split_master(lane.master[i], &lane.live[i], &low[i]);
  store_halves(a.master, lane, low);
  store_halves(a.live, lane, lane.live);
#else
  EACH(i) {
    const float m = lane.master[i];
    lane.live[i] = LIVE == BFLOAT16 ? to_bfloat16(m) : to_float16(m);
  }
  store_floats(a.master, lane, lane.master);
  store_halves(a.live, lane, lane.live);
#endif
#pragma unroll
  for (int k = 0; k < NUM_MOMENTS; k++) {
#if STATE == FLOAT32
    store_floats(a.moments[k], lane, lane.moments[k]);
#elif STATE == BFLOAT16
    u16 halves[QUAD];
    EACH(i) halves[i] = round_stochastic(
        lane.moments[k][i], a.first_element + lane.first + i, a.keys[2 * k], a.keys[2 * k + 1]);
    store_halves(a.moments[k], lane, halves);
#endif
  }
}

#if STATE == INT8
HIDDEN void store_blocks(const Arguments &a, u64 group, const Lane *lanes) {
#pragma unroll
  for (int k = 0; k < NUM_MOMENTS; k++) {
    u32 largest[LANES];
    FOR_LANES(l) {
      largest[l] = 0;
      EACH(i) {
        const float value = lanes[l].moments[k][i];
        const u32 size = k == 0 ? size_signed(value) : size_unsigned(value);
        if (i < lanes[l].num && size > largest[l]) largest[l] = size;
      }
    }
    const u16 scale = round_scale(group_max(largest), k == 0);
    FOR_LANES(l) {
      u8 codes[QUAD];
      EACH(i) {
        const float value = lanes[l].moments[k][i];
        codes[i] = k == 0 ? encode_signed(value, scale) : encode_unsigned(value, scale);
      }
      store_bytes(a.moments[k], lanes[l], codes);
      if (LANE_INDEX(l) == 0) a.scales[k][group] = scale;
    }
  }
}
#endif

// Updates the quads of 8 lanes: a block of 32 elements, or the rest of one. Lanes without elements
// take part with zeros.
HIDDEN void update_group(const Arguments &a, const float *h, u64 group) {
  const bool skip = a.found_inf && *a.found_inf != 0.0f;
  if (skip && !(a.flags & IS_NEW)) return;
  const u64 first = group * (QUAD * GROUP);
  Lane lanes[LANES];
  FOR_LANES(l) {
    Lane &lane = lanes[l];
    lane.first = first + QUAD * LANE_INDEX(l);
    const u64 left = lane.first < a.num_elements ? a.num_elements - lane.first : 0;
    lane.num = left < QUAD ? (int)left : QUAD;
    lane.whole = lane.num == QUAD && a.flags & ALIGNED;
    load(a, group, lane);
    if (!skip) {
      EACH(i) step(a, h, lane, i);
    }
    store(a, lane);
  }
#if STATE == INT8
  store_blocks(a, group, lanes);
#endif
}

#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__(256) update(const Arguments a) {
  const u64 num_groups = (a.num_elements + QUAD * GROUP - 1) / (QUAD * GROUP);
  const u64 stride = (u64)gridDim.x * blockDim.x / GROUP;
  float h[7];
  prepare(a, h);
  for (u64 g = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / GROUP; g < num_groups; g += stride)
    update_group(a, h, g);
}
#endif
