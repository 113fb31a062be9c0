// The quads of elements that threads step: their values in memory, and the same values in FP32.
// Compiled after values.cuh and arguments.cuh.

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
