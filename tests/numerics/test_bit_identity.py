"""Every optimizer class gives the bits that the same class gives with its state in memory."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import offload
import offload.update.updater
from gds import MemoryBackend
from tests.numerics.models import EMPTY_STEP, trainable
from tests.numerics.pairs import CASES, CUTS, FOREACH, Case, Cut, Pair, changing_rate, memory_pair
from tests.numerics.reference import (
    Reference,
    assert_same_bits,
    one_nan,
    read_state,
)

NUM_STEPS = EMPTY_STEP + 5
"""Past every step at which `give_gradients` does something else for the first time."""


def block_elements(monkeypatch: pytest.MonkeyPatch, cut: Cut) -> None:
    if cut.block_elements is not None:
        monkeypatch.setattr(offload.update.updater, "HOT_ELEMENTS", cut.block_elements)
        # of the steps in between; see `conftest.Alternating`
        monkeypatch.setattr(
            offload.update.updater, "HOT_ELEMENTS_ONE_THREAD", cut.block_elements // 2 + 1
        )


def train_and_compare(pair: Pair) -> None:
    schedulers = [LambdaLR(o, changing_rate) for o in (pair.optimizer, pair.reference.inner)]
    masters = pair.reference.masters
    initial = {n: masters[p].clone() for n, p in trainable(pair.expected).items()}
    for step in range(NUM_STEPS):
        pair.step(step)
        for scheduler in schedulers:
            scheduler.step()
        pair.assert_same_parameters()
    still = {n for n, p in trainable(pair.expected).items() if torch.equal(masters[p], initial[n])}
    assert still == {"never", "never_full", "empty", "empty_full"}
    pair.assert_same_state()
    pair.optimizer.close()


CUT_OF_CASE = {name: number % len(CUTS) for number, name in enumerate(CASES)}
"""Each class and flag with one cut; the class that most use with all."""


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        *CUT_OF_CASE.items(),
        *(("adamw", cut) for cut in range(len(CUTS)) if cut != CUT_OF_CASE["adamw"]),
    ],
)
def test_parameters_and_state_equal_those_of_state_in_memory(name, cut, monkeypatch):
    block_elements(monkeypatch, CUTS[cut])
    train_and_compare(memory_pair(CASES[name], CUTS[cut]))


FOREACH_OF = [
    "adamw-amsgrad-in-one-group", "sgd-momentum-in-some-groups", "radam", "adamax",
    "rmsprop-centered-momentum", "rprop",
]  # fmt: skip


@pytest.mark.parametrize("name", FOREACH_OF)
def test_the_foreach_flag_gives_the_bits_of_torchs_foreach_code(name, monkeypatch):
    cut = Cut(3 * 4096, 2, 777)
    block_elements(monkeypatch, cut)
    train_and_compare(memory_pair(FOREACH[f"{name}-foreach"], cut))


def test_files_on_a_drive_hold_the_same_bits(tmp_path):
    directory = str(tmp_path / "run")
    train_and_compare(Pair(CASES["sgd-momentum-in-some-groups"], CUTS[1], directory=directory))


def test_hyper_parameters_edited_by_hand_count_from_the_next_step():
    pair = memory_pair(CASES["adamw"], CUTS[2])
    for step in range(NUM_STEPS):
        for optimizer in (pair.optimizer, pair.reference.inner):
            optimizer.param_groups[step % 3].update(
                lr=1e-3 * (step + 1), betas=(0.5 + step / 50, 0.9), weight_decay=0.01 * (step % 4)
            )
        pair.steps(step, step + 1)
    pair.assert_same_state()


SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1e-38, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]


class Special(torch.nn.Module):
    """Values at the edges of every format, the same in all of them as far as they fit."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.tensor(SPECIAL * 11 + [1.0, -1.0, 65504.0, 2.0**-24] * 7)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            name = f"in_{str(dtype).removeprefix('torch.')}"
            self.register_parameter(name, torch.nn.Parameter(values.to(dtype)))


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("adamw", Cut(4096, 2, 7)),
        ("adamw-amsgrad", CUTS[0]),
        ("sgd-dampening-maximize", Cut(4096, 2, 7)),
        ("adamax", CUTS[0]),
        ("rprop", CUTS[0]),
    ],
    ids=str,
)
def test_infinities_nans_and_denormals_spread_as_they_would_in_memory(name, cut, monkeypatch):
    block_elements(monkeypatch, cut)
    case = CASES[name]
    live, expected, backend = Special(), Special(), MemoryBackend()
    optimizer = offload.OffloadedOptimizer(
        case.optimizer,
        live.parameters(),
        model=live,
        directory="/store",
        options=cut.options(backend),
        **case.hyper,
    )
    reference = Reference(case.optimizer, expected.parameters(), **case.hyper)
    generator = torch.Generator().manual_seed(11)
    for step in range(NUM_STEPS):
        for model in (live, expected):
            for parameter in model.parameters():
                gradient = torch.randn(parameter.shape, generator=generator.manual_seed(step))
                gradient *= 10.0 ** (step % 7 - 3)
                positions = torch.arange(len(SPECIAL)) * 5 + step
                gradient[positions] = torch.tensor(SPECIAL)
                parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
        reference.step()
        for name, parameter in live.named_parameters():
            assert_same_bits(one_nan(parameter), one_nan(expected.get_parameter(name)), name)
    for parameter in live.parameters():
        assert parameter.isnan().any()
        assert parameter.isfinite().any()
    stored = read_state(optimizer.checkpoint().result().path, backend)
    for name, parameter in expected.named_parameters():
        state = {**reference.state(parameter), "master": reference.masters[parameter].detach()}
        arrays = [array for array, tensors in stored.arrays.items() if name in tensors]
        assert arrays or parameter.dtype == torch.float32
        for array in arrays:
            found = stored.arrays[array][name]
            assert_same_bits(one_nan(found), one_nan(state[array]), f"{array} of {name}")


def test_a_master_beyond_the_range_of_half_precision_is_kept_while_the_parameter_is_infinite():
    def parameter() -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.full((1100,), 64992.0, dtype=torch.float16))

    live, expected = parameter(), parameter()
    optimizer = offload.SGD(
        [live], lr=1.0, directory="/store", options=CUTS[0].options(MemoryBackend())
    )
    reference = Reference(torch.optim.SGD, [expected], lr=1.0)
    seen = []
    for direction in [-1.0] * 3 + [1.0] * 3:
        for tensor in (live, expected):
            tensor.grad = torch.full_like(tensor, direction * 999)
        optimizer.step()
        reference.step()
        assert_same_bits(live, expected, "parameter")
        seen.append(live[0].item())
    assert seen[2] == float("inf")
    assert seen[-1] == 64992.0  # came back: the master had not been lost


class Sizes(torch.nn.Module):
    """Parameters of given sizes."""

    def __init__(self, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.vectors = torch.nn.ParameterList(torch.randn(size, dtype=dtype) for size in sizes)


SIZES = {
    "on-chunk-edges": (1024, 2048, 512, 512, 1, 1023),
    "beside-chunk-edges": (1023, 1, 1, 1025),
    "many-of-one": (1,) * 60,
    "one": (1,),
    "none": (0,),
    "one-over": (4097,),
}


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("on-chunk-edges", 1024),
        ("on-chunk-edges", 333),
        ("beside-chunk-edges", 1),
        ("beside-chunk-edges", 1024),
        ("many-of-one", 1),
        ("many-of-one", 333),
        ("one", 1),
        ("none", 1024),
        ("one-over", 333),
    ],
)
def test_parameters_that_end_where_chunks_and_blocks_end(name, block, monkeypatch):
    sizes = SIZES[name]
    if block == 1 and sum(sizes) > 1000:
        sizes = tuple(size // 16 for size in sizes)  # a call of torch for each element
    cut = Cut(4096, 2, block)
    block_elements(monkeypatch, cut)
    models = Sizes(*sizes), Sizes(*sizes)
    pair = memory_pair(Case(torch.optim.AdamW, {}, ({},)), cut, live=models[0], expected=models[1])
    pair.steps(4)
    pair.assert_same_state()


@pytest.mark.parametrize("name", ["adamw", "radam-foreach"])
def test_tensors_large_enough_for_torch_to_use_several_threads(name, set_threads, monkeypatch):
    set_threads(2)
    block_elements(monkeypatch, Cut(0, 0, 65_537))
    sizes = (100_003, 77, 49_999)  # torch shares out from 32768 elements
    models = Sizes(*sizes), Sizes(*sizes)
    case = {**CASES, **FOREACH}[name]
    pair = memory_pair(case, Cut(75 * 4096, 2), live=models[0], expected=models[1])
    pair.steps(4)
    assert torch.get_num_threads() == 2, "nobody's settings change"
    pair.assert_same_state()
