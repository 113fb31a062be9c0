"""Several ranks that train one model: what they tell each other in a step.

It may know `format`, `store`, `stream`, `model`, `checkpoint` and ``torch.distributed``, but not
the engine or anything above it.
"""
