"""Checkpoints that several ranks wrote, each its share; one process writes none of this.

`dealing` cuts parameters into boxes for ranks. `owners` and `part_table` describe who owns which
part of the state, in the manifest and beside the part. `model_shares` and
`model_blocks` say which bytes of the model's files a rank writes.
"""
