"""What offloading must equal, written independently of it.

`Reference` is the oracle: the same torch class with the same flags, on FP32 masters that live in
memory. `StoredState` is a checkpoint as a stranger sees it: read with the safetensors library and
`json`, never with the code under test. Comparisons are of bits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from gds import Backend

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SCALAR_DTYPES = {"f32": torch.float32, "f64": torch.float64}

Groups = Sequence[Mapping[str, Any]]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as integers, so that NaN equals itself and 0.0 differs from -0.0."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


def one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values with the same NaN for every NaN.

    Which NaN an operation makes is open in IEEE 754, and torch's vector and scalar code differ in
    its sign, so that it depends on where a tensor begins and ends.
    """
    return torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor).detach()


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    if not torch.equal(bits(found), bits(expected)):
        different = bits(found) != bits(expected)
        first = different.flatten().nonzero()[0].item()
        raise AssertionError(
            f"{what}: {different.sum().item()} of {found.numel()} elements differ, the first is "
            f"element {first}: {found.flatten()[first].item()!r}, "
            f"expected {expected.flatten()[first].item()!r}"
        )


def assert_same_parameters(
    found: Iterable[tuple[str, torch.Tensor]], expected: Iterable[tuple[str, torch.Tensor]]
) -> None:
    left, right = dict(found), dict(expected)
    assert list(left) == list(right)
    assert left, "there is nothing to compare"
    for name, tensor in left.items():
        assert_same_bits(tensor, right[name], name)


class Reference:
    """A torch optimizer on FP32 masters in memory, with live parameters in the model's dtype.

    The gradient is upcast, `inner` steps the masters, and the live parameter becomes the rounded
    master. A live parameter that is not what its master rounds to has been edited: it becomes the
    master. An FP32 parameter is its own master. Schedulers are given `inner`.
    """

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], params: Iterable[Any], **hyper: Any
    ) -> None:
        entries = list(params)
        groups = entries if isinstance(entries[0], dict) else [{"params": entries}]
        self.masters: dict[torch.Tensor, torch.Tensor] = {}
        self.started: set[torch.Tensor] = set()
        self.inner = optimizer_class([self._on_masters(g) for g in groups], **hyper)

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        self.inner.add_param_group(self._on_masters(group))

    def step(self) -> None:
        for live, master in self.masters.items():
            master.grad = None
            if live.dtype == torch.float32:
                master.data = live.data  # which may have been replaced
            if live.grad is not None:
                self.started.add(live)
                if live.dtype != torch.float32:
                    edited = bits(master.detach().to(live.dtype)) != bits(live)
                    master.data.copy_(torch.where(edited, live.detach().float(), master.detach()))
                master.grad = live.grad.detach().to(torch.float32, copy=True)
        self._step_inner()
        with torch.no_grad():
            for live, master in self.masters.items():
                if live.grad is not None and live.dtype != torch.float32:
                    live.copy_(master)

    def _step_inner(self) -> None:
        self.inner.step()

    def state(self, live: torch.Tensor) -> dict[str, Any]:
        """Return torch's state of a parameter, without entries that hold nothing."""
        state = self.inner.state.get(self.masters[live], {})
        return {name: value for name, value in state.items() if value is not None}

    def _on_masters(self, group: Mapping[str, Any]) -> dict[str, Any]:
        params = []
        for entry in group["params"]:
            live = entry[1] if isinstance(entry, tuple) else entry
            # detach() of an FP32 parameter shares its memory, but has a gradient of its own
            params.append(live.detach() if live.dtype == torch.float32 else live.detach().float())
            self.masters[live] = params[-1]
        return {**group, "params": params}


@dataclass(frozen=True)
class StoredState:
    """A checkpoint directory, read without the package that wrote it."""

    arrays: Mapping[str, Mapping[str, torch.Tensor]]
    """For each state array, its tensors by parameter name."""

    scalars: Mapping[str, Mapping[str, tuple[str, str]] | None]
    """For each parameter its scalar state as (kind, text), or None if it has no state yet."""

    model: Mapping[str, torch.Tensor]
    """What ``model.safetensors`` holds."""

    manifest: Mapping[str, Any]
    """The body of ``manifest.json``."""


def read_state(path: str, backend: Backend | None = None) -> StoredState:
    """Read a checkpoint, of the local file system or of a backend, with its parts elsewhere."""

    def content(name: str, place: str = path) -> bytes:
        if backend is None:
            return (Path(place) / name).read_bytes()
        file = backend.open(f"{place}/{name}")
        try:
            return file.read_bytes(0, file.size_bytes)
        finally:
            file.close()

    body = json.loads(content("manifest.json"))["body"]
    places = [path, *(f"{part['directory']}/{part['name']}" for part in body["parts"])]
    shapes = {name: shape for name, _, shape, *_ in body["parameters"]}

    def array(name: str) -> dict[str, torch.Tensor]:
        whole, cuts = {}, {}
        for place in places:
            for key, tensor in safetensors.torch.load(
                content(f"{name}.safetensors", place)
            ).items():
                if cut := re.fullmatch(r"(.+)\[(\d+):\d+\]", key):
                    cuts.setdefault(cut[1], {})[int(cut[2])] = tensor
                else:
                    whole[key] = tensor
        for key, found in cuts.items():
            joined = torch.cat([found[start] for start in sorted(found)])
            is_block_scale = joined.numel() != math.prod(shapes[key])
            whole[key] = joined if is_block_scale else joined.reshape(shapes[key])
        return whole

    return StoredState(
        {a: array(a) for a, *_ in body["arrays"]},
        {
            p[0]: None if s is None else {name: (kind, text) for name, kind, text in s}
            for p, s in zip(body["parameters"], body["scalars"], strict=True)
        },
        safetensors.torch.load(content("model.safetensors")),
        body,
    )


def assert_same_state(
    stored: StoredState, reference: Reference, names: Mapping[str, torch.Tensor]
) -> None:
    """Compare a checkpoint with the oracle: masters, state arrays and scalar state.

    Args:
        stored: The checkpoint.
        reference: The oracle.
        names: The oracle's live parameters by the names that the checkpoint has for them.
    """
    assert set(names) == set(stored.scalars)
    expected_files: set[str] = set()
    for name, live in names.items():
        held = {a: tensors[name] for a, tensors in stored.arrays.items() if name in tensors}
        assert ("master" in held) == (live.dtype != torch.float32), name
        master = held.pop("master", None)
        if master is not None:
            expected_files.add("master")
            expected = reference.masters[live].detach()
            # Without state the live parameter alone counts; when it was edited, its master waits.
            if live in reference.started or torch.equal(bits(expected), bits(live.float())):
                assert_same_bits(master, expected, f"master of {name}")
        if live not in reference.started:
            assert stored.scalars[name] is None, name
            for array, tensor in held.items():
                assert not bits(tensor).any(), f"{array} of {name}, which has no state yet"
            continue
        state = reference.state(live)
        arrays = {
            n: v
            for n, v in state.items()
            if isinstance(v, torch.Tensor) and not (v.dim() == 0 and n not in held)
        }
        assert set(held) == set(arrays), name
        expected_files.update(arrays)
        for array, value in arrays.items():
            assert_same_bits(held[array], value, f"{array} of {name}")
        found = stored.scalars[name]
        assert found is not None, name
        assert set(found) == set(state) - set(arrays), name
        for scalar, (kind, text) in found.items():
            _assert_same_scalar(kind, text, state[scalar], f"{scalar} of {name}")
    assert set(stored.arrays) >= expected_files


def _assert_same_scalar(kind: str, text: str, expected: Any, what: str) -> None:
    if isinstance(expected, torch.Tensor):
        found = torch.tensor(float(text), dtype=_SCALAR_DTYPES[kind])
        assert_same_bits(found, expected, what)
    else:
        assert (kind, text) == (type(expected).__name__, repr(expected)), what
