"""The bytes on storage: pure descriptions, without open files and without torch.

This wing may know `offload.errors`, `gds.ALIGNMENT` and the errors of `gds`. Importing it imports
neither torch nor any other wing.
"""

from offload.format.arrays import StateFormat
from offload.format.chunk_plan import Piece
from offload.format.digests import ChunkDigests, DigestContext
from offload.format.header import Header
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.manifest import Manifest

__all__ = [
    "ChunkDigests",
    "DigestContext",
    "Header",
    "Layout",
    "Manifest",
    "ModelTensor",
    "ParameterSpec",
    "Piece",
    "StateFormat",
]
