"""torch's own state dicts that do not fit: refused by name, and nothing has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.errors import MismatchError, OffloadError
from tests.exchange.test_torch_dicts import assert_same_state, plain_dict, small
from tests.stores.small import give_gradients


def without(state: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != key}


WRONG: dict[str, tuple[Any, str]] = {
    "shape": (
        lambda s: {0: {**s[0], "exp_avg": s[0]["exp_avg"][:-1]}},
        "'exp_avg' of the state of parameter 0 .*expected float32 of shape",
    ),
    "dtype": (lambda s: {0: {**s[0], "exp_avg": s[0]["exp_avg"].double()}}, "is torch.float64"),
    "missing": (
        lambda s: {1: without(s[1], "exp_avg_sq")},
        r"state of parameter 1 .* made by another class, or with other flags",
    ),
    "extra": (lambda s: {2: {**s[2], "momentum_buffer": s[2]["exp_avg"]}}, "momentum_buffer"),
    "unknown": (lambda s: {17: s[0]}, "state of parameter 17"),
    "scalar": (lambda s: {0: {**s[0], "step": torch.ones(2)}}, "expected one number"),
    "not a tensor": (lambda s: {0: {**s[0], "exp_avg": "exp_avg"}}, "is a str"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_state_that_is_not_what_the_optimizer_keeps_is_refused(change, message):
    plain = plain_dict()
    model, optimizer = small()
    give_gradients(model.parameters(), 0)
    optimizer.step()
    before = optimizer.full_state_dict()
    wrong = {**plain, "state": {**plain["state"], **change(plain["state"])}}
    with pytest.raises(MismatchError, match=message):
        optimizer.load_state_dict(wrong)
    with pytest.raises(MismatchError, match="the master of state of parameter 0"):
        optimizer.load_state_dict({**plain, "master": {0: torch.zeros(3)}})
    assert_same_state(optimizer.full_state_dict(), before)
    optimizer.close()


def test_a_dict_of_another_run_is_refused():
    model, optimizer = small(params="named")
    give_gradients(model.parameters(), 0)
    optimizer.step()
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    sgd.step()
    names = list(model.named_parameters())
    other_order = torch.optim.AdamW([names[0], names[1], names[3], names[2]])
    other_order.step()
    short = plain_dict()
    short["param_groups"][0]["params"].pop()
    for error, state_dict, message in (
        (MismatchError, sgd.state_dict(), "another class"),
        (MismatchError, plain_dict(amsgrad=True), "amsgrad"),
        (MismatchError, other_order.state_dict(), r"parameter 2 .* '1.bias' .* '1.weight'"),
        (ValueError, short, "doesn't match the size"),
        (MismatchError, {"model": {}}, "expected a state dict"),
    ):
        with pytest.raises(error, match=message):
            optimizer.load_state_dict(state_dict)
    optimizer.close()
    model, optimizer = small()
    unstepped = torch.optim.AdamW(model.parameters()).state_dict()
    with pytest.raises(MismatchError, match="no optimizer state"):
        optimizer.load_state_dict({**unstepped, "master": {0: torch.full((20, 30), 1 / 3)}})
    optimizer.close()


def test_a_step_while_the_state_is_materialized_is_refused():
    model, optimizer = small()
    give_gradients(model.parameters(), 0)
    optimizer.step()
    with optimizer.materialized():
        with pytest.raises(OffloadError, match="materialized"):
            optimizer.step()
        assert len(optimizer.state) == len(list(model.parameters()))
    assert len(optimizer.state) == 0
    optimizer.step()
    optimizer.close()
