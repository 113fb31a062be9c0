"""Many ranks that train into one store: what they see, what they write into, what is a checkpoint.

An optimizer begins with `rank_group.join_ranks`, which returns the `rank_group.RankGroup` that
its engine is given. This wing may know ``torch.distributed`` and the wings below `engine`. It never
imports the engine, nor a wing above it.
"""
