"""Files of `torch.save`, whose tensors stay on storage: what torch's loader gives, or a refusal."""

from __future__ import annotations

import random
import struct
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload.errors import CheckpointError
from offload.exchange.stored_tensor import StoredTensor
from offload.exchange.torch_files import read_structure
from tests.numerics.reference import assert_same_bits


class WithAttributes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 4))
        self.weight.note = "kept by torch as state of the parameter"
        self.register_buffer("table", torch.arange(5))


def structures() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.randn(6, 8)
    module = WithAttributes()
    tensor = torch.randn(2, 2)
    tensor.note = "an attribute"
    return {
        "tensors of every dtype": {
            str(dtype): torch.zeros(3, dtype=dtype)
            for dtype in (
                *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
                *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16),
                *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
            )
        },
        "views": {
            "whole": base,
            "rows": base[2:5],
            "columns": base[:, 1:3],
            "transposed": base.t(),
            "every second": base[::2, ::2],
            "a number": base[3, 4],
            "nothing": base[:0],
            "of size one": base[:1].expand(1, 8),
            "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        },
        "builtins": {
            "list": [1, -1, 255, 256, 65536, -(1 << 31), 1 << 40, -(1 << 70), 1.5, float("inf")],
            "text": ["", "a", "\u00fc", "\U0001f600", "x" * 300, "\ud800"],
            "bytes": [b"abc", bytes(range(256)), b"y" * 300],
            "others": [None, True, False, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), 1 + 2j],
            "sets": {1, 2, 3},
            "counter": Counter("abca"),
            "ordered": OrderedDict([(1, 2), ("a", "b")]),
            7: {"nested": [{"deep": [[[[1]]]]}]},
            (1, "x"): "a tuple as key",
        }
        | {},
        "module": module.state_dict(),
        "parameters": [module.weight, torch.nn.Parameter(tensor, requires_grad=False)],
        "an attribute": tensor,
        "tied": [base, base, {"again": base}],
        "sizes": [torch.Size([1, 2]), base.shape, torch.bfloat16, torch.strided],
        "one tensor": base,
        "many": [torch.full((k % 7,), k) for k in range(300)],
    }


def same(mine: Any, theirs: Any) -> None:
    if isinstance(theirs, torch.Tensor):
        assert isinstance(mine, StoredTensor)
        assert (mine.shape, mine.dtype) == (tuple(theirs.shape), theirs.dtype)
        found = mine.read(0, theirs.numel())
        assert_same_bits(found, theirs.detach().reshape(-1), "values")
        half = theirs.numel() // 2
        assert_same_bits(
            mine.read(half, theirs.numel()), theirs.detach().reshape(-1)[half:], "half"
        )
    elif isinstance(theirs, dict):
        assert type(mine) is dict
        assert list(mine) == list(theirs)
        for key in theirs:
            same(mine[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert isinstance(mine, list | tuple)
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            same(a, b)
    elif theirs is not torch.strided:
        assert mine == theirs
        assert type(mine) is type(theirs)


@pytest.mark.parametrize("name", structures())
def test_it_is_what_torch_loads(name, tmp_path):
    path = tmp_path / "file.pt"
    torch.save(structures()[name], path)
    same(read_structure(str(path)), torch.load(path, weights_only=True))


def test_numbers_of_numpy_are_read(tmp_path):
    torch.save({"lr": np.float64(0.5), "step": np.int64(3), "on": np.bool_(True)}, tmp_path / "f")
    assert read_structure(str(tmp_path / "f")) == {"lr": 0.5, "step": 3, "on": True}


def test_a_later_protocol_is_refused_with_the_remedy(tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "f", pickle_protocol=5)
    with pytest.raises(CheckpointError, match="Unsupported operand 149"):
        read_structure(str(tmp_path / "f"))


def test_a_tensor_of_4_gib_is_found_in_a_file_of_its_size(tmp_path):
    """Such archives say sizes and places in other fields. The file is a hole."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    path = tmp_path / "large.pt"
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({"a": torch.empty((5 << 30) // 4), "b": torch.empty(3)}, path)
    found = read_structure(str(path))
    with path.open("r+b") as file:
        file.seek(found["b"].offset)
        file.write(struct.pack("<3f", 1, 2, 3))
    assert found["b"].read(0, 3).tolist() == [1, 2, 3]
    assert found["b"].offset > 5 << 30
    assert found["a"].shape == ((5 << 30) // 4,)


def test_a_file_that_is_cut_or_damaged_anywhere_is_refused(tmp_path):
    path = tmp_path / "theirs.pt"
    state = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"params": [0]}]}
    torch.save(state, path)
    written, refused = path.read_bytes(), 0
    for at in range(0, len(written), 7):
        for damaged in (written[:at], written[:at] + b"r" + written[at + 1 :]):
            path.write_bytes(damaged)
            refused += bool(refusal(path))
    assert refused > len(written) // 7


def test_mutated_files_are_refused_and_nothing_else(tmp_path):
    """Bytes changed, cut out and put in, within the structure and the list of records."""
    draw = random.Random(20261122)
    path = tmp_path / "file.pt"
    torch.save(structures()["builtins"] | structures()["views"], path)
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(next(n for n in archive.namelist() if n.endswith("data.pkl")))
    structure = (info.header_offset, info.header_offset + info.file_size + 100)
    listed = (good.index(b"PK\x01\x02"), len(good))
    refused = 0
    for number in range(400):
        first, last = structure if number % 3 else listed
        data = bytearray(good)
        for _ in range(draw.choice([1, 1, 2, 5])):
            at = draw.randrange(first, min(last, len(data)))
            what = draw.randrange(4)
            if what == 0:
                data[at] = draw.randrange(256)
            elif what == 1:
                data[at] ^= 1 << draw.randrange(8)
            elif what == 2:
                data[at : at + draw.randrange(1, 9)] = draw.randbytes(draw.randrange(0, 9))
            else:
                other = draw.randrange(first, min(last, len(data)))
                data[at : at + 6] = data[other : other + 6]
        path.write_bytes(data)
        if message := refusal(path):
            refused += 1
            assert str(path) in message
            assert len(message) < 1000
    assert refused > 200


def refusal(path: Path) -> str:
    """Return why a file is refused; empty if it is not."""
    try:
        read_structure(str(path))
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_file_of_the_other_byte_order_is_refused(tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "good.pt")
    with (
        zipfile.ZipFile(tmp_path / "good.pt") as source,
        zipfile.ZipFile(tmp_path / "big.pt", "w") as out,
    ):
        for name in source.namelist():
            out.writestr(name, b"big" if name.endswith("byteorder") else source.read(name))
    with pytest.raises(CheckpointError, match="byte order is 'big'"):
        read_structure(str(tmp_path / "big.pt"))
