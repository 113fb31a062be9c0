"""An export of a model with an adapter of peft opens by the line that the command prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import offload
from offload.cli import main
from tests.command_line import Run, runner

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    # peft reads a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

CONFIGS = {
    "lora for a task": {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"},
    "lora of embeddings": {"target_modules": ["q_proj", "embed_tokens"], "bias": "all"},
    "trained beside it": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "lora and tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
    "vera": {"target_modules": ["q_proj"]},
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner("offload", main, monkeypatch, capsys)


def make_base() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_bias=True,
    )
    return transformers.LlamaForCausalLM(config)


def seal(model: Any, directory: Path) -> None:
    """Take two steps, so that no part of the adapter is zero any more."""
    with offload.AdamW(model.parameters(), lr=0.1, directory=directory, model=model) as optimizer:
        for _ in range(2):
            model(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.checkpoint().result()


TOKENS = torch.arange(12).reshape(2, 6)


def opened(out: str) -> Any:
    """Return what the printed line makes, evaluated as it stands."""
    line = out.partition("next: ")[2].strip()
    assert "ForCausalLM" in line
    return eval(line, {"peft": peft, "transformers": transformers})


@pytest.mark.parametrize("kind", CONFIGS)
def test_model_and_adapter_open_by_the_printed_line(kind, run, tmp_path):
    config = peft.VeraConfig if kind == "vera" else peft.LoraConfig
    model = peft.get_peft_model(make_base(), config(r=2, **CONFIGS[kind]))
    seal(model, tmp_path / "run")
    model.config.save_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "theirs")
    arguments = ("export", tmp_path / "run", tmp_path / "out", "--to", "hf", "--quiet")
    status, out, _ = run(*arguments, "--config", tmp_path / "theirs")
    assert status == 0
    again = opened(out)
    model.eval()
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)

    theirs = load_file(tmp_path / "theirs/adapter_model.safetensors")
    found = load_file(tmp_path / "out/adapter/adapter_model.safetensors")
    assert {*found} <= {*theirs}
    assert all("base_layer" in name or name.endswith("bias") for name in {*theirs} - {*found})
    assert all(torch.equal(found[name], theirs[name]) for name in found)


def test_without_the_adapters_config_the_line_opens_the_model_without_it(run, tmp_path):
    base = make_base()
    base.save_pretrained(tmp_path / "base")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    seal(peft.get_peft_model(base, peft.LoraConfig(r=2)), tmp_path / "run")
    arguments = ("export", tmp_path / "run", tmp_path / "out", "--to", "hf", "--quiet")
    _, out, _ = run(*arguments, "--config", tmp_path / "base")
    line = out.partition("next: ")[2].strip()
    assert "# without the adapter of peft" in line
    assert "--config DIR" in line
    again = eval(line, {"transformers": transformers})
    assert all(torch.equal(again.state_dict()[name], before[name]) for name in before)
    assert (tmp_path / "out/adapter/adapter_model.safetensors").exists()
    (tmp_path / "checkpoint-2").mkdir()  # as the Trainer leaves one of an adapter
    (tmp_path / "checkpoint-2/adapter_config.json").write_text("{}")
    arguments = ("export", tmp_path / "run", tmp_path / "again", "--to", "hf", "--quiet")
    status, _, error = run(*arguments, "--config", tmp_path / "checkpoint-2")
    assert status
    assert "model.config.save_pretrained(DIR) writes it" in " ".join(error.split())


class Wrapper(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.inner(*arguments, **named)


def of_two_adapters(base: Any) -> Any:
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def with_a_prompt(base: Any) -> Any:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(base, config)


def with_tensors_that_layers_share(base: Any) -> Any:
    return peft.get_peft_model(base, peft.LilyConfig(r=2, target_modules=["q_proj"]))


@pytest.mark.parametrize(
    "wrap", [Wrapper, of_two_adapters, with_a_prompt, with_tensors_that_layers_share]
)
def test_no_line_is_printed_that_would_open_random_weights(wrap, run, tmp_path):
    base = make_base()
    base.save_pretrained(tmp_path / "base")
    seal(wrap(base), tmp_path / "run")
    arguments = ("export", tmp_path / "run", tmp_path / "out", "--to", "hf", "--quiet")
    _, out, _ = run(*arguments, "--config", tmp_path / "base")
    assert "next: from_pretrained would open none of it: LlamaForCausalLM has other names" in out
