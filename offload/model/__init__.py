"""The live model: its tensors by name, the parameter table, and ``model.safetensors``.

This wing may know `update.dtypes` and its rules, `device`, `checkpoint`, `format` and `gds`. It
never imports a module that writes a store.
"""

from offload.model.loading import load_parameters
from offload.model.model_file import BlockBuffers, ModelImage
from offload.model.parameters import Trainable, describe_parameters
from offload.model.process_groups import SEPARATE, ProcessGroup
from offload.model.stored import Stored, describe_model
from offload.model.table import ParameterTable

__all__ = [
    "SEPARATE",
    "BlockBuffers",
    "ModelImage",
    "ParameterTable",
    "ProcessGroup",
    "Stored",
    "Trainable",
    "describe_model",
    "describe_parameters",
    "load_parameters",
]
