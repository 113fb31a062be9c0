// One step of the elements of a chunk: every value is read once and written once.
//
// The interface is plain C, for ctypes: `offload.update.kernel.loading`. Nothing here allocates,
// locks or fails once a call has checked its arguments.

#include "leaves.h"
#include "rules.h"
#include "state.h"

namespace {

constexpr int MAX_MOMENTS = 3;
constexpr int MAX_FACTORS = 4;
constexpr size_t TILE = 4096;  // elements between two looks at the digests

// Distance, in elements, at which memory is requested before it is used. A processor requests
// memory by itself only up to the end of a page, and up to six arrays reach theirs together.
constexpr size_t AHEAD = 512;

enum Rule : uint32_t { SGD, SGD_MOMENTUM, ADAM, ADAM_AMSGRAD };

// Neighbouring elements of one parameter, as the caller passes them; `RUN` in `forms.py`.
// Addresses of arrays are those of the run's first element.
struct Run {
  const uint8_t *gradient;
  uint8_t *live;
  uint8_t *master;  // null for an FP32 parameter
  uint8_t *moments[MAX_MOMENTS];
  uint8_t *scales[MAX_MOMENTS];  // of 8-bit moments
  uint64_t num_elements;
  uint64_t first_element;  // index of the first element within the parameter
  Key keys[MAX_MOMENTS];   // of stochastic rounding
  uint32_t group;
  uint32_t gradient_dtype, live_dtype;
  uint32_t master_form;
};

// One call, as the caller passes it; `Job` in `forms.py`.
struct Job {
  const Run *runs;
  uint64_t num_runs;
  const Group *groups;
  uint64_t num_groups;
  Array masters[2];  // FP32 copies, and lower halves
  Array moments[MAX_MOMENTS];
  Array scales[MAX_MOMENTS];
  float factors[MAX_FACTORS];  // that gradients are multiplied by, one after the other
  uint32_t num_factors;
  uint32_t state;
  uint32_t root;
  uint32_t unused;
};

struct Digests {
  Leaves masters[2], moments[MAX_MOMENTS], scales[MAX_MOMENTS];
};

// Pointers to the element that a group begins with.
struct Place {
  const uint8_t *gradient;
  uint8_t *live;
  uint8_t *master;
  uint8_t *moments[MAX_MOMENTS];
  uint8_t *scales[MAX_MOMENTS];
};

constexpr size_t moment_bytes(State state) {
  return state == STATE_FP32 ? 4 : state == STATE_BF16 ? 2 : 1;
}

INLINE F load_gradient(const Job &job, const Run &run, uint32_t flags, const uint8_t *p, size_t i) {
  F g = load_values(run.gradient_dtype, p, i);
  for (uint32_t k = 0; k < job.num_factors; k++) g = V::mul(g, V::of(job.factors[k]));
  if (flags & MAXIMIZE) g = V::from_bits(V::bit_xor(V::bits(g), V::of_int(SIGN)));
  return g;
}

// Step 32 elements. Fewer are whole in memory, too, but elements from `count` on do not count.
template <class R, State S, bool WHOLE>
INLINE void step_group(const Job &job, const Run &run, const typename R::Numbers &h,
                       const Place &at, size_t i, uint64_t element, size_t count) {
  F scale[MAX_MOMENTS];
  F x[MAX_MOMENTS][GROUP_VECTORS];
  if constexpr (S == STATE_INT8)
    for (int n = 0; n < R::MOMENTS; n++)
      scale[n] = V::of(float_of(static_cast<uint32_t>(as_u16(at.scales[n])[i / GROUP]) << 16));
#pragma GCC unroll 4
  for (int k = 0; k < GROUP_VECTORS; k++) {
    const size_t j = i + k * V::LANES;
    const F g = load_gradient(job, run, h.flags, at.gradient, j);
    F p = load_master(run.master_form, run.live_dtype, at.live, at.master, j);
    F y[MAX_MOMENTS] = {};
    for (int n = 0; n < R::MOMENTS; n++) {
      if constexpr (S == STATE_FP32) y[n] = V::load(as_f32(at.moments[n]) + j);
      if constexpr (S == STATE_BF16) y[n] = load_bf16(as_u16(at.moments[n]) + j);
      if constexpr (S == STATE_INT8)
        y[n] = n == 0 ? decode_signed(at.moments[n] + j, scale[n])
                      : decode_unsigned(at.moments[n] + j, scale[n]);
    }
    R::step(h, g, p, y);
    store_master(run.master_form, run.live_dtype, at.live, at.master, j, p);
    for (int n = 0; n < R::MOMENTS; n++) {
      if constexpr (S == STATE_FP32) V::store(as_f32(at.moments[n]) + j, y[n]);
      if constexpr (S == STATE_BF16)
        store_bf16_at_random(as_u16(at.moments[n]) + j, y[n], element + k * V::LANES, run.keys[n]);
      if constexpr (S == STATE_INT8) {
        if constexpr (!WHOLE) {
          const I lane = V::add_int(V::lanes(), V::of_int(k * V::LANES));
          const Mask counts = V::greater_int(V::of_int(static_cast<uint32_t>(count)), lane);
          y[n] = V::choose(counts, y[n], V::of(0.0f));
        }
        x[n][k] = y[n];
      }
    }
  }
  if constexpr (S == STATE_INT8)
    for (int n = 0; n < R::MOMENTS; n++) {
      uint16_t *to = as_u16(at.scales[n]) + i / GROUP;
      if (n == 0)
        encode_signed(x[n], at.moments[n] + i, to);
      else
        encode_unsigned(x[n], at.moments[n] + i, to);
    }
}

// Step fewer than 32 elements, in copies of the length of a group.
template <class R, State S>
INLINE void step_rest(const Job &job, const Run &run, const typename R::Numbers &h, const Place &at,
                      size_t i, size_t count) {
  alignas(64) uint8_t gradient[GROUP * 4] = {}, live[GROUP * 4] = {}, master[GROUP * 4] = {};
  alignas(64) uint8_t moments[MAX_MOMENTS][GROUP * 4] = {};
  constexpr size_t BYTES = moment_bytes(S);
  const size_t g_bytes = size_of(run.gradient_dtype), l_bytes = size_of(run.live_dtype);
  const size_t m_bytes = run.master_form == FULL ? 4 : run.master_form == SPLIT ? 2 : 0;
  memcpy(gradient, at.gradient + i * g_bytes, count * g_bytes);
  memcpy(live, at.live + i * l_bytes, count * l_bytes);
  if (m_bytes) memcpy(master, at.master + i * m_bytes, count * m_bytes);
  Place copy{gradient, live, master, {}, {}};
  for (int n = 0; n < R::MOMENTS; n++) {
    memcpy(moments[n], at.moments[n] + i * BYTES, count * BYTES);
    copy.moments[n] = moments[n];
    if constexpr (S == STATE_INT8) copy.scales[n] = at.scales[n] + i / GROUP * 2;
  }
  step_group<R, S, false>(job, run, h, copy, 0, run.first_element + i, count);
  memcpy(at.live + i * l_bytes, live, count * l_bytes);
  if (m_bytes) memcpy(at.master + i * m_bytes, master, count * m_bytes);
  for (int n = 0; n < R::MOMENTS; n++)
    memcpy(at.moments[n] + i * BYTES, moments[n], count * BYTES);
}

// Request the memory of 32 values, which may be past the end of an array.
INLINE void request(const uint8_t *values, size_t first, size_t bytes_of_value) {
  const uint8_t *begin = values + first * bytes_of_value;
  for (size_t offset = 0; offset < GROUP * bytes_of_value; offset += 64)
    __builtin_prefetch(begin + offset);
}

template <class R, State S> void step_run(const Job &job, const Run &run, Digests &digests) {
  const typename R::Numbers h(job.groups[run.group]);
  Place at{run.gradient, run.live, run.master, {}, {}};
  for (int n = 0; n < R::MOMENTS; n++) {
    at.moments[n] = run.moments[n];
    at.scales[n] = run.scales[n];
  }
  const size_t g_bytes = size_of(run.gradient_dtype), l_bytes = size_of(run.live_dtype);
  const size_t m_bytes = run.master_form == FULL ? 4 : run.master_form == SPLIT ? 2 : 0;
  for (size_t begin = 0; begin < run.num_elements; begin += TILE) {
    const size_t end = begin + TILE < run.num_elements ? begin + TILE : run.num_elements;
    size_t i = begin;
    for (; i + GROUP <= end; i += GROUP) {
      request(at.gradient, i + AHEAD, g_bytes);
      request(at.live, i + AHEAD, l_bytes);
      request(at.master, i + AHEAD, m_bytes);
      for (int n = 0; n < R::MOMENTS; n++) request(at.moments[n], i + AHEAD, moment_bytes(S));
      step_group<R, S, true>(job, run, h, at, i, run.first_element + i, GROUP);
    }
    if (i < end) step_rest<R, S>(job, run, h, at, i, end - i);
    if (m_bytes)
      digests.masters[run.master_form - FULL].written(run.master + begin * m_bytes,
                                                      (end - begin) * m_bytes);
    for (int n = 0; n < R::MOMENTS; n++) {
      constexpr size_t BYTES = moment_bytes(S);
      digests.moments[n].written(run.moments[n] + begin * BYTES, (end - begin) * BYTES);
      if constexpr (S == STATE_INT8)
        digests.scales[n].written(run.scales[n] + begin / GROUP * 2,
                                  (end - begin + GROUP - 1) / GROUP * 2);
    }
  }
}

using Step = void (*)(const Job &, const Run &, Digests &);

template <Root R> Step step_fp32(uint32_t rule) {
  if (rule == ADAM) return step_run<Adam<R, false>, STATE_FP32>;
  if (rule == ADAM_AMSGRAD) return step_run<Adam<R, true>, STATE_FP32>;
  return nullptr;
}

// Compressed state is stepped with a correctly rounded root, like torch's fused steps, so that its
// bytes do not depend on the processor.
template <State S> Step step_compressed(uint32_t rule) {
  if (rule == SGD_MOMENTUM) return step_run<Sgd<true>, S>;
  if (rule == ADAM) return step_run<Adam<CORRECTLY_ROUNDED, false, true>, S>;
  if (rule == ADAM_AMSGRAD) return step_run<Adam<CORRECTLY_ROUNDED, true, true>, S>;
  return nullptr;
}

Step step_for(uint32_t rule, uint32_t state, uint32_t root) {
  if (rule == SGD) return step_run<Sgd<false>, STATE_FP32>;
  if (state == STATE_BF16) return step_compressed<STATE_BF16>(rule);
  if (state == STATE_INT8) return step_compressed<STATE_INT8>(rule);
  if (state != STATE_FP32) return nullptr;
  if (rule == SGD_MOMENTUM) return step_run<Sgd<true>, STATE_FP32>;
  if (root == CORRECTLY_ROUNDED) return step_fp32<CORRECTLY_ROUNDED>(rule);
  if (root == MKL_SSE) return step_fp32<MKL_SSE>(rule);
  if (root == MKL_AVX2) return step_fp32<MKL_AVX2>(rule);
#ifdef __AVX512F__
  if (root == MKL_AVX512) return step_fp32<MKL_AVX512>(rule);
#endif
  return nullptr;
}

int num_moments(uint32_t rule) {
  return rule == SGD ? 0 : rule == SGD_MOMENTUM ? 1 : rule == ADAM ? 2 : 3;
}

bool has_all(const Run &run, uint32_t rule, uint32_t state) {
  if (!run.gradient || !run.live || (run.master_form != OWN && !run.master)) return false;
  for (int n = 0; n < num_moments(rule); n++)
    if (!run.moments[n] || (state == STATE_INT8 && !run.scales[n])) return false;
  return true;
}

bool is_possible(const Job &job) {
  if (job.num_factors > MAX_FACTORS) return false;
  for (uint64_t n = 0; n < job.num_runs; n++) {
    const Run &run = job.runs[n];
    if (run.group >= job.num_groups || run.gradient_dtype > FP16 || run.live_dtype > FP16)
      return false;
    const bool fits = run.master_form == OWN     ? run.live_dtype == FP32
                      : run.master_form == FULL  ? run.live_dtype != FP32
                      : run.master_form == SPLIT ? run.live_dtype == BF16
                                                 : false;
    const uint32_t rule = job.groups[run.group].rule;
    if (!fits || !step_for(rule, job.state, job.root) || !has_all(run, rule, job.state))
      return false;
  }
  return true;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Step all runs of a job. Returns 1, and changes nothing, if a form is not known here, or if a run
// lacks an array that its rule needs.
EXPORT int offload_kernel_update(const Job *job) {
  if (!is_possible(*job)) return 1;
  Digests digests;
  for (int n = 0; n < 2; n++) digests.masters[n].begin(job->masters[n]);
  for (int n = 0; n < MAX_MOMENTS; n++) {
    digests.moments[n].begin(job->moments[n]);
    digests.scales[n].begin(job->scales[n]);
  }
  for (uint64_t n = 0; n < job->num_runs; n++) {
    const Run &run = job->runs[n];
    step_for(job->groups[run.group].rule, job->state, job->root)(*job, run, digests);
  }
  for (int n = 0; n < 2; n++) digests.masters[n].finish();
  for (int n = 0; n < MAX_MOMENTS; n++) {
    digests.moments[n].finish();
    digests.scales[n].finish();
  }
  return 0;
}

// Square roots of n floats, a multiple of 16. Returns 1 if this library lacks the kind.
EXPORT int offload_kernel_roots(uint32_t kind, const float *x, float *out, uint64_t n) {
  F (*root)(F) = kind == CORRECTLY_ROUNDED ? +[](F v) { return square_root<CORRECTLY_ROUNDED>(v); }
                 : kind == MKL_SSE         ? +[](F v) { return square_root<MKL_SSE>(v); }
                 : kind == MKL_AVX2        ? +[](F v) { return square_root<MKL_AVX2>(v); }
#ifdef __AVX512F__
                 : kind == MKL_AVX512 ? +[](F v) { return square_root<MKL_AVX512>(v); }
#endif
                                      : nullptr;
  if (!root) return 1;
  for (uint64_t i = 0; i < n; i += V::LANES) V::store(out + i, root(V::load(x + i)));
  return 0;
}

// Digest of the sources that this library was built from.
EXPORT const char *offload_kernel_source() { return SOURCE_DIGEST; }
