"""The second reader, from docs/format.md alone, for stores on one drive and on three."""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_right
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

import offload
from tests.format.spec_reader import chunk_starts, digest_of, read_tensor_file

SHARES = (2, 1, 3)
NAMES = ("first", "second", "thïrd")
SIZES = {"F32": 4, "BF16": 2, "I16": 2, "I8": 1, "U8": 1}


@pytest.fixture(scope="module", params=["float32", "int8", "one-drive"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(301, 33, dtype=torch.bfloat16),
            "norm": torch.nn.BatchNorm1d(33),
            "none": torch.nn.ParameterDict({"left": torch.zeros(0, 3, dtype=torch.bfloat16)}),
            "head": torch.nn.Linear(33, 70, dtype=torch.bfloat16),
        }
    )
    root = tmp_path_factory.mktemp("drives")
    shares = (1,) if request.param == "one-drive" else SHARES
    directories = [root / name for name in NAMES[: len(shares)]]
    drives = offload.DriveTuning(shares=shares)
    state_dtype = "int8" if request.param == "int8" else "float32"
    options = offload.Options(chunk_bytes=4096, drives=drives, state_dtype=state_dtype)
    with offload.AdamW(
        model.parameters(), directory=directories, model=model, options=options
    ) as optimizer:
        for step in range(3):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1 * (step + 1))
            optimizer.step()
        return Path(optimizer.checkpoint({"epoch": 1}).result().path)


@pytest.fixture(scope="module")
def body(checkpoint: Path) -> dict[str, Any]:
    document = json.loads((checkpoint / "manifest.json").read_text())
    assert document["digest"] == canonical_digest(document["body"])
    return document["body"]


def canonical_digest(value: object) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def places(checkpoint: Path, body: dict[str, Any]) -> list[Path]:
    return [checkpoint, *(Path(p["directory"]) / p["name"] for p in body["parts"])]


def owners(body: dict[str, Any]) -> list[int]:
    """Deal the chunks out, in exact arithmetic."""
    shares, counts, found = body["shares"], [0] * len(body["shares"]), []
    for chunk in range(len(chunk_starts(body)) - 1):
        behind = [(chunk + 1) * s - n * sum(shares) for s, n in zip(shares, counts, strict=True)]
        found.append(behind.index(max(behind)))
        counts[found[-1]] += 1
    return found


def test_parts_are_where_the_manifest_says(checkpoint, body):
    root = checkpoint.parents[1]
    others = NAMES[1 : len(body["shares"])]
    assert [p["directory"] for p in body["parts"]] == [str(root / name) for name in others]
    arrays = {f"{name}.safetensors" for name, *_ in body["arrays"]}
    for place in places(checkpoint, body)[1:]:
        assert re.fullmatch(r"part-[1-9][0-9]*", place.name)
        assert {p.name for p in place.iterdir()} == arrays | {"part.json"}
        assert (place.parent / "LOCK").exists()
    assert {p.name for p in checkpoint.iterdir()} == arrays | {
        "manifest.json", "model.safetensors", "train_state.safetensors",
    }  # fmt: skip


def test_part_json_is_what_the_manifest_names(checkpoint, body):
    on = owners(body)
    for drive, (place, part) in enumerate(
        zip(places(checkpoint, body)[1:], body["parts"], strict=True), 1
    ):
        raw = (place / "part.json").read_bytes()
        assert len(raw) == 4096
        assert raw.endswith(b" \n")
        document = json.loads(raw)
        assert document["format"] == 1
        assert document["digest"] == canonical_digest(document["body"]) == part["digest"]
        content = {
            array: [d for chunk, d in enumerate(digests) if on[chunk] == drive]
            for array, digests in body["digests"].items()
        }
        assert document["body"] == {
            "store_id": body["store_id"],
            "generation": body["generation"],
            "drive": drive,
            "content": canonical_digest(content),
        }
        assert part["generation"] == body["generation"]


def test_chunk_digests_match_on_every_drive(checkpoint, body):
    on, starts = owners(body), chunk_starts(body)
    drives = range(len(body["shares"]))
    assert {on.count(drive) > 1 for drive in drives} == {True}
    for array, dtype, block in body["arrays"]:
        data = [read_tensor_file(p / f"{array}.safetensors")[2] for p in places(checkpoint, body)]
        ends = [0 for _ in drives]
        for chunk, expected in enumerate(body["digests"][array]):
            first, last = starts[chunk : chunk + 2]
            start, values = 0, 0
            for _, _, shape, _, arrays in body["parameters"]:
                stop = start + math.prod(shape)
                if array in arrays:
                    values += -(-max(min(last, stop) - max(first, start), 0) // block)
                start = stop
            drive, nbytes = on[chunk], values * SIZES[dtype]
            piece = data[drive][ends[drive] : ends[drive] + nbytes]
            ends[drive] += nbytes
            context = f"{body['store_id']}/{body['generation']}/{array}/{chunk}"
            assert digest_of(piece, context) == expected
        assert ends == [len(d) for d in data]


def test_tensors_are_named_for_the_elements_that_they_hold(checkpoint, body):
    """Runs are maximal, in element-space order, and readable with the safetensors library."""
    on, starts = owners(body), chunk_starts(body)
    for array, _, block in body["arrays"]:
        expected: list[list[tuple[str, int, int]]] = [[] for _ in body["shares"]]
        first = 0
        for name, _, shape, _, arrays in body["parameters"]:
            length = math.prod(shape)
            if array in arrays and not length:
                expected[0].append((name, 0, 0))
            for element in range(length) if array in arrays else ():
                runs = expected[on[bisect_right(starts, first + element) - 1]]
                if runs and runs[-1][::2] == (name, element):
                    runs[-1] = (name, runs[-1][1], element + 1)
                else:
                    runs.append((name, element, element + 1))
            first += length
        shapes = {name: shape for name, _, shape, *_ in body["parameters"]}
        for place, runs in zip(places(checkpoint, body), expected, strict=True):
            whole = {run[0] for run in runs if run[2] - run[1] == math.prod(shapes[run[0]])}
            names = [n if n in whole else f"{n}[{start}:{stop}]" for n, start, stop in runs]
            path = place / f"{array}.safetensors"
            _, header, _ = read_tensor_file(path)
            assert list(header) == names
            with safetensors.safe_open(path, "pt") as opened:
                assert set(opened.keys()) == set(names)
                for name, (parameter, start, stop) in zip(names, runs, strict=True):
                    found = opened.get_tensor(name)
                    if block > 1:
                        assert found.dim() == 1
                    elif parameter in whole:
                        assert list(found.shape) == shapes[parameter]
                    else:
                        assert list(found.shape) == [stop - start]


def test_the_store_is_named(checkpoint, body):
    if len(body["shares"]) == 1:
        assert not (checkpoint.parent / "store.json").exists()
        return
    raw = (checkpoint.parent / "store.json").read_bytes()
    assert len(raw) == 512
    assert json.loads(raw) == {"format": 1, "store_id": body["store_id"]}
