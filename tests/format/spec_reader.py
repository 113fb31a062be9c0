"""A reader of FP32 state, written from docs/format.md alone, sharing no code with the library."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I16": "<i2", "I8": "i1", "U8": "u1"}


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the body."""
    document = json.loads((checkpoint / "manifest.json").read_text())
    assert document["format"] == 1
    body: dict[str, Any] = document["body"]
    return body


def chunk_starts(body: dict[str, Any]) -> list[int]:
    """Return where each chunk begins in element space, and one past the last element."""
    sizes = [math.prod(shape) for _, _, shape, *_ in body["parameters"]]
    grid, total = body["chunk_elements"], sum(sizes)
    starts = []
    for multiple in range(0, total, grid):
        begin, at = 0, multiple
        for size in sizes:
            if begin < multiple < begin + size and body["state_dtype"] == "int8":
                inside = multiple - begin
                at = begin + min(32 * math.ceil(inside / 32), size)
            begin += size
        if at < total:
            starts.append(at)
    return [*starts, total]


def blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yield the blocks of 32 of a parameter or box: first element, and one past the last."""
    for start in range(0, size, 32):
        yield start, min(start + 32, size)


def read_tensor_file(path: Path) -> tuple[int, dict[str, Any], bytes]:
    """Return where the data begins, the JSON, and the data."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return 8 + length, json.loads(raw[8 : 8 + length]), raw[8 + length :]


def read_tensor(path: Path, name: str) -> tuple[str, list[int], np.ndarray]:
    """Return dtype, shape and the flat values of a tensor; BF16 as 16-bit integers."""
    _, header, data = read_tensor_file(path)
    entry = header[name]
    start, stop = entry["data_offsets"]
    values = np.frombuffer(data[start:stop], dtype=_NUMPY[entry["dtype"]])
    return entry["dtype"], entry["shape"], values


def widened(dtype: str, values: np.ndarray) -> np.ndarray:
    """Return stored values as FP32."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def rounded(dtype: str, values: np.ndarray) -> np.ndarray:
    """Round FP32 to nearest, ties to even, as the bits of a 16-bit dtype."""
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    wide = values.view(np.uint32).astype(np.uint64)
    found = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), found)


def fp32_state(checkpoint: Path, name: str) -> dict[str, np.ndarray]:
    """Return the FP32 value of a parameter, as ``master``, and of each of its state arrays."""
    body = read_manifest(checkpoint)
    entry = next(p for p in body["parameters"] if p[0] == name)
    scalars = body["scalars"][body["parameters"].index(entry)]
    _, dtype, shape, _, arrays = entry
    _, _, live = read_tensor(checkpoint / "model.safetensors", name)
    parameter = widened(dtype, live)
    found = {"master": parameter}
    stored = {a: read_tensor(checkpoint / f"{a}.safetensors", name) for a in arrays}
    with np.errstate(all="ignore"):
        for array, (code, _, values) in stored.items():
            if array.endswith("_scale") or array in ("master", "master_low"):
                continue
            if scalars is None:
                found[array] = np.zeros(len(live), dtype=np.float32)
            elif code in ("I8", "U8"):
                _, _, scales = stored[f"{array}_scale"]
                found[array] = _from_8_bits(code, values, scales)
            else:
                found[array] = widened(code, values)
    if scalars is not None and "master_low" in stored:
        low = stored["master_low"][2].astype(np.int64)
        whole = (((live.astype(np.int64) << 16) + low) % (1 << 32)).astype(np.uint32)
        master = whole.view(np.float32)
        found["master"] = np.where(np.isnan(master), parameter, master)
    elif scalars is not None and "master" in stored:
        master = stored["master"][2]
        same = rounded(dtype, master) == live.view(np.uint16)
        found["master"] = np.where(same, master, parameter)
    return {array: values.reshape(shape) for array, values in found.items()}


def _from_8_bits(code: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    out = np.empty(len(codes), dtype=np.float32)
    of_blocks = list(blocks(len(codes)))
    assert len(of_blocks) == len(scales)
    for (start, stop), s in zip(of_blocks, widened("BF16", scales), strict=True):
        c = codes[start:stop].astype(np.float32)
        if code == "I8":
            out[start:stop] = c / (np.float32(254) - np.abs(c)) * s
        else:
            root = c * np.float32(1 / 255) * s
            out[start:stop] = root * root
    return out


def owner_parts(checkpoint: Path, *stores: Path) -> Iterator[tuple[dict[str, Any], Path, dict]]:
    """Yield reference, directory and table of each owner's part, checked against the manifest."""
    body = read_manifest(checkpoint)
    for reference in body["owners"]:
        for store in (checkpoint.parent, *stores):
            part = store / f"owner-{reference['owner']}" / reference["name"]
            if not (part / "table.json").exists():
                continue
            document = json.loads((part / "table.json").read_text())
            table = document["body"]
            canonical = json.dumps(table, sort_keys=True, separators=(",", ":"))
            digest = hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
            assert document["format"] == 1
            assert ("model_file" in table) == ("model_file" in body)
            assert document["digest"] == digest == reference["digest"]
            assert table["owner"] == reference["owner"]
            for key in ("store_id", "generation"):
                assert table[key] == body[key]
            assert reference["generation"] == body["generation"]
            yield reference, part, table
            break


def owned_state(directory: Path, described: dict[str, Any]) -> dict[str, dict[tuple, np.ndarray]]:
    """Return the stored values of the boxes of one owner, by array, then by name and box.

    `described` is the body of the manifest for owner 0, and of the table for another owner. Every
    chunk is compared with its digest.
    """
    found: dict[str, dict[tuple, np.ndarray]] = {}
    starts = chunk_starts({**described, "parameters": [_boxed(p) for p in _listed(described)]})
    for array, dtype, _ in described["arrays"]:
        path = directory / f"{array}.safetensors"
        held = [p for p in _listed(described) if array in p[4]]
        _, header, data = read_tensor_file(path)
        item = np.dtype(_NUMPY[dtype]).itemsize
        assert list(header) == [_stored_name(p) for p in held]
        found[array] = {}
        for p in held:
            _, shape, values = read_tensor(path, _stored_name(p))
            assert shape == _boxed(p)[2]
            offsets = p[5][0] if len(p) > 5 else [0] * len(shape)
            found[array][p[0], tuple(offsets)] = values.reshape(shape)
        # The digest of each chunk: the elements of the chunk whose parameters have the array.
        at, cuts = 0, []
        for p in _listed(described):
            size = math.prod(_boxed(p)[2])
            cuts.append((at, at + size, array in p[4]))
            at += size
        done = 0
        for chunk, (first, last) in enumerate(pairwise(starts)):
            num = sum(max(0, min(b, last) - max(a, first)) for a, b, has in cuts if has)
            expected = described["digests"][array][chunk]
            context = f"{described['store_id']}/{described['generation']}/{array}/{chunk}"
            assert digest_of(data[done : done + num * item], context) == expected
            done += num * item
        assert done == len(data)
    return found


def check_model_boxes(checkpoint: Path, *described: dict[str, Any]) -> int:
    """Compare boxes of the model with their digests; return how many bytes they have.

    `described` are the body of the manifest, and those of tables.
    """
    body = read_manifest(checkpoint)
    shapes = {name: (shape, dtype) for name, dtype, shape, _ in body["model"]}
    total = 0
    for owner in described:
        for name, offsets, sizes, digests in owner["model_boxes"]:
            shape, dtype = shapes[name]
            _, _, values = read_tensor(checkpoint / "model.safetensors", name)
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            data = np.ascontiguousarray(values.reshape(shape)[box]).tobytes()
            assert len(digests) == math.ceil(len(data) / (16 << 20)), dtype
            for piece, expected in enumerate(digests):
                array = f"model/{name}{_notation(offsets, sizes)}"
                context = f"{body['store_id']}/{body['generation']}/{array}/{piece}"
                cut = data[piece * (16 << 20) : (piece + 1) * (16 << 20)]
                assert digest_of(cut, context) == expected
            total += len(data)
    return total


def model_of_shards(checkpoint: Path, *parts: tuple[Path, dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the model that is in the shard files of a checkpoint, by tensor.

    Every file is compared with what the manifest, or the table of the part, says of it.

    Args:
        checkpoint: Directory of the checkpoint.
        parts: Directory and table of each owner's part.
    """
    body = read_manifest(checkpoint)
    assert "model_digests" not in body
    found, counts = {}, {}
    for name, dtype, shape, _ in body["model"]:
        found[name] = np.zeros(shape, dtype=_NUMPY[dtype])
        counts[name] = np.zeros(shape, dtype=int)
    for directory, described in ((checkpoint, body), *parts):
        number = described.get("owner", 0) + 1
        assert (
            described["model_file"] == f"model/shard-{number:05}-model-00001-of-00001.safetensors"
        )
        path = directory / described["model_file"]
        assert [*path.parent.iterdir()] == [path]
        data_start, header, _ = read_tensor_file(path)
        assert data_start % 4096 == 0
        metadata = header.pop("__metadata__")
        assert metadata["DCP_VERSION"] == "1.0"
        offsets_of = json.loads(metadata["DCP_SHARDING_INFO"])
        empty = [name for name, _, shape, _ in body["model"] if 0 in shape] if number == 1 else []
        assert list(header) == [box[0] for box in described["model_boxes"]] + empty
        assert set(offsets_of) == set(header)
        for name, offsets, sizes, digests in described["model_boxes"]:
            assert offsets_of[name] == {"saved_offsets": offsets}
            assert header[name]["shape"] == sizes
            _, shape, values = read_tensor(path, name)
            data = values.tobytes()
            assert len(digests) == math.ceil(len(data) / (16 << 20))
            for piece, expected in enumerate(digests):
                array = f"model/{name}{_notation(offsets, sizes)}"
                context = f"{body['store_id']}/{body['generation']}/{array}/{piece}"
                cut = data[piece * (16 << 20) : (piece + 1) * (16 << 20)]
                assert digest_of(cut, context) == expected
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            found[name][box] = values.reshape(shape)
            counts[name][box] += 1
    assert all((count == 1).all() for count in counts.values())
    return found


def digest_of(data: bytes, context: str) -> str:
    """Return the digest of some bytes; `context` is the text that is appended."""
    leaves = b"".join(
        xxhash.xxh3_64_intdigest(data[at : at + (1 << 20)]).to_bytes(8, "little")
        for at in range(0, len(data), 1 << 20)
    )
    return xxhash.xxh3_64_hexdigest(leaves + context.encode())


def _listed(described: dict[str, Any]) -> list[list[Any]]:
    parameters: list[list[Any]] = described["parameters"]
    return parameters


def _boxed(parameter: list[Any]) -> list[Any]:
    """Return a parameter with the shape of its box in the place of its own shape."""
    return [*parameter[:2], parameter[5][1] if len(parameter) > 5 else parameter[2], *parameter[3:]]


def _stored_name(parameter: list[Any]) -> str:
    box = "" if len(parameter) == 5 else _notation(*parameter[5])
    return f"{parameter[0]}{box}"


def _notation(offsets: list[int], sizes: list[int]) -> str:
    parts = [f"{o}:{o + s}" for o, s in zip(offsets, sizes, strict=True)]
    return f"[{parts[0]},]" if len(parts) == 1 else f"[{', '.join(parts)}]"
