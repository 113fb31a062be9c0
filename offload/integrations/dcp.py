"""Bridge to `torch.distributed.checkpoint`: `dcp.load` reads our checkpoints as they lie.

    torch.distributed.checkpoint.load(state, storage_reader=CheckpointReader("run"))

A checkpoint of one process or of several ranks is loaded into any layout of ranks that torch has:
FSDP2, tensor parallelism, HSDP, or none; and into torch's own optimizers. The checkpoint need not
be exported before. `docs/exchange.md` has an example.
"""

from offload import CheckpointReader

__all__ = ["CheckpointReader"]
