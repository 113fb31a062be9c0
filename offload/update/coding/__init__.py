"""The coding of stored state: from the values that a step computes with to stored ones, and back.

- `rounding` (bfloat16, split masters) and `blocks8` (8-bit blocks) convert flat tensors.
- `coder` decodes and encodes the state of one block during a step.
- `decoder` decodes state for readers, and `filler` stores state that comes from other sources.

All of it is arithmetic on tensors in host memory, and may know what its wing may.
"""
