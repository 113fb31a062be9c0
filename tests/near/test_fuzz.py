"""Conversations in which a frame was changed at random, in either direction.

Whatever arrives, a client ends in a named error or goes on, the server lives on, and the run can be
continued. OFFLOAD_FUZZ_SEED makes it another run, OFFLOAD_FUZZ_EXAMPLES a longer one.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from offload.errors import OffloadError
from tests.campaigns import FULL
from tests.limits import SHORT_AGREEMENT_S
from tests.near.peers import BLOB, GRADIENT, PARAMETER, TENSOR, frame
from tests.near.proxy import Proxy, Way
from tests.near.servers import Server
from tests.near.training import are_same, copied, expected, make_model, make_optimizer, train
from tests.process_memory import resident_bytes

SEED = int(os.environ.get("OFFLOAD_FUZZ_SEED", "20261129"))
NUM_EXAMPLES = int(os.environ.get("OFFLOAD_FUZZ_EXAMPLES", "400" if FULL else "40"))
MAX_GROWTH_BYTES = 256 << 20

_VALUES: list[Any] = [
    *(None, True, 0, -1, 1, 1.5, 10**18, 1 << 62, -(1 << 62), 1e300, "", "a", "../../etc/passwd"),
    *("a\0b", "\ud800", "x" * 3000, [], {}, [[]], [None], {"a": 1}, [0] * 3000),
    *("AdamW", "BF16", "NearError", "KeyboardInterrupt", "SystemExit", [1 << 40, 1 << 40]),
]


class Changing:
    """Changes one frame of a conversation: the content, its length, or its header.

    Args:
        chance: Source of random choices.
        way: Direction of the frame.
    """

    def __init__(self, chance: Random, way: Way) -> None:
        self._chance, self._way = chance, way
        self._left = chance.randrange(24)
        self.what = "nothing"

    def __call__(self, way: Way, header: bytes, content: bytes) -> bytes:
        """Return what arrives in place of a frame."""
        if way != self._way or self.what != "nothing":
            return header + content
        self._left -= 1
        if self._left >= 0:
            return header + content
        kind, number = header[4], int.from_bytes(header[8:12], "little")
        index = int.from_bytes(header[12:16], "little")
        has_values = kind in (GRADIENT, PARAMETER, TENSOR, BLOB)
        how = self._chance.choice(
            ["header", "bytes"] if has_values else ["header", "value", "value"]
        )
        self.what = f"{how} of kind {kind}"
        if how == "value" and content:
            content = json.dumps(self._with_another_value(json.loads(content))).encode()
            return frame(kind, number, content, index=index) + content
        changed = bytearray(header if how == "header" or not content else content)
        changed[self._chance.randrange(len(changed))] ^= 1 << self._chance.randrange(8)
        return bytes(changed) + content if len(changed) == 32 else header + bytes(changed)

    def _with_another_value(self, document: Any) -> Any:
        found = place = copy.deepcopy(document)
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            if not keys:
                return self._chance.choice(_VALUES)
            key = self._chance.choice(keys)
            if not isinstance(place[key], dict | list) or self._chance.random() < 0.2:
                break
            place = place[key]
        self.what += f" at {key}"
        if self._chance.random() < 0.2:
            del place[key]
        else:
            place[key] = self._chance.choice(_VALUES)
        return found


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A proxy before the server."""
    found = Proxy(server.socket)
    yield found
    found.close()


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """The values after each step."""
    return expected(tmp_path_factory.mktemp("local") / "run", 4)


def _converse(url: str) -> None:
    """Use everything that crosses the connection."""
    model = make_model()
    optimizer = make_optimizer(model, url, SHORT_AGREEMENT_S, fresh=True)
    try:
        train(model, optimizer, 1, 2)
        optimizer.checkpoint({"step": 2}, metrics={"loss": 1.0}).result()
        optimizer.checkpoints()
        optimizer.pin("a")
        optimizer.unpin("a")
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(optimizer.full_state_dict())
        optimizer.stats()
        train(model, optimizer, 3, 3)
        optimizer.restore()
        train(model, optimizer, 3, 3)
        optimizer.close()
    except BaseException:
        optimizer._engine._link.drop()  # type: ignore[union-attr]
        raise


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_changed_frame_ends_in_a_named_error_or_is_as_good(
    way: Way,
    proxy: Proxy,
    server: Server,
    values: list[dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    chance = Random(SEED)
    _converse(proxy.url("fuzzed"))
    before, server_before = resident_bytes("VmHWM"), server.status("VmHWM")
    refused = 0
    for number in range(NUM_EXAMPLES):
        proxy.change = changing = Changing(chance, way)
        said = f"example {number} of seed {SEED}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _converse(proxy.url("fuzzed"))
        except OffloadError:
            refused += 1
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            error.add_note(f"{said}: {changing.what}")
            if "the server at " not in str(error):  # then it is none that a server has sent
                raise
            refused += 1
        assert server.process.poll() is None, f"{said}: {changing.what}"
    assert refused > NUM_EXAMPLES // 8
    assert resident_bytes("VmHWM") < before + MAX_GROWTH_BYTES
    assert server.status("VmHWM") < server_before + (MAX_GROWTH_BYTES >> 10)
    model = make_model()
    with make_optimizer(model, server.url("fuzzed"), fresh=True) as optimizer:
        train(model, optimizer, 1, 4)
        assert are_same(copied(model), values[4])
