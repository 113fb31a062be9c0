"""The state of a checkpoint in another cut than that in which its ranks stored it.

- `layout` says how the boxes of a rank lie in the boxes that were stored, and `places` in which
  chunks.
- `reencoding` encodes 8-bit values anew if the cut divides their blocks, and if that is allowed.
- `source.RecutSource` puts these together: it is what a step reads, in place of a slot.
"""
