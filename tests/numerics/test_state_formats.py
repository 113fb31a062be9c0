"""Smaller state formats: the streamed update equals an in-memory one that rounds the same way.

The oracle keeps FP32 masters and torch's own state in memory, whole, and passes each parameter's
through the codec once per step. How a codec rounds is in test_state_in_fewer_bits.py; here, that
chunks, blocks, rings, seals and resumes make no difference to what it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import offload
import offload.update.updater
from gds import MemoryBackend
from offload.errors import MismatchError, UnsupportedOptimizerError
from offload.format import rounding_keys
from offload.update.coding import blocks8, rounding
from offload.update.scratch import Scratch
from tests.numerics.models import Mixed
from tests.numerics.pairs import CASES, Case, Cut, Pair
from tests.numerics.reference import Reference

SETTINGS: dict[str, dict[str, Any]] = {
    "split": {"master": "split"},
    "bfloat16": {"state_dtype": "bfloat16", "rounding_seed": 3},
    "int8": {"state_dtype": "int8"},
    "split-int8": {"master": "split", "state_dtype": "int8"},
    "split-bfloat16-resident": {
        "master": "split", "state_dtype": "bfloat16", "rounding_seed": 3, "host_memory": 60_000,
    },
}  # fmt: skip
FORMATS = {
    name: {k: v for k, v in settings.items() if k != "host_memory"}
    for name, settings in SETTINGS.items()
}
CUTS = [(4096, 2, 777), (3 * 4096, 3, None), (1 << 20, 2, 1291)]


FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def in_whole_vectors(values: torch.Tensor) -> torch.Tensor:
    """Return a flat copy with zeros behind it, up to a multiple of 16 elements."""
    return torch.nn.functional.pad(values.detach().reshape(-1), (0, -values.numel() % 16)).clone()


def rounded_away(master: torch.Tensor) -> torch.Tensor:
    """Round FP32 to bf16, ties away from zero in bit space, as numpy computes it."""
    wide = master.detach().reshape(-1).numpy().view(np.uint32).astype(np.uint64)
    upper = ((wide + 0x8000) >> 16).astype(np.uint16)
    return torch.from_numpy(upper.view(np.int16)).view(torch.bfloat16).view(master.shape)


class Rounding(Reference):
    """The oracle, with what a smaller format keeps of each value after a step."""

    settings: Mapping[str, Any] = {}
    names: Mapping[torch.Tensor, str] = {}

    def __init__(self, optimizer_class: type, params: Iterable[Any], **hyper: Any) -> None:
        groups = list(params)
        super().__init__(optimizer_class, groups, **hyper)
        self.num_steps = 0

    def _step_inner(self) -> None:
        """Step whole tensors with torch's fused kernel, in whole vectors, where ours uses it."""
        if "state_dtype" not in self.settings or type(self.inner) not in FUSED:
            self.inner.step()
            return
        for group in self.inner.param_groups:
            for master in group["params"]:
                state = self.inner.state.get(master, {})
                if master.grad is None:
                    continue
                arrays = {n: v for n, v in state.items() if n != "step" and v is not None}
                scalars = {n: v for n, v in state.items() if n not in arrays and v is not None}
                hyper = {**group, "fused": bool(arrays)}
                whole = torch.nn.Parameter(in_whole_vectors(master.detach()))
                whole.grad = in_whole_vectors(master.grad)
                optimizer = type(self.inner)([{**hyper, "params": [whole]}])
                optimizer.state[whole] = {
                    **{name: in_whole_vectors(value) for name, value in arrays.items()},
                    **scalars,
                }
                if not state:
                    optimizer.state.clear()
                optimizer.step()
                shape, count = master.shape, master.numel()
                master.data.copy_(whole.detach()[:count].view(shape))
                self.inner.state[master] = {
                    name: value[:count].view(shape).clone()
                    if isinstance(value, torch.Tensor) and value.dim()
                    else value
                    for name, value in optimizer.state[whole].items()
                }

    def step(self) -> None:
        before = {p: p.detach().clone() for p in self.masters}
        if self.settings.get("master") == "split":
            for live, master in self.masters.items():
                if live.dtype == torch.bfloat16:  # hide from the base class what it would "edit"
                    live.data.copy_(master.detach().to(torch.bfloat16))
        super().step()
        self.num_steps += 1
        for live, master in self.masters.items():
            stepped = live.grad is not None
            if self.settings.get("master") == "split" and live.dtype == torch.bfloat16:
                live.data.copy_(rounded_away(master) if stepped else before[live])
            if stepped:
                for name, value in self.inner.state[master].items():
                    if name != "step" and isinstance(value, torch.Tensor):
                        value.copy_(self.kept(name, value, live))

    def kept(self, name: str, value: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        """Return what storage keeps of a state array of a parameter."""
        flat, scratch = value.reshape(-1).contiguous(), Scratch()
        if self.settings.get("state_dtype") == "bfloat16":
            out = torch.empty(flat.shape, dtype=torch.bfloat16)
            number = rounding_keys.name_numbers([self.names[live]])
            keys = rounding_keys.ParameterKeys(number, 3, name, self.num_steps)
            rounding.round_stochastic(flat, out, key=keys.of(0), first_element=0, scratch=scratch)
            return out.float().view(value.shape)
        if self.settings.get("state_dtype") == "int8":
            signed = name in ("exp_avg", "momentum_buffer")
            part, result = flat.clone(), torch.empty_like(flat)
            codes = torch.empty(len(part), dtype=torch.int8 if signed else torch.uint8)
            scales = torch.empty(-(-len(part) // 32), dtype=torch.bfloat16)
            blocks8.encode_blocks(part, codes, scales, scratch=scratch)
            blocks8.decode_blocks(codes, scales, result, scratch=scratch)
            return result.view(value.shape)
        return value


def make_pair(
    name: str,
    cut: tuple[int, int, int | None],
    case: Case = CASES["adamw"],
) -> Pair:
    expected = Mixed()
    known = {
        "settings": SETTINGS[name],
        "names": {p: n for n, p in expected.named_parameters()},
    }
    oracle = type("Oracle", (Rounding,), known)
    return Pair(
        case,
        Cut(*cut, SETTINGS[name]),
        MemoryBackend(),
        expected=expected,
        reference=oracle,
        keep=2,
    )


def blocks(monkeypatch: pytest.MonkeyPatch, cut: tuple[int, int, int | None]) -> None:
    if cut[2] is not None:
        monkeypatch.setattr(offload.update.updater, "HOT_ELEMENTS", cut[2])


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("split", CUTS[0]),
        ("bfloat16", CUTS[1]),
        ("int8", CUTS[2]),
        ("split-int8", CUTS[1]),
        ("split-bfloat16-resident", CUTS[0]),
    ],
    ids=str,
)
def test_streaming_rounds_as_memory_does(name, cut, monkeypatch):
    blocks(monkeypatch, cut)
    pair = make_pair(name, cut)
    pair.steps(14)
    pair.optimizer.close()


@pytest.mark.parametrize(
    ("name", "case"),
    [("bfloat16", "rmsprop-centered-momentum"), ("bfloat16", "sgd-nesterov"),
     ("int8", "adamw-amsgrad"), ("int8", "sgd-momentum-in-some-groups"), ("split", "nadam")],
)  # fmt: skip
def test_other_optimizers(name, case):
    pair = make_pair(name, CUTS[0], CASES[case])
    pair.steps(10)
    assert pair.optimizer.checkpoint().result().verify().ok


@pytest.mark.parametrize(
    ("name", "bytes_per_parameter"),
    [("split", 10.0), ("bfloat16", 8.0), ("int8", 6.125), ("split-int8", 4.125)],
)
def test_a_step_moves_as_few_bytes_as_promised(name, bytes_per_parameter, tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(1 << 20, dtype=torch.bfloat16))
    options = offload.Options(chunk_bytes=1 << 20, **FORMATS[name])
    with offload.AdamW([parameter], directory=tmp_path / "run", options=options) as optimizer:
        for _ in range(3):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        optimizer.synchronize()
        before = optimizer.stats()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.synchronize()
        after = optimizer.stats()
    assert after.state_bytes == bytes_per_parameter * parameter.numel()
    assert after.bytes_written - before.bytes_written == after.state_bytes


@pytest.mark.parametrize("name", ["split", "int8", "bfloat16"])
def test_a_store_cannot_be_resumed_in_another_format(name):
    pair = make_pair(name, CUTS[1])
    pair.step(0)
    pair.optimizer.checkpoint().result()
    cut = Cut(*CUTS[1])
    pair.reopen(cut=cut)
    with pytest.raises(MismatchError, match=r"Options\((master=, )?state_dtype="):
        pair.optimizer.restore()


def test_eight_bits_are_refused_for_state_they_may_not_suit(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(64))
    options = offload.Options(state_dtype="int8")
    with pytest.raises(UnsupportedOptimizerError, match=r"'step_size'|'prev'"):
        offload.OffloadedOptimizer(
            torch.optim.Rprop, [parameter], directory=tmp_path / "run", options=options
        )
    assert not (tmp_path / "run").exists()
