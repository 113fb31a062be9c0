// One optimizer step over pieces of parameters, in a single pass: every value is read and written
// once. A piece is cut into tiles, one for each block of threads. A tile is cut into groups of 32
// elements, and these into quads: a thread, which is a lane of its group, steps one quad at a time.
// When it has decoded the values of a quad, it requests all values of the next one, so that memory
// answers while the thread computes.
//
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
#define BLOCK (QUAD * GROUP)
#define TURN (BLOCK * 32)  /* elements that a block of 256 threads steps at a time */

#define IS_NEW 1u      /* there was no state yet: the arrays have been set to zeros */
#define MAXIMIZE 2u    /* fused SGD only: elsewhere, the first factor is negative */
#define NESTEROV 4u
#define DECAY 8u       /* weight_decay is not zero */
#define SCALED 16u     /* gradients are multiplied by the first factor, and then by the second */

#define MAX_PIECES 48

#define LIVE_BYTES (LIVE == FLOAT32 ? 4 : 2)
#define GRADIENT_BYTES (GRADIENT == FLOAT32 ? 4 : 2)
#define MASTER_BYTES (MASTER == FULL ? 4 : 2)
#define MOMENT_BYTES (STATE == FLOAT32 ? 4 : STATE == BFLOAT16 ? 2 : 1)

// Neighbouring elements of one parameter.
struct Piece {
  void *live;
  const void *gradient;
  u64 num_elements;
  u64 first_element;  // index that stochastic rounding depends on, counted as its keys are
  u64 at;             // index of its first element in the arrays of the state
  u32 scale_at;       // index of its first block in the scales
  u32 first_tile;     // number of tiles before it
  u32 keys[6];        // keys of stochastic rounding: two words for each array
  u32 aligned;        // whether every array is aligned to its quads
  u32 unused;
};

struct Arguments {
  void *master;  // FULL: FP32; SPLIT: the lower halves
  void *moments[3];
  u16 *scales[3];
  float hyper[8];
  double wide_hyper[4];  // fused SGD only
  float factors[2];
  u32 flags;
  u32 num_pieces;
  u32 groups_per_tile;
  u32 unused;
  Piece pieces[MAX_PIECES];
};

#ifdef __CUDACC__
// A thread is one lane. 8 neighbours of a warp are a group. All threads of a block take the same
// number of turns, so that a warp is whole wherever its lanes exchange values.
#define LANES 1
#define FOR_LANES(l) for (int l = 0; l < LANES; l++)
#define FIRST_OF(offset) (int)((offset) * BLOCK + threadIdx.x % GROUP * QUAD)
#define OF_LANE(at, l) (at)

HIDDEN u32 group_max(const u32 *values) {
  u32 largest = values[0];
  for (int distance = 1; distance < GROUP; distance *= 2) {
    const u32 other = __shfl_xor_sync(0xFFFFFFFF, largest, distance);
    if (other > largest) largest = other;
  }
  return largest;
}
#endif

// Values that a thread computes once.
struct Constants {
  float hyper[7];
  const float *quotients;  // `signed_quotient` of all codes; INT8 only
};

// What is left of a piece from the first element of a tile on. Elements are counted from there, so
// that their numbers have 32 bits.
struct Rest {
  const Piece &piece;
  u8 *live;
  const u8 *gradient;
  u8 *master;
  u8 *moments[3];
  u16 *scales[3];
  u32 pair, is_odd;  // half of the first element's index, rounded down, and the rest
  int num;           // elements that exist
  int num_whole;     // so many of them are in whole quads of aligned arrays
};

// The stored values of one quad, as they are in memory.
struct Raw {
  u32 live[LIVE_BYTES], gradient[GRADIENT_BYTES], master[MASTER_BYTES];
  u32 moments[3][MOMENT_BYTES];
  u16 scales[3];
};

// The same in FP32.
struct Lane {
  float master[QUAD], gradient[QUAD], moments[3][QUAD];
};

#define EACH(i) _Pragma("unroll") for (int i = 0; i < QUAD; i++)
#define EACH_MOMENT(k) _Pragma("unroll") for (int k = 0; k < NUM_MOMENTS; k++)

// Loads and stores of a quad: in one access if it is whole, else element by element. A quad of
// values of BYTES bytes is BYTES words. Loops run over all elements, so that words stay in registers.

template <int BYTES, bool WHOLE>
HIDDEN void load_quad(const u8 *from, int at, int num, u32 *words) {
  const u8 *start = from + (long long)at * BYTES;
  if (WHOLE && BYTES == 4) {
    const uint4 quad = *(const uint4 *)start;
    words[0] = quad.x, words[1] = quad.y, words[BYTES - 2] = quad.z, words[BYTES - 1] = quad.w;
  } else if (WHOLE && BYTES == 2) {
    const uint2 quad = *(const uint2 *)start;
    words[0] = quad.x, words[BYTES - 1] = quad.y;
  } else if (WHOLE) {
    words[0] = *(const u32 *)start;
  } else {
    EACH(i) if (i < BYTES) words[i] = 0;
    EACH(i) if (i < num) {
      if (BYTES == 4) words[i % BYTES] = ((const u32 *)start)[i];
      if (BYTES == 2) words[i / 2 % BYTES] |= (u32)((const u16 *)start)[i] << 16 * (i % 2);
      if (BYTES == 1) words[0] |= (u32)start[i] << 8 * i;
    }
  }
}

template <int BYTES, bool WHOLE>
HIDDEN void store_quad(u8 *to, int at, int num, const u32 *words) {
  u8 *start = to + (long long)at * BYTES;
  if (WHOLE && BYTES == 4) {
    *(uint4 *)start = make_uint4(words[0], words[1], words[BYTES - 2], words[BYTES - 1]);
  } else if (WHOLE && BYTES == 2) {
    *(uint2 *)start = make_uint2(words[0], words[BYTES - 1]);
  } else if (WHOLE) {
    *(u32 *)start = words[0];
  } else {
    EACH(i) if (i < num) {
      if (BYTES == 4) ((u32 *)start)[i] = words[i % BYTES];
      if (BYTES == 2) ((u16 *)start)[i] = (u16)(words[i / 2 % BYTES] >> 16 * (i % 2));
      if (BYTES == 1) start[i] = (u8)(words[0] >> 8 * i);
    }
  }
}

template <bool WHOLE>
HIDDEN void load_quads(const Rest &rest, int at, Raw &raw) {
  const int num = rest.num - at;
  load_quad<GRADIENT_BYTES, WHOLE>(rest.gradient, at, num, raw.gradient);
  load_quad<LIVE_BYTES, WHOLE>(rest.live, at, num, raw.live);
#if MASTER != OWN
  load_quad<MASTER_BYTES, WHOLE>(rest.master, at, num, raw.master);
#endif
  EACH_MOMENT(k) load_quad<MOMENT_BYTES, WHOLE>(rest.moments[k], at, num, raw.moments[k]);
}

// Requests all values of the quad that begins at an element, and uses none.
HIDDEN void load(const Rest &rest, int at, Raw &raw) {
  if (at < rest.num_whole)
    load_quads<true>(rest, at, raw);
  else
    load_quads<false>(rest, at, raw);
#if STATE == INT8
  EACH_MOMENT(k) raw.scales[k] = at < rest.num ? rest.scales[k][at / BLOCK] : 0;
#endif
}

// Stored forms to FP32 and back.

HIDDEN void from_halves(const u32 *words, int dtype, float *values) {
  for (int i = 0; i < 2; i++) {
    if (dtype == BFLOAT16) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000);
    } else {
      values[2 * i] = from_float16((u16)words[i]);
      values[2 * i + 1] = from_float16((u16)(words[i] >> 16));
    }
  }
}

HIDDEN void to_halves(const float *values, int dtype, u32 *words) {
  for (int i = 0; i < 2; i++)
    words[i] = dtype == BFLOAT16 ? to_bfloat16s(values[2 * i], values[2 * i + 1])
                                 : to_float16s(values[2 * i], values[2 * i + 1]);
}

HIDDEN void from_words(const u32 *words, int dtype, float *values) {
  if (dtype == FLOAT32) {
    EACH(i) values[i] = __uint_as_float(words[i]);
  } else {
    from_halves(words, dtype, values);
  }
}

HIDDEN void unpack(const Arguments &a, const Constants &c, const Raw &raw, Lane &lane) {
  from_words(raw.gradient, GRADIENT, lane.gradient);
  if (a.flags & SCALED) {
    EACH(i) lane.gradient[i] = __fmul_rn(__fmul_rn(lane.gradient[i], a.factors[0]), a.factors[1]);
  }
#if MASTER == OWN
  from_words(raw.live, FLOAT32, lane.master);
#elif MASTER == SPLIT
  for (int i = 0; i < 2; i++) join_masters(raw.live[i], raw.master[i], lane.master + 2 * i);
#else
  u32 rounded[2];
  from_words(raw.master, FLOAT32, lane.master);
  to_halves(lane.master, LIVE, rounded);
  if (rounded[0] != raw.live[0] || rounded[1] != raw.live[1]) {
    // Parameters that have been edited since the last step, or that have no state yet: their live
    // values win.
    float live[QUAD];
    from_words(raw.live, LIVE, live);
    EACH(i) {
      const u32 changed = rounded[i / 2] ^ raw.live[i / 2];
      if (i % 2 ? changed >> 16 : changed & 0xFFFF) lane.master[i] = live[i];
    }
  }
#endif
  EACH_MOMENT(k) {
    float *moment = lane.moments[k];
#if STATE == INT8
    if (k == 0)
      decode_signed(raw.moments[k][0], raw.scales[k], c.quotients, moment);
    else
      decode_unsigned(raw.moments[k][0], raw.scales[k], moment);
#else
    from_words(raw.moments[k], STATE, moment);
#endif
  }
}

// The new values of a quad, in place of the old ones.
HIDDEN void pack(const Rest &rest, int at, const Lane &lane, Raw &raw) {
#if MASTER == OWN
  EACH(i) raw.live[i] = __float_as_uint(lane.master[i]);
#elif MASTER == SPLIT
  split_masters(lane.master, raw.live, raw.master);
#else
  to_halves(lane.master, LIVE, raw.live);
  EACH(i) raw.master[i] = __float_as_uint(lane.master[i]);
#endif
  EACH_MOMENT(k) {
#if STATE == FLOAT32
    EACH(i) raw.moments[k][i] = __float_as_uint(lane.moments[k][i]);
#elif STATE == BFLOAT16
    round_stochastic(lane.moments[k], rest.pair + at / 2, rest.is_odd, rest.piece.keys[2 * k],
                     rest.piece.keys[2 * k + 1], raw.moments[k]);
#endif
  }
}

#if STATE == INT8
// Encodes the block of 32 of a group, which has one scale for each array.
HIDDEN void pack_blocks(const Rest &rest, int at, const Lane *lanes, Raw *raws) {
  EACH_MOMENT(k) {
    u32 sizes[LANES];
    FOR_LANES(l) {
      sizes[l] = 0;
      EACH(i) {
        const float value = lanes[l].moments[k][i];
        const u32 size = k == 0 ? size_signed(value) : size_unsigned(value);
        if (size > sizes[l]) sizes[l] = size;
      }
    }
    const u32 largest = group_max(sizes);
    const u16 scale = k == 0 ? scale_signed(largest) : scale_unsigned(largest);
    FOR_LANES(l) {
      raws[l].moments[k][0] = k == 0 ? encode_signed(lanes[l].moments[k], largest, scale)
                                     : encode_unsigned(lanes[l].moments[k], largest, scale);
      const int own = OF_LANE(at, l);
      if (own % BLOCK == 0 && own < rest.num) rest.scales[k][own / BLOCK] = scale;
    }
  }
}
#endif

template <bool WHOLE>
HIDDEN void store_quads(const Rest &rest, int at, const Raw &raw) {
  const int num = rest.num - at;
  store_quad<LIVE_BYTES, WHOLE>(rest.live, at, num, raw.live);
#if MASTER != OWN
  store_quad<MASTER_BYTES, WHOLE>(rest.master, at, num, raw.master);
#endif
  EACH_MOMENT(k) store_quad<MOMENT_BYTES, WHOLE>(rest.moments[k], at, num, raw.moments[k]);
}

// The rules: `prepare` computes values once per thread, `step` updates one element.

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

HIDDEN void load_group(const Rest &rest, int at, Raw *raws) {
  FOR_LANES(l) load(rest, OF_LANE(at, l), raws[l]);
}

// Steps the quads of 8 lanes: a block of 32 elements, or the rest of one. Lanes without elements
// take part with zeros. `at` is the first element of the calling thread; see OF_LANE.
HIDDEN void step_group(const Arguments &a, const Constants &c, const Rest &rest, int at,
                       Raw *raws, bool is_last, Raw *next) {
  Lane lanes[LANES];
  FOR_LANES(l) unpack(a, c, raws[l], lanes[l]);
  if (!is_last) load_group(rest, at + TURN, next);
  FOR_LANES(l) {
    const int own = OF_LANE(at, l);
    EACH(i) step(a, c.hyper, lanes[l], i);
#if STATE == INT8
    if (own >= rest.num_whole) {
      EACH_MOMENT(k) EACH(i) if (i >= rest.num - own) lanes[l].moments[k][i] = 0.0f;
    }
#endif
    pack(rest, own, lanes[l], raws[l]);
  }
#if STATE == INT8
  pack_blocks(rest, at, lanes, raws);
#endif
  FOR_LANES(l) {
    const int own = OF_LANE(at, l);
    if (own < rest.num_whole)
      store_quads<true>(rest, own, raws[l]);
    else
      store_quads<false>(rest, own, raws[l]);
  }
}

// Returns the piece that a tile is of.
HIDDEN u32 piece_of(const Arguments &a, u32 tile) {
  u32 first = 0, last = a.num_pieces - 1;
  while (first < last) {
    const u32 middle = (first + last + 1) / 2;
    if (a.pieces[middle].first_tile <= tile)
      first = middle;
    else
      last = middle - 1;
  }
  return first;
}

HIDDEN Rest rest_of(const Arguments &a, u32 tile) {
  const Piece &piece = a.pieces[piece_of(a, tile)];
  const u64 first = (u64)(tile - piece.first_tile) * a.groups_per_tile * BLOCK;
  const u64 at = piece.at + first, left = piece.num_elements - first;
  Rest rest = {piece};
  rest.live = (u8 *)piece.live + first * LIVE_BYTES;
  rest.gradient = (const u8 *)piece.gradient + first * GRADIENT_BYTES;
  rest.master = (u8 *)a.master + at * MASTER_BYTES;
  EACH_MOMENT(k) {
    rest.moments[k] = (u8 *)a.moments[k] + at * MOMENT_BYTES;
    rest.scales[k] = a.scales[k] + piece.scale_at + first / BLOCK;
  }
  rest.pair = (u32)(piece.first_element + first >> 1);
  rest.is_odd = (u32)piece.first_element & 1;
  const u32 num = a.groups_per_tile * BLOCK;
  rest.num = left < num ? (int)left : (int)num;
  rest.num_whole = piece.aligned ? rest.num / QUAD * QUAD : 0;
  return rest;
}

// Steps every 32nd group of a tile, from the one numbered `offset` on. All threads of a block take
// as many turns; groups after the end of the piece have no elements.
HIDDEN void update_tile(const Arguments &a, Constants &c, u32 tile, u32 offset) {
  const Rest rest = rest_of(a, tile);
  int at = FIRST_OF(offset), left = rest.num;
  Raw one[LANES], other[LANES];
  load_group(rest, at, one);
  prepare(a, c.hyper);  // while memory answers
  // Two turns: what has been requested stays in the registers in which it arrives.
  while (true) {
    left -= TURN;
    step_group(a, c, rest, at, one, left <= 0, other);
    if (left <= 0) return;
    at += TURN;
    left -= TURN;
    step_group(a, c, rest, at, other, left <= 0, one);
    if (left <= 0) return;
    at += TURN;
  }
}

#ifdef __CUDACC__
// Blocks that a multiprocessor runs at once, which limits registers. Three moments in 8 bits need
// more than a third of them.
#define MIN_BLOCKS (STATE == INT8 && NUM_MOMENTS == 3 ? 2 : 3)

extern "C" __global__ void __launch_bounds__(256, MIN_BLOCKS)
    update(const __grid_constant__ Arguments a) {
  Constants c;
#if STATE == INT8
  __shared__ float quotients[256];
  if (threadIdx.x < 256) quotients[threadIdx.x] = signed_quotient(threadIdx.x);
  __syncthreads();
  c.quotients = quotients;
#endif
  update_tile(a, c, blockIdx.x, threadIdx.x / GROUP);
}
#endif
