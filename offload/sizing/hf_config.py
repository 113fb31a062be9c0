"""Tensors of a language model, from the ``config.json`` of Hugging Face.

Only families whose tensors are known by name are read. The tests compare them with the models of
the transformers library.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from offload.errors import SizingError
from offload.sizing.checks import shown

MAX_TENSORS = 100_000
"""Largest number of tensors of a model; published models have some thousands."""


class NamedShape(NamedTuple):
    """Name and shape of a parameter."""

    name: str
    shape: tuple[int, ...]


def tensors_of(config: Mapping[str, Any], path: str) -> list[NamedShape]:
    """Return the parameters of a model, in the order of the model's modules.

    A parameter that is tied to another one is listed once.
    """
    family = config.get("model_type")
    shapes = _FAMILIES.get(family) if isinstance(family, str) else None
    if shapes is None:
        raise SizingError(
            f"{path}: model_type is {shown(family)}, known are {', '.join(sorted(_FAMILIES))}: "
            "give the number of parameters, or the model's safetensors files, instead"
        )
    found = list(itertools.islice(shapes(_Fields(config, path)), MAX_TENSORS + 1))
    if len(found) > MAX_TENSORS:
        raise SizingError(f"{path}: more than {MAX_TENSORS} tensors")
    return found


class _Fields:
    """Fields of a configuration, with a message that names the missing one."""

    def __init__(self, config: Mapping[str, Any], path: str) -> None:
        self._config = config
        self._path = path

    def count(self, name: str, default: int | None = None) -> int:
        value = self._config.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= 1 << 40:
            raise SizingError(
                f"{self._path}: {name} is {shown(value)}, expected a whole number of at least 1"
            )
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._config.get(name, default)
        if not isinstance(value, bool):
            raise SizingError(f"{self._path}: {name} is {shown(value)}, expected true or false")
        return value


def _dense_mlp(fields: _Fields, prefix: str, hidden: int) -> Iterator[NamedShape]:
    inner = fields.count("intermediate_size")
    bias = fields.flag("mlp_bias", default=False)
    for name, shape in (
        ("gate_proj", (inner, hidden)),
        ("up_proj", (inner, hidden)),
        ("down_proj", (hidden, inner)),
    ):
        yield from _linear(f"{prefix}.mlp.{name}", shape, bias=bias)


def _experts(fields: _Fields, prefix: str, hidden: int) -> Iterator[NamedShape]:
    inner, num = fields.count("intermediate_size"), fields.count("num_local_experts")
    yield NamedShape(f"{prefix}.mlp.gate.weight", (num, hidden))
    yield NamedShape(f"{prefix}.mlp.experts.gate_up_proj", (num, 2 * inner, hidden))
    yield NamedShape(f"{prefix}.mlp.experts.down_proj", (num, hidden, inner))


def _decoder(
    fields: _Fields,
    *,
    may_have_bias: bool = False,
    query_bias: bool = False,
    head_norms: bool = False,
    tied: bool = False,
    head_dim: int | None = None,
    mlp: Callable[[_Fields, str, int], Iterator[NamedShape]] = _dense_mlp,
) -> Iterator[NamedShape]:
    """Return the tensors of a decoder with rotary positions and RMS norms, as LLaMA has them."""
    bias = may_have_bias and fields.flag("attention_bias", default=False)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    width = fields.count("head_dim", head_dim or hidden // heads)
    vocabulary = fields.count("vocab_size")
    yield NamedShape("model.embed_tokens.weight", (vocabulary, hidden))
    for layer in range(fields.count("num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield from _linear(
                f"{prefix}.self_attn.{name}_proj",
                (rows * width, hidden),
                bias=bias or query_bias,
            )
        yield from _linear(f"{prefix}.self_attn.o_proj", (hidden, heads * width), bias=bias)
        if head_norms:
            yield NamedShape(f"{prefix}.self_attn.q_norm.weight", (width,))
            yield NamedShape(f"{prefix}.self_attn.k_norm.weight", (width,))
        yield from mlp(fields, prefix, hidden)
        yield NamedShape(f"{prefix}.input_layernorm.weight", (hidden,))
        yield NamedShape(f"{prefix}.post_attention_layernorm.weight", (hidden,))
    yield NamedShape("model.norm.weight", (hidden,))
    if not fields.flag("tie_word_embeddings", default=tied):
        yield NamedShape("lm_head.weight", (vocabulary, hidden))


def _gpt2(fields: _Fields) -> Iterator[NamedShape]:
    hidden = fields.count("n_embd")
    inner = fields.count("n_inner", 4 * hidden)
    vocabulary = fields.count("vocab_size")
    yield NamedShape("transformer.wte.weight", (vocabulary, hidden))
    yield NamedShape("transformer.wpe.weight", (fields.count("n_positions"), hidden))
    for layer in range(fields.count("n_layer")):
        prefix = f"transformer.h.{layer}"
        yield from _norm(f"{prefix}.ln_1", hidden)
        yield from _transposed(f"{prefix}.attn.c_attn", hidden, 3 * hidden)
        yield from _transposed(f"{prefix}.attn.c_proj", hidden, hidden)
        yield from _norm(f"{prefix}.ln_2", hidden)
        yield from _transposed(f"{prefix}.mlp.c_fc", hidden, inner)
        yield from _transposed(f"{prefix}.mlp.c_proj", inner, hidden)
    yield from _norm("transformer.ln_f", hidden)
    if not fields.flag("tie_word_embeddings", default=True):
        yield NamedShape("lm_head.weight", (vocabulary, hidden))


def _gpt_neox(fields: _Fields) -> Iterator[NamedShape]:
    hidden, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    vocabulary = fields.count("vocab_size")
    bias = fields.flag("attention_bias", default=True)
    yield NamedShape("gpt_neox.embed_in.weight", (vocabulary, hidden))
    for layer in range(fields.count("num_hidden_layers")):
        prefix = f"gpt_neox.layers.{layer}"
        yield from _norm(f"{prefix}.input_layernorm", hidden)
        yield from _norm(f"{prefix}.post_attention_layernorm", hidden)
        yield from _linear(f"{prefix}.attention.query_key_value", (3 * hidden, hidden), bias=bias)
        yield from _linear(f"{prefix}.attention.dense", (hidden, hidden), bias=bias)
        yield from _linear(f"{prefix}.mlp.dense_h_to_4h", (inner, hidden), bias=True)
        yield from _linear(f"{prefix}.mlp.dense_4h_to_h", (hidden, inner), bias=True)
    yield from _norm("gpt_neox.final_layer_norm", hidden)
    if not fields.flag("tie_word_embeddings", default=False):
        yield NamedShape("lm_head.weight", (vocabulary, hidden))


def _linear(name: str, shape: tuple[int, int], *, bias: bool) -> Iterator[NamedShape]:
    """Return the tensors of ``torch.nn.Linear``; `shape` is (outputs, inputs)."""
    yield NamedShape(f"{name}.weight", shape)
    if bias:
        yield NamedShape(f"{name}.bias", shape[:1])


def _transposed(name: str, inputs: int, outputs: int) -> Iterator[NamedShape]:
    """Return the tensors of GPT-2's ``Conv1D``, whose weight is (inputs, outputs)."""
    yield NamedShape(f"{name}.weight", (inputs, outputs))
    yield NamedShape(f"{name}.bias", (outputs,))


def _norm(name: str, width: int) -> Iterator[NamedShape]:
    """Return the tensors of ``torch.nn.LayerNorm``."""
    yield NamedShape(f"{name}.weight", (width,))
    yield NamedShape(f"{name}.bias", (width,))


_FAMILIES: Mapping[str, Callable[[_Fields], Iterator[NamedShape]]] = {
    "gemma": partial(_decoder, may_have_bias=True, tied=True, head_dim=256),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": partial(_decoder, may_have_bias=True),
    "mistral": _decoder,
    "mixtral": partial(_decoder, mlp=_experts),
    "qwen2": partial(_decoder, query_bias=True),
    "qwen3": partial(_decoder, may_have_bias=True, head_norms=True, head_dim=128),
}
