"""What users keep beside hyper-parameters is in `state_dict()` by value, whatever it is."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import offload
from gds import MemoryBackend

Pair = namedtuple("Pair", ["values", "name"])


@pytest.fixture
def optimizer() -> Iterator[offload.AdamW]:
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True)
    model = torch.nn.Linear(4, 4)
    with offload.AdamW(model.parameters(), directory="/run", options=options) as found:
        yield found


@pytest.mark.parametrize("kind", [list, tuple, Pair._make], ids=["list", "tuple", "namedtuple"])
def test_a_tensor_in_a_container_is_copied(kind: type, optimizer: offload.AdamW) -> None:
    values = torch.ones(3)
    optimizer.param_groups[0]["note"] = kind([values, "a"])
    found = optimizer.state_dict()["param_groups"][0]["note"]
    values.add_(1)
    assert type(found) is type(optimizer.param_groups[0]["note"])
    assert torch.equal(found[0], torch.ones(3))
    assert found[1] == "a"


def test_an_array_is_copied(optimizer: offload.AdamW) -> None:
    values = np.ones(3)
    optimizer.param_groups[0]["note"] = values
    found = optimizer.state_dict()["param_groups"][0]["note"]
    values += 1
    assert found.tolist() == [1.0, 1.0, 1.0]


def test_a_scalar_of_numpy_becomes_a_builtin(optimizer: offload.AdamW) -> None:
    optimizer.param_groups[0]["note"] = np.float32(0.5)
    found = optimizer.state_dict()["param_groups"][0]["note"]
    assert type(found) is float
    assert found == 0.5
