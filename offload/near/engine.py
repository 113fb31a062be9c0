"""The engine of an optimizer whose state is on a server: each call of the engine is one there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.listing import CheckpointInfo
from offload.distributed.ranks import Ranks
from offload.engine.engine import Engine
from offload.engine.reference import Position
from offload.engine.seal_handle import SealHandle
from offload.engine.stats import Stats
from offload.engine.stepping import Metrics, StepStrategy
from offload.engine.training_state import Groups
from offload.errors import NearError, UnsupportedParameterError
from offload.exchange.torch_dicts import MaterializedState
from offload.format._manifest_fields import decode_group
from offload.format.layout import Layout
from offload.format.train_state import EncodedState, encode, unpack_encoded
from offload.model.parameters import describe_parameters
from offload.model.stored import Stored, describe_model
from offload.near.link import Link, Result
from offload.near.place import Place
from offload.near.reading import info
from offload.near.sealed import NearCheckpoint, NearSealHandle, packed
from offload.near.state import receive_state, send_state
from offload.near.terms import TensorTerms, Terms, decode_groups, encode_groups
from offload.options import Options
from offload.retention.policy import Retention
from offload.update.dtypes import DTYPE_CODES
from offload.update.rules import UpdateRule

if TYPE_CHECKING:
    from offload.near.forward import Exchange, NearForward


class NearEngine(Engine):
    """Carries out an optimizer's calls on a server.

    Args:
        rule: Update rule of the optimizer's class.
        hyper: Keyword arguments of the class.
        groups: ``param_groups`` of the optimizer.
        place: Run on the server.
        model: Model that gives names, buffers and frozen parameters; None for parameters only.
        keep: Retention policy.
        fresh: Whether to start over although the store has checkpoints.
        options: Settings.
        ranks: Ranks that train the model together, each with a server of its own. This one's holds
            its shards.

    Raises:
        NearError: The server cannot be reached, or an option cannot be used with one.
        OffloadError: The server cannot train this; its own error.
    """

    def __init__(
        self,
        rule: UpdateRule,
        hyper: Mapping[str, Any],
        groups: Groups,
        place: Place,
        *,
        model: torch.nn.Module | None,
        keep: Retention,
        fresh: bool,
        options: Options,
        ranks: Ranks = Ranks(),  # noqa: B008  (without state)
    ) -> None:
        _require_possible(options)
        self._place = place
        self._rule = rule
        form, shards = options.state_format, ranks.shards
        trainables = describe_parameters(groups, model, rule, form, shards=shards)
        self._stored = describe_model(model, groups, trainables, shards)
        """Tensors of the model, also those that the servers of other ranks have."""
        if not trainables and shards is not None:
            raise NearError(
                f"rank {ranks.rank} of {ranks.size} would have no parameter: use fewer ranks, or "
                "freeze fewer parameters"
            )
        here = [item for item in self._stored if item.is_here]
        self._tensors = [_sendable(item) for item in here]
        self._shards = [shards and shards(i.spec.name, i.parameter) for i in here]
        self._numbers = {id(tensor): n for n, tensor in enumerate(self._tensors)}
        self._agreed = [(i.key, t.dtype, t.shape) for i, t in zip(here, self._tensors, strict=True)]
        self._members = _members(groups)
        terms = Terms(
            run=place.run,
            optimizer=rule.optimizer_class.__name__,
            hyper=hyper,
            tensors=[_tensor_terms(t, self._memory(n)) for n, t in enumerate(self._tensors)],
            entries=None if model is None and shards is None else self._entries(model, here),
            groups=[
                (
                    {k: v for k, v in group.items() if k not in ("params", "param_names")},
                    [self._numbers[id(p)] for p in group["params"] if id(p) in self._numbers],
                    group.get("param_names") if shards is None else None,
                )
                for group in groups
            ],
            keep=keep,
            fresh=fresh,
            replaces=None,
            options=options,
            timeout_s=options.agreement_timeout_s,
        )
        self._link = Link(place, terms, self._memory)
        self._closed = False
        self._seal: NearSealHandle | None = None
        self.has_warned = False
        with self._link.understood():
            self.store: Any = SimpleNamespace(
                directory=place.url,
                directories=(place.url,),
                store_id=str(self._link.welcome["store"]),
                keeping=SimpleNamespace(warn_unranked=lambda *_: None, current=[]),
                checkpoints=(),
                newest=None,
                refused=(),
                poisoned=False,
            )
        self.state: Any = _State(ranks)
        self._forward: NearForward | None = None
        if options.overlap == "forward" and model is not None:
            from offload.near.forward import NearForward  # imports torch's compiler

            self._forward = NearForward(model, self._laid_out)
        self.strategy: Any = self._forward or StepStrategy(cast(Any, self.state))
        self.frozen_space: Any = SimpleNamespace(is_due=False)

    @property
    def num_steps(self) -> int:
        """Steps that the state on the server has seen; one that still runs counts."""
        running = 0 if self._forward is None else self._forward.running_step
        return max(self._link.num_steps, running)

    @property
    def position(self) -> Position:
        """Position of the present state, as the server says."""
        result = self._link.call("position")
        with self._link.understood():
            return Position(**result["position"])

    def step(self, groups: Groups) -> None:
        """Send gradients to the server, and receive the new parameters; or begin to."""
        self.join()
        gradients = self._gradients(groups)
        if self._forward is None:
            self._exchange(groups, gradients)(None, lambda _: None)
        else:
            exchange = partial(self._exchange, groups)
            self._forward.step(self._link.num_steps + 1, gradients, exchange)

    def _gradients(self, groups: Groups) -> dict[int, torch.Tensor]:
        """Return the gradient of each parameter that has one, by the parameter's id."""
        self._require_agreed(groups)
        stepped = [p for group in groups for p in group["params"] if p.grad is not None]
        if any(p.grad.dtype != p.dtype or p.grad.layout != torch.strided for p in stepped):
            raise UnsupportedParameterError(
                "a gradient is sparse, or has another dtype than its parameter, which no server "
                "takes: convert it, or use a directory of this machine"
            )
        return {id(p): p.grad for p in stepped}

    def _exchange(self, groups: Groups, gradients: Mapping[int, torch.Tensor]) -> Exchange:
        """Return what takes a step with some gradients, with the hyper-parameters of now."""
        sent, factors = encode_groups(groups), self.state.gradient_factors
        have = [n for n, tensor in enumerate(self._tensors) if id(tensor) in gradients]

        def gradient(number: int) -> torch.Tensor | None:
            """Return the gradient of what the server has of a tensor."""
            found, shard = gradients.get(id(self._tensors[number])), self._shards[number]
            if found is None or shard is None:
                return found
            with torch.no_grad():
                return shard.part_of(found)

        def exchange(order: Sequence[int] | None, updated: Callable[[int], object]) -> None:
            """Take the step."""
            result = self._link.step(
                sent,
                have,
                gradient,
                factors,
                order=order,
                updated=updated,
            )
            self._take_changes(groups, sent, result)

        return exchange

    def _take_changes(
        self, groups: Groups, sent: Sequence[Mapping[str, Any]], result: Result
    ) -> None:
        """Take the hyper-parameters that the class has changed; the program may change others."""
        with self._link.understood():
            after = encode_groups(decode_groups(result["groups"], len(groups)))
        for group, before, now in zip(groups, sent, after, strict=True):
            changed = {key: value for key, value in now.items() if before.get(key) != value}
            group.update(decode_group(changed))

    def checkpoint(
        self, groups: Groups, train_state: object, metrics: Metrics = None
    ) -> SealHandle:
        """Send train state and edits, and let the server seal its state."""
        encoded = encode(train_state)
        self.join()
        self._require_agreed(groups)
        return self._begin_seal(groups, encoded, metrics)

    def _begin_seal(
        self, groups: Groups, encoded: EncodedState, metrics: Metrics
    ) -> NearSealHandle:
        """Let the server begin to seal."""
        blob = packed(encoded)
        self._link.push()
        result = self._link.call(
            "checkpoint",
            blob=blob,
            groups=encode_groups(groups),
            metrics=None if metrics is None else dict(metrics),
        )
        with self._link.understood():
            self._seal = NearSealHandle(self._link, self._place, result, encoded)
        return self._seal

    def fail_checkpoint(self, error: Exception) -> None:
        """Do nothing: no other rank waits."""

    def restore(  # noqa: D102  (as in the base class)
        self,
        groups: Groups,
        which: int | str | None,
        *,
        discard_newer: bool,
        verify: bool | None = None,
        reencode: bool | None = None,
        require: Callable[[], None],
    ) -> Checkpoint | None:
        require()
        self._give_up()
        result, blob = self._link.restore(
            which=self._there(which),
            discard_newer=discard_newer,
            verify=verify,
            reencode=reencode,
        )
        if result["checkpoint"] is None:
            return None
        self._take_groups(groups, result)
        encoded, _ = unpack_encoded(blob, self._place.peer)
        with self._link.understood():
            return NearCheckpoint(self._place, result["checkpoint"], encoded)

    def pin(self, name: str, which: int | str | None, *, require: Callable[[], None]) -> None:  # noqa: D102
        require()
        self._link.call("pin", name=name, which=self._there(which))

    def unpin(self, name: str) -> None:  # noqa: D102
        self._link.call("unpin", name=name)

    def synchronize(self) -> None:  # noqa: D102
        self.join()
        self._link.call("synchronize")

    def describe(self) -> str:
        """Say where the state is; asks the server nothing."""
        closed = ", closed" if self._closed else ""
        return f"{self._place.url}: step {self.num_steps}{closed}"

    def stats(self) -> Stats:
        """Return the server's totals, and the bytes that have crossed to it and from it."""
        self.join()
        result, names = self._link.call("stats"), {field.name for field in fields(Stats)}
        with self._link.understood():
            totals = Stats(**{k: v for k, v in result["stats"].items() if k in names})
        sent, received = self.traffic
        return replace(totals, to_server_bytes=sent, from_server_bytes=received)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that have been sent to the server, and received from it."""
        return self._link.traffic

    def join(self) -> None:
        """Wait for a step that runs beside the model, and raise its error."""
        if self._forward is not None:
            self._forward.join()

    def join_all(self, call: str) -> None:  # noqa: ARG002
        """Do what `join` does."""
        self.join()

    def _laid_out(self) -> tuple[Layout, Sequence[torch.Tensor]] | None:
        parts = self._link.parts
        if parts is None:
            return None
        return parts.layout, [self._tensors[number] for number in parts.numbers]

    def add_parameters(self, groups: Groups) -> None:
        """Refuse parameters that the server was not told of."""
        self._require_agreed(groups)

    def close(self) -> None:
        """Leave the server. Idempotent.

        Raises:
            SealError: The last checkpoint could not be sealed.
        """
        if not self._closed:
            try:
                if self._forward is not None:
                    self._forward.end()
                if self._seal is not None:
                    self._seal.wait()  # afterwards nobody can ask
            finally:
                self._closed = True
                self._link.close()

    def _give_up(self) -> None:
        """Wait for a step that runs beside the model. If it failed, warn of its error."""
        try:
            self.join()
        except Exception as error:  # noqa: BLE001  (the restore replaces the state that failed)
            warnings.warn(f"given up by restore(): {error}", RuntimeWarning, stacklevel=4)

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the checkpoints of the store, as the server lists them."""
        result = self._link.call("list")
        with self._link.understood():
            return [info(self._place, one) for one in result["checkpoints"]]

    def pins(self) -> dict[str, str]:
        """Return the path of the checkpoint of each pin, by name."""
        result = self._link.call("list")
        with self._link.understood():
            return {n: self._place.checkpoint(path) for n, path in result["pins"].items()}

    def find(self, wanted: Position) -> CheckpointInfo:
        """Return the checkpoint that a reference names."""
        result = self._link.call("find", position=asdict(wanted))
        with self._link.understood():
            return info(self._place, result["checkpoint"])

    def load_reference(self, groups: Groups, reference: Mapping[str, Any]) -> None:
        """Let the server load a reference; parameters stay as they are."""
        self._require_agreed(groups)
        self._link.push()
        self._take_groups(groups, self._link.call("load_reference", reference=dict(reference)))

    def load_tensors(self, groups: Groups, state_dict: Mapping[str, Any]) -> None:
        """Send a state dict of torch to the server, which loads it block by block."""
        self._require_alone("load_state_dict()")
        self._require_agreed(groups)
        send_state(self._link, groups, self._rule, self._tensors, state_dict)

    def materialize(self, groups: Groups) -> MaterializedState:
        """Receive the present state into memory."""
        self._require_alone("materialized()")
        self._require_agreed(groups)
        return receive_state(self._link, groups, self._rule, self._tensors)

    def _there(self, which: int | str | None) -> int | str | None:
        """Return the name of a checkpoint as the server knows it."""
        if not isinstance(which, str):
            return which
        with self._link.understood():
            return f"{self._link.welcome['directories'][0]}/{which.rpartition('/')[2]}"

    def _memory(self, number: int) -> torch.Tensor:
        """Return the present memory of what the server has of a tensor."""
        shard = self._shards[number]
        return self._tensors[number] if shard is None else shard.tensor()

    def _take_groups(self, groups: Groups, result: Result) -> None:
        with self._link.understood():
            found = decode_groups(result.get("groups", encode_groups(groups)), len(groups))
        for group, given in zip(groups, found, strict=True):
            group.update(given)

    def _require_alone(self, call: str) -> None:
        if self.state.ranks.size > 1:
            raise NearError(
                f"{call} cannot move the state of several ranks over their connections so far: use "
                "offload export and import where the servers run"
            )

    def _require_agreed(self, groups: Groups) -> None:
        """Refuse what is not as the server was told."""
        if _members(groups) != self._members:
            raise UnsupportedParameterError(
                "parameters were added or replaced after the optimizer was made, which no server "
                "follows: make the optimizer after the change"
            )
        for tensor, (name, dtype, shape) in zip(self._tensors, self._agreed, strict=True):
            if tensor.dtype != dtype or tensor.shape != shape:
                raise UnsupportedParameterError(
                    f"{name!r} was {dtype} of shape {tuple(shape)} at the optimizer's making, and "
                    f"is {tensor.dtype} of shape {tuple(tensor.shape)}: make the optimizer after it"
                )

    def _entries(
        self, model: torch.nn.Module | None, stored: Sequence[Stored]
    ) -> list[tuple[str, int]]:
        """Return the names and tensors of the model's state dict, in its order.

        The name of a box ends with its place in the whole, so no other box passes for it.
        """
        numbers = {}
        for number, (item, shard) in enumerate(zip(stored, self._shards, strict=True)):
            box = "" if shard is None or shard.cut is None else shard.cut.box.notation()
            for name in (item.spec.name, *item.spec.aliases):
                numbers[name + box] = number
        names = () if model is None else model.state_dict(keep_vars=True)
        order = [name for name in names if name in numbers]
        return [(name, numbers[name]) for name in [*order, *(n for n in numbers if n not in order)]]


class _State:
    """The few facts of the state that an optimizer asks its engine for."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.seal = None
        self.gradient_factors: tuple[float, ...] = ()
        self.lifecycle = SimpleNamespace(
            decided=True, why_broken=lambda: "", is_over=False, require_alive=lambda: None
        )

    def begin_call(self, what: str) -> None:
        """Do nothing: the server notes the calls."""

    def close(self) -> None:
        """Do nothing."""


def _members(groups: Groups) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in groups]


def _tensor_terms(tensor: torch.Tensor, memory: torch.Tensor) -> TensorTerms:
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return TensorTerms(
        DTYPE_CODES[memory.dtype], tuple(memory.shape), is_parameter, tensor.requires_grad
    )


def _sendable(item: Stored) -> torch.Tensor:
    if item.is_copy:
        raise UnsupportedParameterError(
            f"{item.key!r} in the model's state dict is no tensor of the model, which no server "
            "takes: leave out model=, or use a directory of this machine"
        )
    return item.parameter


def _require_possible(options: Options) -> None:
    """Refuse options that need the state on this machine."""
    default = Options()
    if options.overlap == "backward":
        raise NearError(
            'overlap="backward" cannot be used with a server: use overlap="forward", or a '
            "directory of this machine"
        )
    for name in ("tier", "backend", "trace", "device_memory", "gradients", "parameters"):
        if getattr(options, name) != getattr(default, name):
            raise NearError(
                f"{name}= cannot be used with a server: leave it out, or use a directory of this "
                "machine"
            )
    if options.placement == "device":
        raise NearError('placement="device" cannot be used with a server, which updates on its CPU')
