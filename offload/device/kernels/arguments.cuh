// The variants of the update kernel, and the arguments of a launch: launches.py has the same layout.
//
// These macros select a variant (forms.py sets them):
//
//   RULE        SGD, ADAM or ADAMW
//   ARITHMETIC  FOREACH or FUSED: operations and their order
//   LIVE, GRADIENT   FLOAT32, BFLOAT16 or FLOAT16
//   MASTER      OWN (the live parameter is FP32), FULL or SPLIT
//   STATE       FLOAT32, BFLOAT16 (stochastically rounded) or INT8 (blocks of 32)
//   NUM_MOMENTS 0 to 3: exp_avg or momentum_buffer, exp_avg_sq, max_exp_avg_sq

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
