// One optimizer step over pieces of parameters, in a single pass: every value is read and written
// once. A piece is cut into tiles, one for each block of threads. A tile is cut into groups of 32
// elements, and these into quads: a thread, which is a lane of its group, steps one quad at a time.
// When it has decoded the values of a quad, it requests all values of the next one, so that memory
// answers while the thread computes.
//
// Compiled after arguments.cuh, quads.cuh and rules.cuh. Compiler flags change nothing.

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
