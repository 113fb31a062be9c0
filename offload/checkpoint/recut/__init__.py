"""State of a checkpoint in another cut: what each rank reads where, when other ranks go on.

`layout` says how the boxes of a rank lie in the boxes that were stored. `source` is what the next
step reads; it encodes 8-bit values anew if the cut divides their blocks, and if that is allowed.
"""
