// Digests of the leaves of stored arrays, computed while their bytes are in a cache.
//
// A leaf is 1 MiB of one array in one chunk: `offload.format.digests`. Bytes are reported in
// order. A leaf is digested if all of its bytes are reported, one range after the other; the caller
// digests the others itself.

#pragma once

#define XXH_INLINE_ALL
#include "xxhash.h"

#include <cstddef>
#include <cstdint>

namespace {

constexpr size_t LEAF = size_t{1} << 20;

// One stored array of the chunk, as the caller passes it; `Array` in `forms.py`.
struct Array {
  const uint8_t *bytes;  // of the chunk; null if there is no such array
  uint64_t num_bytes;
  uint64_t *digests;  // one for each leaf; null if none are wanted
  uint8_t *is_known;  // set to 1 for each leaf that was digested
};

class Leaves {
 public:
  void begin(const Array &array) {
    array_ = array;
    start_ = stop_ = 0;
    is_open_ = false;
  }

  // Report that the bytes [start, stop) of the array are final.
  void written(const uint8_t *first, size_t num_bytes) {
    if (!array_.digests || !num_bytes) return;
    const size_t start = static_cast<size_t>(first - array_.bytes);
    if (start != stop_) {  // something in between is not stepped here
      digest();
      is_open_ = false;
      start_ = start;
    }
    stop_ = start + num_bytes;
    if (stop_ - start_ >= WORTHWHILE) digest();
  }

  void finish() {
    if (array_.digests) digest();
  }

 private:
  static constexpr size_t WORTHWHILE = 8 << 10;

  // Digest [start_, stop_), as far as it belongs to leaves whose beginning was reported.
  void digest() {
    while (start_ < stop_) {
      const size_t number = start_ / LEAF;
      const size_t whole = (number + 1) * LEAF;
      const size_t end = whole < array_.num_bytes ? whole : array_.num_bytes;
      const size_t now = stop_ < end ? stop_ : end;
      if (start_ % LEAF == 0) {
        XXH3_64bits_reset(&state_);
        is_open_ = true;
      }
      if (is_open_) {
        XXH3_64bits_update(&state_, array_.bytes + start_, now - start_);
        if (now == end) {
          array_.digests[number] = XXH3_64bits_digest(&state_);
          array_.is_known[number] = 1;
          is_open_ = false;
        }
      }
      start_ = now;
    }
  }

  XXH3_state_t state_;
  Array array_;
  size_t start_, stop_;  // bytes that have been reported, and are not digested yet
  bool is_open_;
};

}  // namespace
