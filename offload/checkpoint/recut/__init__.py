"""The state of a checkpoint in another cut than that in which its ranks stored it.

- `owners` opens the state of all owners of a checkpoint for reading.
- `leaves` reads ranges of bytes out of sealed chunks, and compares them with the digests.
- `layout` says how the boxes of a rank lie in the boxes that were stored.
- `source.RecutSource` puts these together: it is what a step reads, in place of a slot.
"""
