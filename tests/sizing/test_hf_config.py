"""Tensors from ``config.json``, compared with the models of the transformers library."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from offload.errors import SizingError
from offload.sizing.hf_config import tensors_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48}
LAYERS: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**SMALL, **LAYERS, "num_key_value_heads": 2}),
    "llama tied": ("LlamaConfig", {**SMALL, **LAYERS, "tie_word_embeddings": True}),
    "llama biased": ("LlamaConfig", {**SMALL, **LAYERS, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {**SMALL, **LAYERS, "num_key_value_heads": 2, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {**SMALL, **LAYERS, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", {**SMALL, **LAYERS, "num_key_value_heads": 2}),
    "gemma": ("GemmaConfig", {**SMALL, **LAYERS, "num_key_value_heads": 1}),
    "mixtral": (
        "MixtralConfig",
        {**SMALL, **LAYERS, "num_key_value_heads": 2, "num_local_experts": 5},
    ),
    "gpt2": ("GPT2Config", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt2 inner": ("GPT2Config", {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_inner": 40}),
    "gpt_neox": ("GPTNeoXConfig", {**SMALL, **LAYERS}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    class_name, settings = CONFIGS[name]
    config = getattr(transformers, class_name)(**settings)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    path = tmp_path / "config.json"
    found = tensors_of(json.loads(path.read_text()), str(path))
    assert {t.name: t.shape for t in found} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }
    assert len(found) == len({t.name for t in found})


def test_an_unknown_family_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(SizingError, match=r"a/config.json: model_type is 'whisper', known are .*"):
        tensors_of({"model_type": "whisper"}, "a/config.json")


@pytest.mark.parametrize("value", [None, "32", 0, 1.5, True, -4])
def test_a_field_that_is_no_count_is_refused_by_name(value: object) -> None:
    config = {"model_type": "llama", **SMALL, **LAYERS, "hidden_size": value}
    with pytest.raises(SizingError, match=r"c\.json: hidden_size is .*, expected a whole number"):
        tensors_of(config, "c.json")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {
                "model_type": "gpt2",
                "vocab_size": 50257,
                "n_positions": 1024,
                "n_embd": 768,
                "n_layer": 12,
            },
            124_439_808,
        ),
        (
            {
                "model_type": "llama",
                "vocab_size": 32000,
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
            },
            6_738_415_616,
        ),
        (
            {
                "model_type": "mixtral",
                "vocab_size": 32000,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "num_local_experts": 8,
            },
            46_702_792_704,
        ),
    ],
    ids=["gpt2", "llama-7b", "mixtral-8x7b"],
)
def test_the_published_number_of_parameters(config: dict[str, Any], expected: int) -> None:
    assert sum(math.prod(t.shape) for t in tensors_of(config, "config.json")) == expected
