"""Format version 4: checkpoints that several ranks wrote, each its share.

- `dealing` cuts parameters into boxes for ranks; `box_ranges` finds a box's ranges of bytes in a
  tensor.
- `owners` and `part_table` describe who owns which part of the state, in the manifest and beside
  the part.
- `model_shares` and `model_blocks` say which bytes of `model.safetensors` a rank writes,
  `shard_files` how shards of several hosts are named, and `rank_states` how the train states of
  all ranks are stored in one file.

One process writes none of these, and its files have version 2 or 3.
"""
