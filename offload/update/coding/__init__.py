"""The coding of stored state: from the values that a step computes with to stored ones, and back.

- `codecs` converts flat tensors: split masters, 8-bit blocks (`blocks8`) and stochastic rounding to
  bfloat16 (`rounding`).
- `coder` decodes and encodes the state of one block during a step.
- `decoder` decodes state for readers, and `filler` stores state that comes from other sources.
- `recoder` puts 8-bit values into other blocks.

All of it is arithmetic on tensors in host memory, and may know what its wing may.
"""
