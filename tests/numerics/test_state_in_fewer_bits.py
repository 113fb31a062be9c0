"""What is kept of FP32 state in fewer bits: 8-bit blocks, split masters, and stochastic rounding.

An optimizer is given moments and masters of a choice, as from another one's state dict. What it
stores is held, bit by bit, to numpy's FP32, and to the format's words in FP64 and whole numbers.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import offload
from gds import MemoryBackend
from offload.format import rounding_keys
from offload.update.coding.rounding import round_stochastic
from offload.update.scratch import Scratch
from tests.numerics.reference import read_state

BLOCK = 32
ARRAYS = ("exp_avg", "exp_avg_sq")
STEP = 5
ALMOST = 1e-3  # of a code: FP32 rounds a few times before the code is rounded


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Return unsigned bits."""
    if tensor.dtype.itemsize == 2:
        return tensor.detach().view(torch.int16).numpy().view(np.uint16).astype(np.uint64)
    return tensor.view(torch.int32).numpy().view(np.uint32).astype(np.uint64)


def floats(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.int32)).view(torch.float32)


class Kept:
    """An optimizer that was given these moments, or these masters, and a checkpoint of it."""

    def __init__(
        self,
        values: Mapping[str, torch.Tensor],
        given: str = "moments",
        second_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
        **settings: Any,
    ) -> None:
        self.backend = MemoryBackend()
        dtype = torch.float32 if given == "moments" else torch.bfloat16
        self.parameters = {
            n: torch.nn.Parameter(torch.zeros_like(v, dtype=dtype)) for n, v in values.items()
        }
        options = offload.Options(backend=self.backend, allow_volatile=True, **settings)
        self.optimizer = offload.AdamW(
            list(self.parameters.items()), directory="/run", options=options
        )
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        full = self.optimizer.full_state_dict()
        for number, tensor in enumerate(values.values()):
            if given == "masters":
                full["master"][number] = tensor.clone()
            else:
                full["state"][number].update(
                    exp_avg=tensor.clone(), exp_avg_sq=(second_of or second)(tensor)
                )
        self.optimizer.load_state_dict({**full, "num_steps": STEP})
        self.seal()

    def seal(self) -> None:
        self.checkpoint = self.optimizer.checkpoint().result()
        self.stored = read_state(self.checkpoint.path, self.backend).arrays

    def codes(self, array: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is stored of an array in 8 bits, and the scales."""
        return self.stored[array][name], self.stored[f"{array}_scale"][name]

    def read(self, array: str, name: str) -> torch.Tensor:
        return offload.read_state(self.checkpoint, name)[array]


def second(moments: torch.Tensor) -> torch.Tensor:
    return torch.where(moments == 0, moments, moments.abs())


def largest_of_blocks(values: torch.Tensor) -> np.ndarray:
    padded = np.zeros(-(-len(values) // BLOCK) * BLOCK, dtype=np.float32)
    padded[: len(values)] = np.abs(values.numpy())
    return padded.reshape(-1, BLOCK).max(axis=1)


def rounded_up(largest: np.ndarray) -> np.ndarray:
    """Return bf16 bits of FP32 values: up, except from up to 2 (or 3, to even) units above."""
    bits = largest.view(np.uint32).astype(np.uint64) + 0x7FFD
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def scales_of(bits: np.ndarray) -> np.ndarray:
    return floats(bits << np.uint64(16)).numpy()


def expected_codes(values: torch.Tensor, array: str) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and the bits of scales, in numpy's FP32: the oracle for finite values."""
    v, largest = values.numpy(), largest_of_blocks(values)
    one = np.float32(1)
    with np.errstate(all="ignore"):
        if array == "exp_avg":
            bits = rounded_up(largest)
            s = np.repeat(np.maximum(scales_of(bits), np.float32(2.0**-149)), BLOCK)[: len(v)]
            return np.rint(np.float32(254) * v / (np.abs(v) + s)).astype(np.int8), bits
        bits = rounded_up(one / (one / np.sqrt(largest)))
        s = np.repeat(np.maximum(scales_of(bits), np.float32(2.0**-100)), BLOCK)[: len(v)]
        codes = np.rint(np.float32(255) * (one / s) / (one / np.sqrt(v)))
    return np.maximum(codes, v > 0).astype(np.uint8), bits


def expected_values(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    c = codes.numpy().astype(np.float32)
    s = np.repeat(scales_of(bits_of(scales)), BLOCK)[: len(c)]
    if codes.dtype == torch.int8:
        return c / (np.float32(254) - np.abs(c)) * s
    root = c * np.float32(1 / 255) * s
    return root * root


def normal(num: int, seed: int, power: int = 0) -> torch.Tensor:
    values = torch.randn(num, generator=torch.Generator().manual_seed(seed)).clamp(-3.9, 3.9)
    return torch.ldexp(values, torch.tensor(power))


def dead_units(num: int) -> torch.Tensor:
    values = normal(num, 11)
    values[::7] = 0
    values[::11] = -0.0
    values[64:160] = 0
    return values


EXPONENTS = torch.randint(-126, 118, (8000,), generator=torch.Generator().manual_seed(9))
MOMENTS = {
    "tiny-second-moments": normal(8000, 3, -100),
    "denormal": normal(8000, 4, -140),
    "huge": normal(8000, 6, 118),
    "heavy-tails": normal(8000, 7) / normal(8000, 8),
    "every-magnitude": torch.ldexp(normal(8000, 10).clamp(-1.9, 1.9), EXPONENTS),
    "block-by-block-another": normal(8000, 2)
    * torch.logspace(-35, 30, 250).repeat_interleave(BLOCK),
    "negative-zeros": -torch.zeros(1000),
    "dead-units": dead_units(8000),
    "a-last-block-of-1": normal(6401, 13),
}
# Where bfloat16 can hold the scale to eight bits.
NORMAL = [n for n in MOMENTS if n not in ("denormal", "negative-zeros")]


@functools.cache
def in_8_bits() -> Kept:
    return Kept(MOMENTS, state_dtype="int8", chunk_bytes=12288)


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("name", MOMENTS)
def test_the_bytes_are_those_of_numpy(name: str, array: str) -> None:
    values = MOMENTS[name] if array == "exp_avg" else second(MOMENTS[name])
    codes, scales = in_8_bits().codes(array, name)
    expected, bits = expected_codes(values, array)
    assert np.array_equal(codes.numpy(), expected)
    assert np.array_equal(bits_of(scales), bits)
    out = in_8_bits().read(array, name)
    assert np.array_equal(out.numpy().view(np.int32), expected_values(codes, scales).view(np.int32))
    assert not bits_of(out[values == 0]).any(), "zeros are zeros"
    if array == "exp_avg_sq" and name != "denormal":
        assert torch.equal(out == 0, values == 0), "no second moment becomes zero"


@pytest.mark.parametrize("array", ARRAYS)
def test_a_scale_is_the_largest_rounded_up_and_a_code_the_nearest(array: str) -> None:
    for name in NORMAL:
        values = MOMENTS[name] if array == "exp_avg" else second(MOMENTS[name])
        codes, scales = in_8_bits().codes(array, name)
        largest = largest_of_blocks(values).astype(np.float64)
        if array == "exp_avg_sq":
            largest = np.sqrt(largest)
        ratio = scales.double().numpy()[largest > 0] / largest[largest > 0]
        assert 1 - 2.0**-21 <= ratio.min() <= ratio.max() < 1 + 2.0**-7, name
        v = values.double().numpy()
        s = np.repeat(scales.double().numpy(), BLOCK)[: len(v)]
        s = np.where(s > 0, s, 1)
        exact, nearest = 127 * 2 * (v / s) / (1 + np.abs(v / s)), np.ones_like(v, dtype=bool)
        if array == "exp_avg_sq":
            exact = 255 * np.sqrt(v) / s
            nearest = (exact >= 0.5) | (exact == 0)
            assert (codes.numpy()[~nearest] == 1).all(), "no second moment becomes zero"
        assert np.abs(exact - codes.numpy())[nearest].max(initial=0) <= 0.5 + ALMOST, name


def test_what_was_read_is_stored_as_it_was() -> None:
    """First moments at once; second ones settle when they are stored again, and never go up."""
    runs = [in_8_bits()]
    for array in (ARRAYS[0], ARRAYS[1], ARRAYS[1]):
        read = {name: runs[-1].read(array, name) for name in NORMAL}
        runs.append(Kept(read, state_dtype="int8"))
    for name in NORMAL:
        for array, one, other in ((ARRAYS[0], 0, 1), (ARRAYS[1], 2, 3)):
            before, after = runs[one].codes(array, name), runs[other].codes(array, name)
            assert all(map(torch.equal, before, after)), (array, name)
        scales = [bits_of(runs[n].codes(ARRAYS[1], name)[1]).astype(int) for n in (1, 2)]
        assert set(scales[0] - scales[1]) <= {0, 1}, name


def test_the_largest_finite_second_moments_are_kept_and_negative_ones_are_nan() -> None:
    values = torch.full((BLOCK,), torch.finfo(torch.float32).max)
    values[1:] = torch.linspace(1e38, 3e38, BLOCK - 1)
    out = Kept({"w": values}, state_dtype="int8").read("exp_avg_sq", "w")
    assert out[0] == float("inf"), "the square of the scale, which is rounded up"
    assert ((out[1:] / values[1:] - 1).abs() < 0.01).all()
    for wrong in (-1.0, -1e-45):
        values = torch.full((BLOCK,), wrong)
        out = Kept({"w": values}, second_of=torch.clone, state_dtype="int8").read("exp_avg_sq", "w")
        assert out.isnan().all()


NAN, INFINITY = torch.nan, torch.inf
BAD = {
    "nan": [NAN],
    "infinity": [INFINITY],
    "minus-infinity": [-INFINITY],
    "both-infinities": [INFINITY, -INFINITY],
    "infinity-and-nan": [NAN, INFINITY],
    "too-large": [2.0**120],
}


@pytest.mark.parametrize("others", ["heavy-tails", "dead-units"])
def test_a_block_that_is_not_finite_is_read_as_nan_and_no_other(others: str) -> None:
    """Its bytes are the same wherever the tensor is cut."""
    length, damaged = BLOCK * 40 + 7, [0, 3, 4, 17, 38, 40]
    good = MOMENTS[others][:length]
    values = {"good": good}
    for name, bad in BAD.items():
        values[name] = good.clone()
        for block in damaged:
            at = block * BLOCK + block % 5
            values[name][at : at + len(bad)] = torch.tensor(bad)
    kept, other = (Kept(values, state_dtype="int8", chunk_bytes=n) for n in (4096, 1 << 20))
    inside = torch.isin(torch.arange(length) // BLOCK, torch.tensor(damaged))
    for array in ARRAYS:
        whole = kept.read(array, "good")
        for name in [name for name in BAD if (name, array) != ("too-large", "exp_avg_sq")]:
            out = kept.read(array, name)
            assert out[inside].isnan().all(), name
            assert np.array_equal(bits_of(out[~inside]), bits_of(whole[~inside]))
            codes, scales = kept.codes(array, name)
            assert not codes[inside].any()
            assert (bits_of(scales)[damaged] == 0x7FC0).all()
            codes_too, scales_too = other.codes(array, name)
            assert torch.equal(codes, codes_too)
            assert np.array_equal(bits_of(scales), bits_of(scales_too))


SIGN, INFINITE, QUIET = 0x80000000, 0x7F800000, 0x7FC00000
ALL_16 = np.arange(1 << 16, dtype=np.uint64)
LOWS = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xC000, 0xFFFE, 0xFFFF, 0x1234]
TELLING_LOWS = np.array(LOWS, dtype=np.uint64)
HIGHS = [
    *(0x0000, 0x0001, 0x0002, 0x007F),  # zero and denormals
    *(0x0080, 0x0081, 0x3F7F, 0x3F80, 0x3F81, 0x4049, 0x40FF),
    *(0x7F7E, 0x7F7F, 0x7F80),  # the largest, and infinity
    *(0x7F81, 0x7FBF, 0x7FC0, 0x7FC1, 0x7FFE, 0x7FFF),  # NaN
]
TELLING_HIGHS = np.array([high | sign for high in HIGHS for sign in (0, 0x8000)], dtype=np.uint64)


def patterns(highs: np.ndarray, lows: np.ndarray) -> np.ndarray:
    """Return FP32 bits of all combinations of halves."""
    return ((highs[:, None] << np.uint64(16)) | lows[None, :]).ravel()


def round_half_away(bits: np.ndarray) -> np.ndarray:
    """Return the bf16 bits of FP32 bits, to nearest and ties away from zero: the oracle."""
    sign, magnitude = bits & SIGN, bits & 0x7FFFFFFF
    rounded = (magnitude >> 16) + ((magnitude & 0xFFFF) >= 0x8000)
    return (sign >> 16) | np.where(magnitude > INFINITE, QUIET >> 16, rounded)


def quieted(bits: np.ndarray) -> np.ndarray:
    return np.where((bits & 0x7FFFFFFF) > INFINITE, (bits & SIGN) | QUIET, bits)


def test_every_master_is_made_of_its_parameter_and_16_bits_again() -> None:
    bits = np.concatenate([patterns(ALL_16, TELLING_LOWS), patterns(TELLING_HIGHS, ALL_16)])
    kept = Kept({"w": floats(bits)}, "masters", master="split")
    assert np.array_equal(bits_of(kept.parameters["w"]), round_half_away(bits))
    assert np.array_equal(bits_of(kept.stored["master_low"]["w"]), quieted(bits) & 0xFFFF)
    assert np.array_equal(bits_of(kept.read("master", "w")), quieted(bits))


@pytest.mark.parametrize("halves", [(ALL_16, TELLING_LOWS), (TELLING_HIGHS, ALL_16)])
def test_an_edited_parameter_is_what_the_new_master_rounds_to(
    halves: tuple[np.ndarray, np.ndarray],
) -> None:
    """Of halves that no split makes together: the parameter was changed in between."""
    wanted = patterns(*halves)
    kept = Kept({"w": floats(wanted & np.uint64(0xFFFF))}, "masters", master="split")
    live = kept.parameters["w"]
    live.data.copy_(floats(wanted & np.uint64(0xFFFF0000)))
    kept.seal()
    master = kept.read("master", "w")
    nan = live.isnan().numpy()
    assert np.array_equal(master.isnan().numpy(), nan)
    assert np.array_equal(round_half_away(bits_of(master))[~nan], bits_of(live)[~nan])
    zeros = live == 0
    assert master[zeros].abs().max() < 1e-40
    assert torch.equal(master[zeros].signbit(), live[zeros].signbit())


MASK = np.uint64(0xFFFFFFFF)


def blake(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def key_of(seed: int, stream: int, step: int, name: str, window: int) -> tuple[int, int]:
    """Return the two halves of a key, by the finalizer of SplitMix64: the oracle."""
    z = (blake(f"{seed},{stream},{step}") + blake(name) + window * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) % 2**64
    z ^= z >> 31
    return z % 2**32, z >> 32


def rounded_by_oracle(
    values: torch.Tensor, seed: int, stream: int, step: int, name: str, first: int = 0
) -> np.ndarray:
    """Return the values with 16 random bits added, each of its own, and cut off."""
    element = np.arange(first, first + len(values), dtype=np.uint64)
    pair = element >> np.uint64(1)
    added = np.empty(len(values), dtype=np.uint64)
    for high in np.unique(pair >> np.uint64(32)):
        before, inside = map(np.uint64, key_of(seed, stream, step, name, int(high)))
        x = ((pair & MASK) * np.uint64(0x9E3779B9) + before) & MASK
        x ^= x >> np.uint64(16)
        x = (x * np.uint64(0x7FEB352D) + inside) & MASK
        x ^= x >> np.uint64(15)
        x = (x * np.uint64(0x846CA68B)) & MASK
        x ^= x >> np.uint64(16)
        mine = pair >> np.uint64(32) == high
        added[mine] = ((x >> ((element & 1) * np.uint64(16))) & np.uint64(0xFFFF))[mine]
    return (quieted(bits_of(values)) + added) >> np.uint64(16)


def every_kind(num: int) -> torch.Tensor:
    """Return arbitrary bit patterns: every magnitude, denormals, infinities, NaN."""
    bits = np.random.default_rng(5).integers(0, 1 << 32, num, dtype=np.uint64)
    special = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 1]
    bits[: len(special)] = special[:num]
    return floats(bits)


@pytest.mark.parametrize("seed", [0, 3])
def test_stochastic_rounding_is_the_formats(seed: int, set_threads: Any) -> None:
    """Whatever the lengths of parameters are, which lie in one chunk or in several."""
    lengths = [*[64] * 60, 1, 3, 33, 7, 1, 255, 9000, 4096, 4095, 3, 20_000, 16_383, 30_000]
    values = {f"layers.{number}": every_kind(n) for number, n in enumerate(lengths)}
    set_threads(1 + seed % 2)
    kept = Kept(values, state_dtype="bfloat16", rounding_seed=seed, chunk_bytes=65536)
    for name, tensor in values.items():
        for array, given in (("exp_avg", tensor), ("exp_avg_sq", second(tensor))):
            expected = rounded_by_oracle(given, seed, zlib.crc32(array.encode()), STEP, name)
            assert np.array_equal(bits_of(kept.stored[array][name]), expected), (array, name)


@pytest.mark.parametrize("first", [(1 << 33) - 10_001, (1 << 40) + 3])
def test_parameters_of_many_elements_are_rounded_by_further_keys(first: int) -> None:
    """The function is called itself: nobody has a parameter of so many elements here."""
    values, seed, array, step = every_kind(20_000), 2**80, "exp_avg", 10**12
    out = torch.empty(20_000, dtype=torch.bfloat16)
    keys = rounding_keys.ParameterKeys(rounding_keys.name_numbers(["w"]), seed, array, step)
    round_stochastic(values, out, key=keys.of(0), first_element=first, scratch=Scratch())
    assert np.array_equal(
        bits_of(out), rounded_by_oracle(values, seed, zlib.crc32(array.encode()), step, "w", first)
    )


def test_the_mean_is_the_value() -> None:
    num, step, five_sigma = 1 << 18, 2.0**-7, 5.0
    parts = {part: abs(part) / 65536 for part in (1, 0x4000, -0x8000, -0xFFFF)}
    values = {
        hex(p): torch.full((num,), (1 + parts[p] * step) * (1 if p > 0 else -1)) for p in parts
    }
    kept = Kept(values, state_dtype="bfloat16")
    for part, probability in parts.items():
        up = (kept.read("exp_avg", hex(part)).double().abs() - 1) / step
        sigma = (probability * (1 - probability) / num) ** 0.5
        assert abs(up.mean().item() - probability) < five_sigma * sigma
