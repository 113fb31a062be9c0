"""What a checkpoint says of a parameter that was edited before it: one answer from every reader.

The live parameter wins, as in the next step: an element that is not what its master rounds to is
its own FP32 value. With split masters the edited parameter is the upper half, and the lower half
stays.
"""

from __future__ import annotations

from typing import Any

import pytest
import safetensors.torch
import torch

import offload
from gds import Backend, Buffer, File, IOFuture, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload import export_checkpoint
from tests.numerics.models import trainable
from tests.numerics.pairs import CASES, CUTS, Cut, Pair, memory_pair
from tests.numerics.reference import assert_same_bits, bits
from tests.numerics.test_live_parameter_wins import EDITS

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "split": {"master": "split"},
    "bfloat16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8"},
}


def expected_masters(pair: Pair, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the FP32 value of every parameter that has state, given the masters before an edit."""
    found = {}
    for name, live in trainable(pair.live).items():
        live = live.detach()
        if name not in before or live.dtype == torch.float32:
            found[name] = live.float()
            continue
        if pair.cut.settings.get("master") == "split" and live.dtype == torch.bfloat16:
            low = (bits(before[name]) << 16) >> 16  # with its sign
            joined = ((bits(live).to(torch.int32) << 16) + low).view(torch.float32)
            found[name] = torch.where(joined.isnan(), live.float(), joined)
            continue
        edited = bits(before[name].to(live.dtype)) != bits(live)
        found[name] = torch.where(edited, live.float(), before[name])
    return found


def trained(settings: dict[str, Any]) -> tuple[Pair, dict[str, torch.Tensor]]:
    """Train for a while; returns the masters of what has state, by name."""
    cut = Cut(CUTS[0].chunk_bytes, CUTS[0].ring_chunks, None, settings)
    pair = memory_pair(CASES["adamw"], cut)
    for step in range(5):
        pair.step_live(step)
    checkpoint = pair.optimizer.checkpoint({"before": True}).result()
    names = [
        spec.name
        for spec, scalars in zip(
            checkpoint.manifest.layout.parameters, checkpoint.manifest.scalars, strict=True
        )
        if scalars is not None
    ]
    return pair, {name: offload.read_state(checkpoint, name)["master"] for name in names}


@pytest.mark.parametrize(
    ("edit", "form"),
    [
        *(("one-element", form) for form in FORMATS),
        ("infinities-and-zeros", "split"),
        ("infinities-and-zeros", "int8"),
        ("clamping", "float32"),
        ("loading-weights", "split"),
        ("writing-through-data", "bfloat16"),
        ("replacing-data", "int8"),
    ],
)
def test_the_edited_value_is_the_master(edit, form):
    pair, before = trained(FORMATS[form])
    pair.edit(EDITS[edit])
    expected = expected_masters(pair, before)
    names = [name for name in before if not torch.equal(expected[name], before[name])]
    assert len(names) > 5, "nothing was edited"
    checkpoint = pair.optimizer.checkpoint().result()
    export_checkpoint(checkpoint, "/exported", "safetensors")
    file = pair.backend.open("/exported/master.safetensors")
    exported = safetensors.torch.load(file.read_bytes(0, file.size_bytes))
    given = [p for group in pair.optimizer.param_groups for p in group["params"]]
    numbers = {p: number for number, p in enumerate(given)}
    full = pair.optimizer.full_state_dict()["master"]
    for name, live in trainable(pair.live).items():
        read = offload.read_state(checkpoint, name)["master"]
        assert_same_bits(read, expected[name], f"read_state of {name}")
        if live.dtype != torch.float32:
            assert_same_bits(exported[name], expected[name], f"exported {name}")
            assert_same_bits(full[numbers[live]], expected[name], f"full_state_dict of {name}")
    assert checkpoint.verify().ok


class Reads(WrapperBackend):
    """A backend whose files count the bytes that are read of them."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.read_bytes = 0

    def wrap_file(self, file: File) -> File:
        return _File(self, file)


class _File(WrapperFile):
    def __init__(self, reads: Reads, inner: File) -> None:
        super().__init__(inner)
        self._reads = reads

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        self._reads.read_bytes += nbytes
        return super().read_bytes(offset, nbytes)

    def read(self, into: Buffer, offset: int) -> IOFuture:
        self._reads.read_bytes += into.nbytes
        return super().read(into, offset)


@pytest.mark.parametrize("settings", [{}, {"state_dtype": "int8"}], ids=str)
def test_only_the_chunks_that_hold_the_parameter_are_read(settings):
    """They are read as a whole, because their digests are compared; the model, block by block."""
    pair, _ = trained(settings)
    path = pair.optimizer.checkpoint().result().path
    reads = Reads(pair.backend)
    with offload.open_checkpoint(path, backend=reads) as checkpoint:
        layout = checkpoint.manifest.layout
        index = next(i for i, p in enumerate(layout.parameters) if p.name == "big")
        ranges = [
            layout.byte_range(array, chunk)
            for array in layout.array_names
            for chunk in layout.chunks_of(index)
        ]
        stored = sum(size for _, size in ranges)
        model = layout.model_header.file_bytes
        before = reads.read_bytes
        offload.read_state(checkpoint, "big")
        assert stored <= reads.read_bytes - before <= stored + model
        assert stored < layout.state_bytes
