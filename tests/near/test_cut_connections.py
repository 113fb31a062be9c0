"""A connection that ends, or changes what it carries, in the middle of a call."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload.errors import BrokenOptimizerError, NearError, SealError
from tests.near.proxy import GRADIENT, PARAMETER, PASS, RESULT, Fate, Proxy, Way, after
from tests.near.servers import Server
from tests.near.training import are_same, copied, expected, make_model, make_optimizer, train

CALL, BLOB = 2, 9
LAST = 4


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """The values after each step without any cut."""
    return expected(tmp_path_factory.mktemp("local") / "run", LAST)


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A proxy before the server."""
    found = Proxy(server.socket)
    yield found
    found.close()


def _name(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[:90]


@pytest.mark.parametrize("how", ["cut", "truncate", "flip"])
@pytest.mark.parametrize(
    ("way", "kind", "number"),
    [
        ("up", CALL, 0),
        ("down", PASS, 0),
        ("up", GRADIENT, 0),
        ("up", GRADIENT, 2),
    ],
)
def test_a_step_that_the_server_cannot_take_raises_and_restore_goes_on(
    way: Way,
    kind: int,
    number: int,
    how: Fate,
    proxy: Proxy,
    values: list[dict[str, torch.Tensor]],
    request: pytest.FixtureRequest,
) -> None:
    model = make_model()
    with make_optimizer(model, proxy.url(_name(request))) as optimizer:
        train(model, optimizer, 1, 2)
        optimizer.checkpoint({"step": 2}).result()
        train(model, optimizer, 3, 3)
        proxy.rule = after(number, way, kind, how)
        with pytest.raises(NearError):
            train(model, optimizer, 4, 4)
        with pytest.raises((NearError, BrokenOptimizerError), match="restore"):
            optimizer.step()
        found = optimizer.restore()
        assert found is not None
        assert (found.step, found.train_state) == (2, {"step": 2})
        assert are_same(copied(model), values[2])
        train(model, optimizer, 3, LAST)
        assert are_same(copied(model), values[LAST])


@pytest.mark.parametrize("how", ["cut", "truncate", "flip"])
@pytest.mark.parametrize(
    ("kind", "number"), [(PARAMETER, 0), (PARAMETER, 3), (RESULT, 0)], ids=["first", "4th", "last"]
)
def test_a_step_whose_answers_are_lost_is_taken_once(
    kind: int,
    number: int,
    how: Fate,
    proxy: Proxy,
    values: list[dict[str, torch.Tensor]],
    request: pytest.FixtureRequest,
) -> None:
    model = make_model()
    with make_optimizer(model, proxy.url(_name(request))) as optimizer:
        train(model, optimizer, 1, 2)
        optimizer.checkpoint().result()
        train(model, optimizer, 3, 3)
        spoiled, is_lost = after(number, "down", kind, how), False

        def rule(way: Way, found: int) -> Fate:
            """Let what comes up through, lose all answers from one on, and cut at the last."""
            nonlocal is_lost
            fate = spoiled(way, found)
            is_lost |= fate != "pass"
            if way == "down" and found == RESULT:
                proxy.rule = lambda _way, _kind: "pass"  # the client comes back
                return how
            return "lose" if is_lost and way == "down" else "pass"

        proxy.rule = rule
        train(model, optimizer, 4, 4)  # its forward changes buffers, which the server has not seen
        assert are_same(copied(model), values[4])
        assert optimizer.checkpoint().result().step == 4


def test_a_buffer_or_frozen_parameter_that_was_edited_is_sent_again_after_a_loss(
    proxy: Proxy, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = make_model()
    model[0].bias.requires_grad = False
    with make_optimizer(model, proxy.url(_name(request))) as optimizer:
        train(model, optimizer, 1, 1)
        optimizer.checkpoint().result()
        proxy.cut()
        with pytest.raises(NearError):
            optimizer.step()
        optimizer.restore()
        with torch.no_grad():
            model[0].bias.fill_(3)
            model[1].running_mean.fill_(2)
        train(model, optimizer, 2, 2)
        wanted = copied(model)
        optimizer.checkpoint().result()
        optimizer.restore()
        assert are_same(copied(model), wanted)


def test_a_fresh_run_that_was_lost_keeps_its_own_checkpoints(
    proxy: Proxy, server: Server, request: pytest.FixtureRequest
) -> None:
    model = make_model()
    with make_optimizer(model, server.url(_name(request))) as optimizer:
        train(model, optimizer, 1, 3)
        optimizer.checkpoint(["old"]).result()
    model = make_model()
    with make_optimizer(model, proxy.url(_name(request)), fresh=True) as optimizer:
        train(model, optimizer, 1, 1)
        optimizer.checkpoint(["new"]).result()
        for _ in range(2):
            proxy.cut()
            with pytest.raises(NearError):
                optimizer.step()
            # Somebody else opens and leaves the run, so that the server knows the client no more.
            make_optimizer(make_model(), server.url(_name(request))).close()
            found = optimizer.restore()
            assert found is not None
            assert (found.step, found.train_state) == (1, ["new"])


@pytest.mark.parametrize("kind", [CALL, BLOB], ids=["step", "seal"])
@pytest.mark.parametrize("has_older", [True, False], ids=["fresh", "new"])
def test_a_run_that_was_lost_before_its_first_checkpoint_is_not_continued(
    has_older: bool,
    kind: int,
    proxy: Proxy,
    server: Server,
    values: list[dict[str, torch.Tensor]],
    request: pytest.FixtureRequest,
) -> None:
    """As with a store of this machine: neither from an older run, nor from nothing."""
    run = _name(request)
    if has_older:
        model = make_model()
        with make_optimizer(model, server.url(run)) as optimizer:
            train(model, optimizer, 1, 3)
            optimizer.checkpoint(["old"]).result()
    model = make_model()
    optimizer = make_optimizer(model, proxy.url(run), fresh=has_older)
    train(model, optimizer, 1, 1)
    proxy.rule = after(0, "up", kind, "cut")
    with pytest.raises(NearError):
        optimizer.checkpoint(["new"]) if kind == BLOB else optimizer.step()
    proxy.rule = lambda _way, _kind: "pass"
    # Somebody else opens and leaves the run, so that the server knows the client no more.
    make_optimizer(make_model(), server.url(run)).close()
    for _ in range(2):
        with pytest.raises(BrokenOptimizerError, match="construct model and optimizer again"):
            optimizer.restore()
        with pytest.raises((BrokenOptimizerError, NearError), match="restore"):
            optimizer.step()
    model = make_model()
    with make_optimizer(model, proxy.url(run)) as again:
        found = again.restore()
        assert (found and found.train_state) == (["old"] if has_older else None)
        assert are_same(copied(model), values[3 if has_older else 0])


def test_a_checkpoint_whose_result_is_lost_is_in_doubt_and_there(
    proxy: Proxy, request: pytest.FixtureRequest
) -> None:
    model = make_model()
    with make_optimizer(model, proxy.url(_name(request))) as optimizer:
        train(model, optimizer, 1, 1)
        handle = optimizer.checkpoint({"step": 1})
        proxy.rule = after(0, "down", RESULT, "cut")
        with pytest.raises(SealError, match="not known"):
            handle.result()
        found = optimizer.restore()
        assert found is not None
        assert found.step == 1


@pytest.mark.parametrize("number", range(4))
def test_ctrl_c_in_a_step_ends_it_and_restore_goes_on(
    number: int,
    proxy: Proxy,
    values: list[dict[str, torch.Tensor]],
    request: pytest.FixtureRequest,
) -> None:
    model = make_model()
    with make_optimizer(model, proxy.url(_name(request))) as optimizer:
        train(model, optimizer, 1, 2)
        optimizer.checkpoint().result()
        at = after(number, "down", PARAMETER, "lose")

        def rule(way: Way, kind: int) -> Fate:
            if at(way, kind) == "lose":
                os.kill(os.getpid(), signal.SIGINT)
            return "pass"

        proxy.rule = rule
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, 3, 3)
        found = optimizer.restore()
        assert found is not None
        assert are_same(copied(model), values[2])
        train(model, optimizer, 3, LAST)
        assert are_same(copied(model), values[LAST])


def test_a_closed_optimizer_does_not_connect_again(
    proxy: Proxy, request: pytest.FixtureRequest
) -> None:
    optimizer = make_optimizer(make_model(), proxy.url(_name(request)))
    optimizer.close()
    optimizer.close()
    with pytest.raises(NearError, match="closed"):
        optimizer.restore()
