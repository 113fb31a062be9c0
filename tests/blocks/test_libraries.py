"""Models of transformers and peft, with streamed blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.errors import MismatchError
from tests.blocks.models import HYPER, batch, pair
from tests.numerics.reference import Reference, assert_same_bits, assert_same_parameters

transformers = pytest.importorskip("transformers")

pytestmark = [
    # peft reads a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
VOCABULARY = 64
SIZES = {"use_cache": False, "vocab_size": VOCABULARY}


def llama(seed: int = 0, **settings: Any) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, **SIZES, **settings,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return with_loss(transformers.LlamaForCausalLM(config).bfloat16().train())


def gpt2(seed: int = 0) -> Any:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=32, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0, **SIZES,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return with_loss(transformers.GPT2LMHeadModel(config).bfloat16().train())


def lora(seed: int = 0) -> Any:
    return adapted(llama(seed), seed)


def adapted(base: Any, seed: int = 0) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = peft.get_peft_model(base, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    return with_loss(model)


def with_loss(model: Any) -> Any:
    model.loss = lambda x: model(x % VOCABULARY, labels=x % VOCABULARY).loss
    return model


def recomputing(model: Any, *, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()


def compiled(model: Any) -> None:
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


def compiled_and_recomputing(model: Any) -> None:
    compiled(model)
    recomputing(model, reentrant=False)


MODELS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "llama": (llama, lambda _: None),
    "llama-tied": (lambda: llama(tie_word_embeddings=True), lambda _: None),
    "gpt2": (gpt2, lambda _: None),
    "reentrant": (llama, lambda model: recomputing(model, reentrant=True)),
    "not-reentrant": (llama, lambda model: recomputing(model, reentrant=False)),
    "compiled": (llama, compiled),
    "compiled-not-reentrant": (llama, compiled_and_recomputing),
    "lora": (lora, lambda _: None),
    "lora-not-reentrant": (lora, lambda model: recomputing(model, reentrant=False)),
}


@pytest.mark.parametrize(("model", "prepare"), MODELS.values(), ids=MODELS)
def test_training_has_the_bits_of_torch(
    tmp_path: Path, model: Callable[..., Any], prepare: Callable[[Any], Any]
) -> None:
    both = pair(tmp_path / "run", prepare, model=model)
    for step in range(2):
        both.train(step, num=2)
        both.step()
    stats = both.optimizer.stats()
    assert stats.block_loads_unused <= 1  # the reader of the comparison is not the loop
    assert stats.block_loads_ahead


@pytest.mark.parametrize("model", [llama, lora], ids=["llama", "lora"])
def test_generation_between_steps_has_the_same_bits(
    tmp_path: Path, model: Callable[..., Any]
) -> None:
    both = pair(tmp_path / "run", model=model)
    prompt = torch.arange(6)[None] + 2
    for step in range(2):
        both.train(step)
        both.step()
        found = []
        for each in both:
            each.eval()
            found.append(
                each.generate(
                    input_ids=prompt, max_new_tokens=5, do_sample=False, use_cache=True,
                    pad_token_id=0,
                )
            )  # fmt: skip
            each.train()
        assert_same_bits(found[1], found[0], "the generated tokens")


def test_an_adapter_is_merged_and_saved_as_in_memory(tmp_path: Path) -> None:
    both = pair(tmp_path / "run", model=lora)
    both.train(0)
    both.step()
    merged = [copy.deepcopy(model).merge_and_unload() for model in both]
    assert_same_parameters(merged[1].state_dict().items(), merged[0].state_dict().items())
    for number, model in enumerate(both):
        model.save_pretrained(tmp_path / str(number))
    files = [(tmp_path / str(n) / "adapter_model.safetensors").read_bytes() for n in range(2)]
    assert files[0] == files[1]


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_adapter_is_trained_on_a_base_that_was_never_in_memory(
    is_tied: bool, tmp_path: Path
) -> None:
    llama(tie_word_embeddings=is_tied).save_pretrained(tmp_path / "base")
    plain = adapted(llama(tie_word_embeddings=is_tied))
    reference = Reference(
        torch.optim.AdamW, [p for p in plain.parameters() if p.requires_grad], **HYPER
    )
    for start in (0, 2):
        with offload.outside_memory():
            base = llama(tie_word_embeddings=is_tied)
        model = adapted(base)
        if not start:
            offload.import_checkpoint(tmp_path / "base", tmp_path / "run", model=model)
        trained = [p for p in model.parameters() if p.requires_grad]
        options = offload.Options(parameters="drive", gradients="drive", chunk_bytes=32768)
        with offload.AdamW(
            trained, directory=tmp_path / "run", model=model, options=options, **HYPER
        ) as optimizer:
            assert optimizer.restore().step == start
            for step in range(start, start + 2):
                losses = []
                for each, one in ((model, optimizer), (plain, reference)):
                    each.zero_grad()
                    loss = each.loss(batch(step))
                    loss.backward()
                    one.step()
                    losses.append(loss.detach())
                assert_same_bits(losses[0], losses[1], "the loss")
            optimizer.checkpoint().result()
            assert_same_parameters(model.state_dict().items(), plain.state_dict().items())


def test_what_a_model_and_a_file_lack_is_named(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    with offload.outside_memory():
        larger = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_hidden_layers=5, hidden_size=32, **SIZES)
        )
        smaller = transformers.LlamaModel(
            transformers.LlamaConfig(num_hidden_layers=4, hidden_size=32, **SIZES)
        )
    with pytest.raises(MismatchError, match=r"has no 'model\.layers\.4\.[\w.]+', and the model"):
        offload.import_checkpoint(tmp_path / "base", tmp_path / "run", model=larger)
    with pytest.raises(MismatchError, match=r"has no 'embed_tokens\.weight', and the model"):
        offload.import_checkpoint(tmp_path / "base", tmp_path / "run", model=smaller)
    peft = pytest.importorskip("peft")
    with offload.outside_memory():
        base = llama()
    dora = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], use_dora=True))
    with pytest.raises(MismatchError, match=r"magnitude.*is NaN: do not derive it"):
        offload.import_checkpoint(tmp_path / "base", tmp_path / "run", model=dora)
    assert not (tmp_path / "run").exists()
