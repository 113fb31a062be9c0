"""The demo's models: the GGUF loader against a small model written the way llama.cpp's is."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from transformers import LlamaConfig, LlamaForCausalLM

from offload.demo import SCENARIOS, models, train
from offload.demo.train import Batches

HEADS, KV_HEADS, WIDTH = 4, 2, 64
WORDS = [
    "<|end|>",
    *(chr(code) for code in range(ord("a"), ord("e"))),
    "ab",
    "\u0120",
    "\u0120ab",
    "1",
    "2",
]
MERGES = ["a b", "\u0120 ab"]


def make_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=32,
        rms_norm_eps=2**-17,  # exact in the float32 that a GGUF file stores
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # and not the rotary frequencies, as `.to` would
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key weights."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(2**-17)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] + [1] * (len(WORDS) - 1))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = {hf: short for short, hf in models._LLAMA_NAMES.items()}
    for name, parameter in model.named_parameters():
        stem = name.removesuffix(".weight")
        values = parameter.detach().float().numpy()
        if stem.startswith("model.layers."):
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            stored = f"blk.{layer}.{names[part]}.weight"
            if part == "self_attn.q_proj":
                values = permute(values, HEADS)
            elif part == "self_attn.k_proj":
                values = permute(values, KV_HEADS)
        else:
            stored = f"{names[stem]}.weight"
        writer.add_tensor(stored, np.ascontiguousarray(values), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_llama_becomes_the_same_plain_model(tmp_path: Path) -> None:
    original = make_llama()
    write_gguf(tmp_path / "m.gguf", original)
    loaded, encode = models.load_llama_gguf(str(tmp_path / "m.gguf"))
    assert isinstance(loaded, LlamaForCausalLM)
    expected = dict(original.named_parameters())
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert parameter.requires_grad, name
        assert torch.equal(parameter, expected[name]), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    ids = torch.arange(8)[None]
    assert torch.equal(original.eval()(ids).logits, loaded.eval()(ids).logits)
    words = {word: index for index, word in enumerate(WORDS)}
    assert encode("ab ab") == [words["ab"], words["\u0120ab"]]
    assert encode("12ba<|end|>") == [words[word] for word in ("1", "2", "b", "a", "<|end|>")]


def test_the_tiny_model_has_the_size_that_the_demo_reserves_space_for() -> None:
    model, encode = models.build("tiny")
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == SCENARIOS["tiny"].num_parameters
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    ids = torch.tensor([encode("hello")])
    assert model(input_ids=ids, labels=ids).logits.shape == (1, 5, 256)


def test_held_out_windows_are_from_text_that_no_step_trains_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train, "text", lambda: "x" * 1000)
    batches = Batches(lambda text: list(range(len(text))), batch=4, tokens=16)
    trained = torch.cat([batches[step] for step in range(200)])
    held_out = batches.held_out()
    assert held_out.shape == (8, 16)
    assert trained.max() < 900 <= held_out.min()
    assert held_out.max() == 999
