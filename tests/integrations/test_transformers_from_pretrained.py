"""`from_pretrained` opens sealed checkpoints and exports as they lie, with config and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    default_data_collator,
)

import offload
from offload.cli import main
from offload.integrations.transformers import OffloadCallback
from tests.command_line import Run, runner
from tests.integrations.training import Sentences, arguments, make_model
from tests.numerics.reference import assert_same_bits
from tests.stores.files import flip_on_disk
from tests.stores.small import make_optimizer, train

DESCRIPTION = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def make_tokenizer(word: str = "night") -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, word: 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


def fit(root: Path, *, steps: int = 4, word: str = "night") -> PreTrainedModel:
    """Train with a tokenizer, save every second step, keep the last two, and return the model."""
    offloading = OffloadCallback(close=True)
    trainer = Trainer(
        make_model(),
        arguments(root, max_steps=steps, save_steps=2, save_total_limit=2),
        train_dataset=Sentences(),
        data_collator=default_data_collator,
        processing_class=make_tokenizer(word),
        optimizer_cls_and_kwargs=offloading.optimizer_cls_and_kwargs(
            directory=root / "run", options=offload.Options(chunk_bytes=4096)
        ),
        callbacks=[offloading],
    )
    trainer.train(resume_from_checkpoint=steps > 4)
    return trainer.model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A run with the checkpoints of steps 2 and 4, and the model at its end."""
    root = tmp_path_factory.mktemp("trained")
    return root, fit(root)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner("offload", main, monkeypatch, capsys)


def assert_opens(directory: Path, expected: PreTrainedModel) -> None:
    found = AutoModelForCausalLM.from_pretrained(directory)
    assert type(found) is type(expected)
    assert found.config.n_embd == expected.config.n_embd
    for (name, tensor), wanted in zip(
        found.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert_same_bits(tensor, wanted, name)
    assert AutoTokenizer.from_pretrained(directory)("the night")["input_ids"] == [1, 2]


def test_a_sealed_checkpoint_is_opened_as_it_lies(
    trained: tuple[Path, PreTrainedModel], run: Run
) -> None:
    """The files beside it are those of the Trainer's folder."""
    root, model = trained
    for step in (2, 4):
        folder, checkpoint = root / f"out/checkpoint-{step}", root / f"run/step-{step:08}"
        for name in DESCRIPTION:
            assert (checkpoint / name).read_bytes() == (folder / name).read_bytes()
        assert not (checkpoint / "trainer_state.json").exists()
        assert not (checkpoint / "optimizer.pt").exists()
    assert run("verify", root / "run")[0] == 0
    assert [c.step for c in offload.list_checkpoints(root / "run") if c.valid] == [2, 4]
    assert_opens(root / "run/step-00000004", model)
    older = AutoModelForCausalLM.from_pretrained(root / "run/step-00000002")
    kept = AutoModelForCausalLM.from_pretrained(root / "out/checkpoint-2")
    for tensor, wanted in zip(older.parameters(), kept.parameters(), strict=True):
        assert_same_bits(tensor, wanted, "a parameter of step 2")


def test_an_export_is_opened_as_it_lies(
    trained: tuple[Path, PreTrainedModel], tmp_path: Path, run: Run
) -> None:
    root, model = trained
    out = tmp_path / "out"
    code, said, _ = run("export", root / "run", out, "--to", "hf", "--quiet")
    assert code == 0
    assert_opens(out, model)
    first, then = said.splitlines()
    assert first.startswith(f"{out}: step 4 of {root / 'run/step-00000004'}, ")
    assert then == f"next: transformers.GPT2LMHeadModel.from_pretrained({str(out)!r})"


def test_files_follow_a_recycled_slot_and_a_changed_tokenizer(tmp_path: Path, run: Run) -> None:
    fit(tmp_path)
    slots = {p.stat().st_ino for p in (tmp_path / "run").iterdir() if p.is_dir()}
    (tmp_path / "run/step-00000004/chat_template.jinja").write_text("of another tokenizer")
    fit(tmp_path, steps=10, word="day")
    for step in (8, 10):
        checkpoint = tmp_path / f"run/step-{step:08}"
        assert AutoTokenizer.from_pretrained(checkpoint)("the day")["input_ids"] == [1, 2]
        assert not (checkpoint / "chat_template.jinja").exists()
        AutoModelForCausalLM.from_pretrained(checkpoint)
    assert slots & {p.stat().st_ino for p in (tmp_path / "run").glob("step-*")}, "some are recycled"
    flip_on_disk(tmp_path / "run/step-00000010/model.safetensors", 4100)
    assert run("verify", tmp_path / "run/step-00000010")[0] == 1, "damage is found beside them"


def test_an_export_without_a_config_says_how_to_give_one(
    tmp_path: Path, run: Run, trained: tuple[Path, PreTrainedModel]
) -> None:
    model = make_model()
    with make_optimizer(model, directory=tmp_path / "run") as optimizer:
        train(optimizer, 1, seal_at=(1,))
    code, said, _ = run("export", tmp_path / "run", tmp_path / "bare", "--to", "hf", "--quiet")
    assert code == 0
    assert not (tmp_path / "bare/config.json").exists()
    assert "next: from_pretrained needs a config.json: export again with --config DIR" in said

    given = trained[0] / "out/checkpoint-4"
    out = tmp_path / "out"
    assert run("export", tmp_path / "run", out, "--to", "hf", "--config", given, "--quiet")[0] == 0
    assert_opens(out, model)
    names = {file.name for file in out.iterdir()}
    assert names == {"model.safetensors", "optimizer.pt", "master.safetensors", *DESCRIPTION}


def test_a_plain_loop_adds_the_files_by_itself(tmp_path: Path) -> None:
    model = make_model()
    with make_optimizer(model, directory=tmp_path / "run") as optimizer:
        train(optimizer, 1)
        sealed = optimizer.checkpoint().result()
        model.config.save_pretrained(tmp_path / "config")
        make_tokenizer().save_pretrained(tmp_path / "config")
        added = offload.add_hf_files(sealed, tmp_path / "config")
        assert sorted(added) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert_opens(tmp_path / "run/step-00000001", model)


def test_files_of_the_store_are_never_taken_for_those_of_a_model(tmp_path: Path, run: Run) -> None:
    """Neither from the folder, nor when stale ones are removed; and no export follows links."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "notes.json").write_text("{}")
    with make_optimizer(make_model(), directory=tmp_path / "run") as optimizer:
        train(optimizer, 1)
        sealed = optimizer.checkpoint().result()
        before = sorted(p.name for p in Path(sealed.path).iterdir())
        assert offload.add_hf_files(sealed, theirs) == []  # without a config
        assert sorted(p.name for p in Path(sealed.path).iterdir()) == before
        for name in (
            "config.json",
            "manifest.json",
            "damaged.txt",
            "model.safetensors",
            "pins.json",
        ):
            (theirs / name).write_text(json.dumps({"model_type": "gpt2"}))
        (theirs / "model.safetensors.index.json").write_text("{}")
        added = {*offload.add_hf_files(sealed, theirs)}
        assert {"config.json", "pins.json"} <= added <= {"config.json", "pins.json", "notes.json"}
        (theirs / "config.json").rename(tmp_path / "blob")  # as in the cache of Hugging Face
        (theirs / "config.json").symlink_to(tmp_path / "blob")
        assert "config.json" in offload.add_hf_files(sealed, theirs)
    (info,) = offload.list_checkpoints(tmp_path / "run")
    assert info.valid
    with offload.open_checkpoint(info.path) as checkpoint:
        assert checkpoint.verify().ok
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "run/step-00000001/vocab.txt").symlink_to(tmp_path / "secret")
    assert run("export", tmp_path / "run", tmp_path / "out", "--to", "hf", "--quiet")[0] == 0
    assert "vocab.txt" not in {file.name for file in (tmp_path / "out").iterdir()}
