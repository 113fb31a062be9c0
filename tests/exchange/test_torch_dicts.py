"""torch's own state dicts: what the store gives and takes, against torch itself."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import offload
from gds import MemoryBackend
from offload.errors import MismatchError
from tests.numerics.models import Mixed
from tests.numerics.pairs import CASES, Cut, Pair, memory_pair
from tests.numerics.reference import assert_same_bits, assert_same_parameters
from tests.stores.small import give_gradients

CUT = Cut(3 * 4096, 3)
FORMATS = {
    "resident": {"host_memory": 150_000},
    "split": {"master": "split"},
    "split-bfloat16-resident": {
        "master": "split",
        "state_dtype": "bfloat16",
        "host_memory": 100_000,
    },
    "int8": {"state_dtype": "int8"},
    "overlap-forward": {"overlap": "forward"},
}


ONE_OF_EACH_CLASS = (
    *("adamw-amsgrad-in-one-group", "adam-coupled-decay", "sgd-momentum-in-some-groups", "nadam"),
    *("radam", "adamax", "rmsprop-centered-momentum", "adagrad", "adadelta", "rprop", "asgd"),
)


def torch_dict(pair: Pair) -> dict[str, Any]:
    """Return what torch itself has, masters included, for the reference's side."""
    inner = pair.reference.inner
    plain = inner.state_dict()
    numbers = [p for g in inner.param_groups for p in g["params"]]
    lives = {master: live for live, master in pair.reference.masters.items()}
    plain["master"] = {
        number: master.detach()
        for number, master in enumerate(numbers)
        if lives[master].dtype != torch.float32 and lives[master].requires_grad
    }
    return plain


def assert_same_value(found: Any, expected: Any, what: str) -> None:
    assert type(found) is type(expected), what
    if isinstance(expected, torch.Tensor):
        assert_same_bits(found, expected, what)
    else:
        assert found == expected, what


def assert_same_dict(found: dict[str, Any], expected: dict[str, Any], pair: Pair) -> None:
    assert found["param_groups"] == expected["param_groups"]
    stepped = {
        number: {k: v for k, v in state.items() if v is not None}
        for number, state in expected["state"].items()
        if numbered(pair)[number].requires_grad
    }
    assert found["state"].keys() == stepped.keys()
    for number, state in stepped.items():
        assert found["state"][number].keys() == state.keys()
        for name, value in state.items():
            assert_same_value(found["state"][number][name], value, f"{name} of {number}")
    started = numbered(pair)
    assert found["master"].keys() == expected["master"].keys()
    for number, master in expected["master"].items():
        if started[number] in pair.reference.started:
            assert_same_bits(found["master"][number], master, f"master of {number}")


def numbered(pair: Pair) -> list[torch.Tensor]:
    lives = {master: live for live, master in pair.reference.masters.items()}
    return [lives[p] for g in pair.reference.inner.param_groups for p in g["params"]]


@pytest.mark.parametrize("name", ONE_OF_EACH_CLASS)
def test_every_class_gives_torchs_dict_and_takes_it_back(name):
    case = CASES[name]
    pair = memory_pair(case, CUT)
    for step in range(1, 5):
        pair.step(step)
    full = pair.optimizer.full_state_dict()
    assert_same_dict(full, torch_dict(pair), pair)
    for step in range(5, 8):  # reading it has changed nothing
        pair.step(step)
    pair.assert_same_parameters()

    # A new store, on a model of other values, goes on from torch's dict as torch does.
    expected = torch_dict(pair)
    weights = {n: p.detach().clone() for n, p in pair.expected.named_parameters()}
    other = memory_pair(case, CUT, live=Mixed(seed=99), expected=pair.expected)
    other.reference = pair.reference
    with torch.no_grad():
        for name, parameter in other.live.named_parameters():
            parameter.copy_(weights[name])
    other.optimizer.load_state_dict(through_a_file(expected))
    for step in range(8, 12):
        other.step(step)
    other.assert_same_parameters()
    if case.optimizer not in (torch.optim.SGD, torch.optim.Adagrad):
        other.assert_same_state()  # torch's dicts of those do not tell what has been stepped
    other.optimizer.close()
    pair.optimizer.close()


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
def test_every_stored_format_goes_through_a_torch_dict(settings):
    """Exactly where state is exact; else what was decoded is what is decoded again."""
    case, cut = CASES["adamw"], Cut(3 * 4096, 3, settings=settings)
    pair = memory_pair(case, cut)
    for step in range(1, 4):
        pair.step_live(step)
        pair.step_expected(step)
        if "overlap" in settings:
            pair.optimizer.synchronize()
    full = pair.optimizer.full_state_dict()
    again = pair.optimizer.full_state_dict()
    other = memory_pair(case, cut, live=Mixed(seed=5))
    with torch.no_grad():
        for mine, theirs in zip(other.live.parameters(), pair.live.parameters(), strict=True):
            mine.copy_(theirs)
    other.optimizer.load_state_dict(through_a_file(full))
    # Blocks of 8 bits may take one more rounding, in their scales.
    found = other.optimizer.full_state_dict() if "int8" not in settings.values() else again
    for one, two in ((again, full), (found, full)):
        assert one["state"].keys() == two["state"].keys()
        for number, state in two["state"].items():
            for name, value in state.items():
                assert_same_bits(one["state"][number][name], value, f"{name} of {number}")
        for number, master in two["master"].items():
            assert_same_bits(one["master"][number], master, f"master of {number}")
    assert_same_parameters(other.live.named_parameters(), pair.live.named_parameters())
    if "bfloat16" not in settings.values():
        for step in range(4, 7):
            pair.step_live(step)
            other.step_live(step)
            for each in (pair, other):
                each.optimizer.synchronize()
        if "int8" not in settings.values():
            assert_same_parameters(other.live.named_parameters(), pair.live.named_parameters())
    if settings.keys() <= {"host_memory"}:
        assert_same_dict(full, torch_dict(pair_at(case, 3)), pair)
    pair.optimizer.close()
    other.optimizer.close()


def pair_at(case, steps: int) -> Pair:
    pair = memory_pair(case, CUT)
    for step in range(1, steps + 1):
        pair.step(step)
    pair.optimizer.close()
    return pair


def test_plain_torch_goes_on_from_the_full_dict():
    """The other direction: FP32 masters and moments in torch's own class, with its own loader."""
    pair = memory_pair(CASES["adamw-amsgrad"], CUT)
    for step in range(1, 5):
        pair.step(step)
    full = through_a_file(pair.optimizer.full_state_dict())
    fresh = Pair(pair.case, CUT, MemoryBackend(), live=Mixed(seed=3), expected=Mixed(seed=4))
    with torch.no_grad():
        for mine, theirs in zip(fresh.expected.parameters(), pair.live.parameters(), strict=True):
            mine.copy_(theirs)
    masters = [p for g in fresh.reference.inner.param_groups for p in g["params"]]
    for number, master in full["master"].items():
        masters[number].data.copy_(master)
    for live, master in fresh.reference.masters.items():
        if live.dtype == torch.float32:
            master.data.copy_(live.data)
    fresh.reference.inner.load_state_dict(full)
    fresh.reference.started = {
        live for number, live in enumerate(numbered(fresh)) if number in full["state"]
    }
    for step in range(5, 9):
        pair.step_live(step)
        fresh.step_expected(step)
    assert_same_parameters(pair.live.named_parameters(), fresh.expected.named_parameters())
    fresh.optimizer.close()
    pair.optimizer.close()


def small(**settings: Any) -> tuple[torch.nn.Module, offload.OffloadedOptimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 10)).bfloat16()
    named = settings.pop("params", "") == "named"
    optimizer = offload.AdamW(
        model.named_parameters() if named else model.parameters(),
        directory="/store",
        options=offload.Options(backend=MemoryBackend(), allow_volatile=True),
        **settings,
    )
    return model, optimizer


def plain_dict(**hyper: Any) -> dict[str, Any]:
    model, optimizer = small()
    optimizer.close()
    plain = torch.optim.AdamW(model.float().parameters(), **hyper)
    give_gradients(model.parameters(), 0)
    plain.step()
    return plain.state_dict()


def test_moments_keep_more_bits_than_the_parameters_have():
    plain = plain_dict()
    _, optimizer = small()
    optimizer.load_state_dict(plain)
    for number, state in optimizer.full_state_dict()["state"].items():
        assert_same_bits(state["exp_avg"], plain["state"][number]["exp_avg"], "exp_avg")
        assert not torch.equal(state["exp_avg"], state["exp_avg"].bfloat16().float())
    optimizer.close()


def test_live_parameters_become_what_their_masters_round_to_and_without_masters_stay():
    plain = plain_dict()
    model, optimizer = small()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.load_state_dict(plain)
    for p, b in zip(model.parameters(), before, strict=True):
        assert_same_bits(p.detach(), b, "live")
    masters = {n: torch.randn(p.shape) for n, p in enumerate(model.parameters())}
    optimizer.load_state_dict({**plain, "master": masters})
    for n, p in enumerate(model.parameters()):
        assert_same_bits(p.detach(), masters[n].bfloat16(), "live")
        assert_same_bits(optimizer.full_state_dict()["master"][n], masters[n], "master")
    optimizer.close()


# Numbers of steps, which scalars of parameters do not tell: steps without a gradient count, too


def trained(overlap: str | None = None) -> tuple[torch.nn.Module, offload.AdamW]:
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 3)
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True, overlap=overlap)
    optimizer = offload.AdamW(model.parameters(), model=model, directory="/store", options=options)
    for step in range(6):
        if step < 3:
            model(torch.ones(2, 30)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for number, state in expected["state"].items():
        for name, value in state.items():
            assert_same_bits(found["state"][number][name], value, name)


@pytest.mark.parametrize("overlap", [None, "backward"])
def test_it_comes_back(overlap):
    _, optimizer = trained(overlap)
    full = optimizer.full_state_dict()
    assert full["num_steps"] == 6
    assert {state["step"].item() for state in full["state"].values()} == {3.0}
    assert optimizer.checkpoint().result().step == 6
    optimizer.load_state_dict(full)
    sealed = optimizer.checkpoint({"loaded": True}).result()
    assert sealed.step == 6
    found = offload.list_checkpoints("/store", backend=sealed.backend)
    assert [one.step for one in found] == [6]
    optimizer.close()


def test_what_is_no_number_of_steps_is_refused():
    _, optimizer = trained()
    full = optimizer.full_state_dict()
    for said in (-1, 2.0, True, "6", 1 << 63, [6], torch.tensor(6)):
        with pytest.raises(MismatchError, match=r"'num_steps' is .*expected a whole number"):
            optimizer.load_state_dict({**full, "num_steps": said})
    assert optimizer.full_state_dict()["num_steps"] == 6
    optimizer.close()


def test_without_it_as_in_torchs_own_dict_the_largest_step_of_a_parameter_counts():
    model, optimizer = trained()
    full = through_a_file(optimizer.full_state_dict())
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(full)
    assert plain.state_dict().keys() == {"state", "param_groups"}
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.full_state_dict()["num_steps"] == 3
    optimizer.close()


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_distributed_checkpoint_takes_the_dict(flat):
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    with optimizer.materialized():
        found = get_optimizer_state_dict(model, optimizer, options=options)
    assert not any("num_steps" in key for key in found)
    other, again = trained()
    give_gradients(other.parameters(), 0)
    again.step()
    again.zero_grad()
    if flat:
        with again.materialized():
            set_optimizer_state_dict(other, again, found, options=options)
    else:
        set_optimizer_state_dict(other, again, found, options=options)
    assert_same_state(again.full_state_dict(), optimizer.full_state_dict())
    assert again.num_steps == 3
    optimizer.close()
    again.close()


def test_a_flattened_dict_without_names_is_refused_rather_than_taken_for_no_state():
    """torch asks ``optimizer.state`` for the names, where the state on storage is not."""
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    with optimizer.materialized():
        found = get_optimizer_state_dict(model, optimizer, options=options)
    before = optimizer.full_state_dict()
    with pytest.raises(MismatchError, match=r"is an empty dict.*within optimizer\.materialized"):
        set_optimizer_state_dict(model, optimizer, found, options=options)
    assert_same_state(optimizer.full_state_dict(), before)
    optimizer.close()


def test_state_of_a_parameter_that_is_in_no_group_is_left_out():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)).bfloat16()
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True)
    optimizer = offload.AdamW(model.parameters(), model=model, directory="/s", options=options)
    give_gradients(model.parameters(), 0)
    optimizer.step()
    optimizer.param_groups[0]["params"] = list(model[1].parameters())
    give_gradients(model.parameters(), 0)
    optimizer.step()
    full = optimizer.full_state_dict()
    assert full["state"].keys() == full["master"].keys() == {0, 1}
    plain = torch.optim.AdamW(model[1].float().parameters())
    plain.load_state_dict(full)
    assert full["num_steps"] == 2
    optimizer.close()
