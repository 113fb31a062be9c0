"""Names of a model with an adapter of peft, and the names that its parts have by themselves.

peft puts a layer that it adapts beneath ``base_layer``, a module that it trains instead of the
original beneath ``modules_to_save``, and the model beneath ``base_model.model``. Neither
``from_pretrained`` nor peft opens a file with such names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ADAPTER_FOLDER = "adapter"
ADAPTER_MODEL_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME = "adapter_config.json"

_MODEL = "base_model.model."
_TOP = re.compile(r"base_model\.(?!model\.)(\w+)\.([^.]+)")
"""Name of a tensor that layers share and that a file of peft has once, beside the model."""

_BASE = ".base_layer."
_TOKENS = ".token_adapter.base_layer."
_SHARED_TOKENS = ".token_adapter.trainable_tokens_delta."
"""Part of the name of a tensor that tied embeddings share and that a file of peft has once."""
_ORIGINAL = ".original_module."
_SAVED = re.compile(r"(.+)\.modules_to_save\.([^.]+)(\..+)")
_ADAPTER = re.compile(r"(.+)\.(?!(?:weight|bias)$)([^.]+)(\.weight|\.bias|)")
_MAGNITUDE = ".lora_magnitude_vector"
"""A vector of DoRA, whose name loses ``.weight`` in a file of peft."""


class PeftNames(NamedTuple):
    """Names in the files of peft, by the name in the model."""

    base: dict[str, str]
    """Tensors of the model without the adapter, as ``from_pretrained`` of the model names them."""

    adapter: dict[str, str]
    """Tensors of the adapter, as ``PeftModel.from_pretrained`` names them."""


def peft_names(tensors: Iterable[tuple[str, Sequence[str]]]) -> PeftNames | None:
    """Return the names that the tensors of a peft model have in files.

    None means that the model has no adapter, or several, or one whose names are not known.
    """
    others = dict(tensors)
    names = list(others)
    if not all(name.startswith(_MODEL) for name in names):
        return None
    adapted = {name.rpartition(_BASE)[0] for name in names if _BASE in name}
    base: dict[str, str] = {}
    adapter: dict[str, str] = {}
    adapters = set()
    for name in names:
        saved = _SAVED.fullmatch(name)
        top = next(filter(None, map(_TOP.fullmatch, others[name])), None)
        if saved:
            adapters.add(saved[2])
            adapter[name] = saved[1] + saved[3]
        elif top:
            adapters.add(top[2])
            adapter[name] = f"base_model.{top[1]}"
        elif _BASE not in name and any(name.startswith(f"{module}.") for module in adapted):
            parts = _ADAPTER.fullmatch(name)
            if parts is None or (others[name] and _SHARED_TOKENS not in name):
                return None  # peft may write a tensor that layers share once for each of them
            adapters.add(parts[2])
            end = "" if parts[1].endswith(_MAGNITUDE) else parts[3]
            adapter[name] = parts[1] + end
        else:
            bare = name.removeprefix(_MODEL)
            for wrapped in (_TOKENS, _BASE, _ORIGINAL):
                bare = bare.replace(wrapped, ".")
            base[name] = bare
    is_one = len(adapters) == 1 and len({*base.values()}) == len(base)
    return PeftNames(base, adapter) if is_one and len({*adapter.values()}) == len(adapter) else None
