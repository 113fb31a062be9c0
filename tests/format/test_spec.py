"""A second reader of checkpoints, written from docs/format.md alone, sharing no code."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.format.spec_reader import digest_of, read_tensor_file

BLOCK = 16 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a mixed model: several chunks, tied, frozen and buffered tensors."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(301, 33, dtype=torch.bfloat16),
            "norm": torch.nn.BatchNorm1d(33),
            "frozen": torch.nn.Linear(5, 3, dtype=torch.float16),
            "head": torch.nn.Linear(33, 301, bias=False, dtype=torch.bfloat16),
        }
    )
    model["head"].weight = model["embed"].weight
    model["frozen"].requires_grad_(False)
    directory = tmp_path_factory.mktemp("store")
    groups = [{"params": model.parameters(), "betas": (0.8, 0.95)}]
    options = offload.Options(chunk_bytes=8192)
    with offload.AdamW(groups, directory=directory, model=model, options=options) as optimizer:
        for step in range(3):
            for p in model.parameters():
                if p.requires_grad:
                    p.grad = torch.full_like(p, 0.1 * (step + 1))
            optimizer.step()
        sealed = optimizer.checkpoint({"epoch": 1}, metrics={"loss": 0.5, "tokens": 7}).result()
        optimizer.pin("best")
        return Path(sealed.path)


@pytest.fixture(scope="module")
def body(checkpoint: Path) -> dict[str, Any]:
    document = json.loads((checkpoint / "manifest.json").read_text())
    assert document["format"] == 1
    canonical = json.dumps(document["body"], sort_keys=True, separators=(",", ":"))
    expected = hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
    assert document["digest"] == expected
    result: dict[str, Any] = document["body"]
    return result


def test_directory_is_named_for_the_step(checkpoint, body):
    assert checkpoint.name == "step-00000003"
    assert body["step"] == 3
    assert sorted(p.name for p in checkpoint.iterdir()) == [
        "exp_avg.safetensors",
        "exp_avg_sq.safetensors",
        "manifest.json",
        "master.safetensors",
        "model.safetensors",
        "train_state.safetensors",
    ]


def test_files_are_padded_and_contiguous(checkpoint):
    for path in checkpoint.glob("*.safetensors"):
        data_start, header, data = read_tensor_file(path)
        header.pop("__metadata__", None)
        ends = [0] + [entry["data_offsets"][1] for entry in header.values()]
        assert [entry["data_offsets"][0] for entry in header.values()] == ends[:-1]
        assert ends[-1] == len(data)
        if path.name != "train_state.safetensors":
            assert data_start % 4096 == 0


def test_model_file_is_the_whole_state_dict(checkpoint, body):
    _, header, data = read_tensor_file(checkpoint / "model.safetensors")
    metadata = header.pop("__metadata__")
    assert metadata == {"format": "pt", "head.weight": "embed.weight"}
    assert [[n, e["dtype"], e["shape"]] for n, e in header.items()] == [
        entry[:3] for entry in body["model"]
    ]
    assert {"frozen.weight", "norm.running_mean", "norm.num_batches_tracked"} < set(header)
    sizes = [{"I64": 8, "F32": 4, "BF16": 2, "F16": 2}[e["dtype"]] for e in header.values()]
    assert sizes == sorted(sizes, reverse=True)
    for block, expected in enumerate(body["model_digests"]):
        context = f"{body['store_id']}/{body['generation']}/model/{block}"
        assert digest_of(data[block * BLOCK : (block + 1) * BLOCK], context) == expected


def test_groups_scalars_and_metrics_are_readable(body):
    assert body["groups"][0]["betas"] == {"tuple": [0.8, 0.95]}
    assert body["scalars"] == [[["step", "f32", "3.0"]]] * 3
    assert body["optimizer"] == "torch.optim.adamw.AdamW"
    assert body["metrics"] == {"loss": 0.5, "tokens": 7.0}


def test_a_pin_names_its_checkpoint(checkpoint, body):
    assert [path.name for path in (checkpoint.parent / "pins").iterdir()] == ["best"]
    raw = (checkpoint.parent / "pins" / "best").read_bytes()
    assert len(raw) == 512
    assert raw.endswith(b" \n")
    document = json.loads(raw)
    canonical = json.dumps(document["body"], sort_keys=True, separators=(",", ":"))
    assert document == {
        "format": 1,
        "digest": hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest(),
        "body": {
            "checkpoint": checkpoint.name,
            "store_id": body["store_id"],
            "generation": body["generation"],
        },
    }


def test_train_state_is_tied_to_its_checkpoint(checkpoint, body):
    _, header, _ = read_tensor_file(checkpoint / "train_state.safetensors")
    metadata = header["__metadata__"]
    assert json.loads(metadata["train_state"]) == {"epoch": 1}
    assert metadata["store_id"] == body["store_id"]
    assert metadata["generation"] == str(body["generation"])
    assert metadata["step"] == "3"
