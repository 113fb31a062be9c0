"""Imports of weights alone: an optimizer that begins with them has the bits of a new one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import offload
from offload import import_checkpoint
from offload.errors import CheckpointError, MismatchError
from tests.exchange.test_export import export
from tests.numerics.reference import assert_same_bits, assert_same_parameters
from tests.stores.small import give_gradients

OPTIONS = offload.Options(chunk_bytes=8192, ring_chunks=2)
TIED, OTHER = "embed.weight", "lm_head.weight"
CLASSES = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9)}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.3}),
}


class Net(torch.nn.Module):
    """A tied weight, a buffer that files have and one that they lack."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(50, 24)
        self.body = torch.nn.Sequential(*[torch.nn.Linear(24, 24) for _ in range(5)])
        self.norm = torch.nn.LayerNorm(24)
        self.lm_head = torch.nn.Linear(24, 50, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(24))
        self.register_buffer("positions", torch.arange(7) + seed)
        self.to(dtype)


def tensors_of(model: torch.nn.Module, *, name: str = TIED) -> dict[str, torch.Tensor]:
    """The state dict as Hugging Face saves it: with one of the tied names, and not all buffers."""
    left_out = {TIED, OTHER, "positions"} - {name}
    return {n: t.clone() for n, t in model.state_dict().items() if n not in left_out}


def save(
    tensors: dict[str, torch.Tensor], path: Path, *, files: int = 1, config: object = None
) -> Path:
    """Write a model's directory as Hugging Face does."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if files == 1:
        safetensors.torch.save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path
    names = {
        n: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, n in enumerate(tensors)
    }
    for file in {*names.values()}:
        part = {n: tensors[n] for n in tensors if names[n] == file}
        safetensors.torch.save_file(part, path / file, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": names}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def restored(store: Path, kind: str = "adamw", **settings: Any) -> tuple[Net, Any]:
    cls, hyper = CLASSES[kind]
    model = Net(settings.pop("dtype", torch.bfloat16), seed=77)
    optimizer = offload.OffloadedOptimizer(
        cls, groups(model), model=model, directory=store, options=OPTIONS, **hyper, **settings
    )
    found = optimizer.restore()
    assert (found.step, found.optimizer, found.train_state) == (0, "", None)
    assert found.verify().ok
    return model, optimizer


def assert_trains_like_a_new_one(
    plain: Net, mine: Net, own: offload.OffloadedOptimizer, kind: str = "adamw"
) -> None:
    """Train both; `plain` by torch, on FP32 masters that begin as its weights."""
    cls, hyper = CLASSES[kind]
    live = [p for group in groups(plain) for p in group["params"]]
    masters = [p.detach().float() for p in live]
    rest = iter(masters)
    made = [{**g, "params": [next(rest) for _ in g["params"]]} for g in groups(plain)]
    theirs = cls(made, **hyper)
    assert [g["lr"] for g in own.param_groups] == [hyper["lr"]] * 2
    assert_same_parameters(mine.named_parameters(), plain.named_parameters())
    assert_same_bits(mine.table, plain.table, "buffer")
    for step in range(3):
        for model in (plain, mine):
            give_gradients(model.parameters(), step)
        for master, p in zip(masters, live, strict=True):
            master.grad = p.grad.float()
        theirs.step()
        own.step()
        with torch.no_grad():
            for master, p in zip(masters, live, strict=True):
                p.copy_(master)
        assert_same_parameters(mine.named_parameters(), plain.named_parameters())
    found = own.full_state_dict()["state"]
    for number, state in theirs.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert_same_bits(found[number][key], value, f"{key} of {number}")


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_and_every_grouping_begins_with_the_bits_of_a_new_optimizer(tmp_path, kind):
    plain = Net()
    told: list[tuple[int, int]] = []
    made = import_checkpoint(
        save(tensors_of(plain), tmp_path / "hf"),
        tmp_path / "store",
        progress=lambda done, total: told.append((done, total)),
    )
    assert told[-1][0] == told[-1][1] > 0
    assert made.num_parameters == sum(t.numel() for t in tensors_of(plain).values())
    mine, own = restored(tmp_path / "store", kind)
    with own:
        assert mine.positions[0] == 77  # it is in no file, and stays as it was made
        assert_trains_like_a_new_one(plain, mine, own, kind)


@pytest.mark.parametrize("name", [TIED, OTHER])
@pytest.mark.parametrize("form", ["sharded", "directory", "file", "index"])
def test_a_tied_weight_is_found_under_either_of_its_names(tmp_path, form, name):
    plain, files = Net(), 3 if form in ("sharded", "index") else 1
    source = save(tensors_of(plain, name=name), tmp_path / "hf", files=files)
    if form in ("file", "index"):
        source /= "model.safetensors" + (".index.json" if form == "index" else "")
    import_checkpoint(source, tmp_path / "store", options=OPTIONS)
    mine, own = restored(tmp_path / "store")
    with own:
        assert mine.lm_head.weight is mine.embed.weight
        assert_trains_like_a_new_one(plain, mine, own)
        own.checkpoint().result()
    again = Net(seed=3)
    assert offload.load_parameters(again, tmp_path / "store") == 3
    assert_same_parameters(again.named_parameters(), plain.named_parameters())


def test_two_copies_of_a_tied_weight_are_one_if_the_config_says_so(tmp_path):
    plain = Net()
    both = tensors_of(plain) | {OTHER: plain.lm_head.weight.detach().clone()}
    says = {"text_config": {"tie_word_embeddings": True}}
    import_checkpoint(save(both, tmp_path / "says", config=says), tmp_path / "a", options=OPTIONS)
    silent = save(both, tmp_path / "silent")
    import_checkpoint(silent, tmp_path / "b", options=OPTIONS)
    with pytest.raises(MismatchError, match=r"'lm_head.weight' is only in .*--tied ALIAS=NAME"):
        restored(tmp_path / "b")
    import_checkpoint(silent, tmp_path / "c", options=OPTIONS, tied={OTHER: TIED})
    for store in ("a", "c"):
        mine, own = restored(tmp_path / store)
        with own:
            assert_same_parameters(mine.named_parameters(), plain.named_parameters())
    differing = both | {OTHER: both[OTHER] + 1}
    untied = save(differing, tmp_path / "differ", config={"tie_word_embeddings": True})
    import_checkpoint(untied, tmp_path / "d", options=OPTIONS)
    with pytest.raises(MismatchError, match=r"'lm_head.weight' is only in"):
        restored(tmp_path / "d")


def test_a_dtype_rounds_floating_point_tensors_as_torch_does(tmp_path):
    plain = Net(torch.float32)
    tensors = tensors_of(plain) | {"positions": torch.arange(7)}
    path = save(tensors, tmp_path / "hf")
    import_checkpoint(path, tmp_path / "store", options=OPTIONS, dtype=torch.bfloat16)
    mine, own = restored(tmp_path / "store")
    with own:
        assert mine.positions[0] == 0
        assert_trains_like_a_new_one(plain.bfloat16(), mine, own)
    import_checkpoint(path, tmp_path / "exact", options=OPTIONS)
    with pytest.raises(MismatchError, match=r"is F32 .* and BF16 .*--dtype converts"):
        restored(tmp_path / "exact")


def test_tensors_that_the_model_lacks_are_named_and_can_be_skipped(tmp_path):
    plain = Net()
    odd = tensors_of(plain) | {f"body.{i}.inv_freq": torch.ones(3) for i in range(2)}
    path = save(odd, tmp_path / "hf")
    import_checkpoint(path, tmp_path / "all", options=OPTIONS)
    with pytest.raises(MismatchError, match=r"'body.0.inv_freq' is only in .*--skip leaves out"):
        restored(tmp_path / "all")
    import_checkpoint(path, tmp_path / "store", options=OPTIONS, skip=["*.inv_freq"])
    mine, own = restored(tmp_path / "store")
    with own:
        assert_trains_like_a_new_one(plain, mine, own)
    with pytest.raises(MismatchError, match=r"no tensor that '\*.freq' of skip= fits"):
        import_checkpoint(path, tmp_path / "none", skip=["*.freq"])
    del odd["norm.weight"]
    import_checkpoint(save(odd, tmp_path / "less"), tmp_path / "x", skip=["*.inv_freq"])
    with pytest.raises(MismatchError, match=r"'norm.weight' is only in the model"):
        restored(tmp_path / "x")


def test_a_checkpoint_before_the_first_step_and_what_becomes_of_the_weights(tmp_path):
    plain = Net()
    import_checkpoint(save(tensors_of(plain), tmp_path / "hf"), tmp_path / "store")
    _, first = restored(tmp_path / "store")
    with first:
        first.checkpoint({"epoch": 0}).result()
    with restored_plainly(tmp_path / "store") as (mine, own, found):
        assert found.train_state == {"epoch": 0}
        assert_trains_like_a_new_one(plain, mine, own)
        own.checkpoint().result()
    with restored_plainly(tmp_path / "store") as (mine, own, found):
        assert found.step == 3
        assert found.optimizer.endswith("AdamW")
        assert own.param_groups[0]["lr"] == 0.01


class restored_plainly:  # noqa: N801  (used as a function)
    """A model and optimizer that go on from whatever the store has."""

    def __init__(self, store: Path) -> None:
        cls, hyper = CLASSES["adamw"]
        self.model = Net(seed=78)
        self.own = offload.OffloadedOptimizer(
            cls, groups(self.model), model=self.model, directory=store, options=OPTIONS, **hyper
        )

    def __enter__(self) -> tuple[Net, Any, Any]:
        return self.model, self.own, self.own.restore()

    def __exit__(self, *_: object) -> None:
        self.own.close()


@pytest.mark.parametrize("kind", ["pt", "hf", "safetensors", "dcp"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_are_exported_without_an_optimizer(tmp_path, kind):
    plain = Net()
    made = import_checkpoint(save(tensors_of(plain), tmp_path / "hf"), tmp_path / "store")
    export(made.path, tmp_path / "out", kind)
    if kind == "hf":
        assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
        found = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
        assert found.keys() == tensors_of(plain).keys()
    if kind == "pt":
        assert torch.load(tmp_path / "out").keys() == {"model", "step"}


def cut_short(path: Path) -> None:
    file = path / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def no_shard(path: Path) -> None:
    (path / "model-00002-of-00003.safetensors").unlink()


def other_index(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"]["nose"] = "model-00002-of-00003.safetensors"
    index.write_text(json.dumps(found))


def outside(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-00002', '"../model-00002'))


def not_listed(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    del found["weight_map"]["norm.weight"]
    index.write_text(json.dumps(found))


def torn_config(path: Path) -> None:
    (path / "config.json").write_text('{"tie_word_embeddings": ')


def with_optimizer(path: Path) -> None:
    (path / "optimizer.bin").write_bytes(b"")


DAMAGES = {
    cut_short: r"model-00002-of-00003.safetensors: cannot be read as safetensors",
    no_shard: r"model-00002-of-00003.safetensors: cannot be opened",
    other_index: r"index.json: model-00002-of-00003.safetensors lacks 'nose'",
    outside: r"names a file outside its directory",
    not_listed: r"has 'norm.weight', which is in none of the files",
    torn_config: r"config.json: not JSON",
    with_optimizer: r"optimizer.bin, which is not read: to import the weights alone, name",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_damaged_source_is_named_and_leaves_nothing_behind(tmp_path, damage):
    tensors = tensors_of(Net(), name=OTHER)
    path = save(tensors, tmp_path / "hf", files=3)
    damage(path)
    with pytest.raises(CheckpointError, match=DAMAGES[damage]):
        import_checkpoint(path, tmp_path / "store", options=OPTIONS)
    assert not (tmp_path / "store").exists()


def test_a_file_that_shrinks_while_it_is_read_leaves_no_checkpoint(tmp_path):
    weight = torch.arange(40 << 20).bfloat16()
    path = save({"weight": weight}, tmp_path / "hf")
    file = path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model.safetensors: ends before byte"):
        import_checkpoint(path, tmp_path / "store", progress=lambda _, __: truncate(file))
    assert offload.list_checkpoints(tmp_path / "store") == []
    safetensors.torch.save_file({"weight": weight}, file)
    made = import_checkpoint(path, tmp_path / "store")
    stored = safetensors.torch.load_file(f"{made.path}/model.safetensors")
    assert_same_bits(stored["weight"], weight, "weight")


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(4000)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"names": ["a"]}, "names= and frozen="),
        ({"frozen": ["a"]}, "names= and frozen="),
        ({"dtype": torch.float64}, "dtype is torch.float64"),
        ({"skip": ["*"]}, "leaves no tensor"),
        ({"tied": {"a": "b"}}, "cannot be tied"),
    ],
)
def test_what_describes_optimizer_state_is_refused(tmp_path, settings, words):
    path = save(tensors_of(Net()), tmp_path / "hf")
    with pytest.raises(ValueError, match=words):
        import_checkpoint(path, tmp_path / "store", options=OPTIONS, **settings)
    with pytest.raises(CheckpointError, match="leave out --model"):
        import_checkpoint(path, tmp_path / "store", model=path / "model.safetensors")
    with pytest.raises(CheckpointError, match="nor weights"):
        import_checkpoint(tmp_path, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_model_of_transformers_by_the_command_alone(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    make = transformers.AutoModelForCausalLM.from_config
    theirs = make(config, dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    said = subprocess.run(
        [sys.executable, "-m", "offload", "import", tmp_path / "hf", tmp_path / "run", "--quiet"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "step 0, " in said
    assert "a new optimizer begins with them" in said
    model = make(config, dtype=torch.bfloat16)
    with offload.AdamW(model.parameters(), lr=0.5, model=model, directory=tmp_path / "run") as own:
        own.restore()
        assert own.param_groups[0]["lr"] == 0.5
    assert_same_parameters(model.named_parameters(), theirs.named_parameters())


PROGRAM = """
import sys, torch, offload
offload.import_checkpoint(sys.argv[1], sys.argv[2])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path):
    peaks = []
    for layers in (6, 24):
        tensors = {
            f"{n}.{k}": torch.full((1024, 1024), n / 7, dtype=torch.bfloat16)
            for n in range(layers)
            for k in "abcd"
        }
        path = save(tensors, tmp_path / str(layers), files=3)
        command = [sys.executable, "-c", PROGRAM, path, tmp_path / f"store{layers}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) << 10)
    assert layers * 4 * (2 << 20) == 192 << 20  # 48 MiB and 192 MiB
    assert abs(peaks[1] - peaks[0]) < 16 << 20, peaks
