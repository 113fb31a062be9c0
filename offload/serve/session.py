"""One client's training on the server: its optimizer, and the calls that it makes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from typing import Any, Final, TypeAlias

from gds.waiting import start
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.listing import CheckpointInfo, list_checkpoints
from offload.engine.engine import Engine
from offload.engine.reference import Position
from offload.engine.seal_handle import SealHandle
from offload.errors import InDoubtError, NearError
from offload.format._layout_fields import encode_scalars
from offload.format._manifest_fields import count, each, items, mapping
from offload.format.train_state import (
    decode,
    unpack_encoded,
)
from offload.journal import log_event
from offload.near.chunks import Part, views
from offload.near.sealed import packed
from offload.near.terms import CLASSES, Terms, decode_groups, encode_groups
from offload.near.wire import Frame, Kind, Wire
from offload.optimizer import OffloadedOptimizer
from offload.serve.model import ServedModel
from offload.serve.state import ArrivingTensor, arriving_dict, state_blocks
from offload.serve.stepping import ArrivingStep

_Following: TypeAlias = tuple[Kind, int, Sequence[bytes | memoryview]]
"""A frame that follows a result: its kind, its index, and its content."""

_GIVE_BACK_S: Final = 0.01
"""Seconds between two times at which memory of parameters is given back, while a seal or a restore
uses them one after the other."""

FORGOTTEN: Final = "the server was started anew since then: checkpoints() has the list"

_CALLS: Final = (
    *("step", "edit", "checkpoint", "restore", "parameters", "pin", "unpin", "list", "find"),
    *("position", "stats", "synchronize", "load_reference", "state", "load_state", "close"),
)
"""Calls of a client; each is a method of `Session`."""


class Session:
    """An optimizer that a client uses over a connection, and what the connection is.

    Args:
        terms: What the client trains.
        directories: Directories of the store, one on each drive.

    Raises:
        OffloadError: The optimizer cannot be made; see `OffloadedOptimizer`.
        ValueError, TypeError: The terms make no optimizer.
    """

    def __init__(self, terms: Terms, directories: Sequence[str]) -> None:
        self.terms = terms
        self._model = ServedModel(terms, os.path.dirname(directories[0]))
        tensors = self._model.tensors
        groups = []
        for hyper, members, called in terms.groups:
            parameters: list[Any] = [tensors[number] for number in members]
            if called is not None:
                parameters = list(zip(called, parameters, strict=True))
            groups.append({**hyper, "params": parameters})
        self._optimizer = OffloadedOptimizer(
            CLASSES[terms.optimizer],
            groups,
            directory=directories,
            model=self._model.module,
            keep=terms.keep,
            fresh=terms.fresh and not _has_newer(directories[0], terms.replaces),
            options=terms.options,
            **terms.hyper,
        )
        engine = self._optimizer._engine
        if engine is None:
            raise RuntimeError("the optimizer has no engine")
        self._engine: Engine = engine
        self._steps = ArrivingStep(engine.state, self._model)
        engine.strategy = self._steps
        self._handles: dict[int, SealHandle] = {}
        self.is_over = False
        """Whether the client has left in order."""
        self.awaits_end = False
        """Whether frames of the present call may follow."""
        self._after: Iterable[_Following] = ()
        """Frames that follow the result."""

    def welcome(self) -> dict[str, Any]:
        """Return what a client must know before its first call."""
        self._steps.told = None  # what was sent last may have been lost
        store = self._engine.store
        return {
            "store": store.store_id,
            "directories": list(store.directories),
            "newest": max((one.manifest.generation for one in store.checkpoints), default=0),
            "num_steps": self._engine.num_steps,
        }

    def serve(self, wire: Wire, number: int, document: Mapping[str, Any]) -> None:
        """Carry out a call, and send its result.

        Raises:
            NearError: The client is lost.
        """
        self._wire, self._number = self._steps.wire, self._steps.number = wire, number
        self.awaits_end, self._after = False, ()  # of the last call, if its client was lost
        name = document.get("call")
        if name not in _CALLS:
            raise NearError(f"{wire.peer} makes a call that no client makes")
        with caught_warnings() as caught:
            result = getattr(self, f"_{name}")(document)
        result["num_steps"] = self._engine.num_steps
        result["warnings"] = caught
        self.drain()
        wire.send_document(Kind.RESULT, number, result)
        following: Iterable[_Following] = self._after
        self._after = ()
        for kind, index, content in following:
            wire.send(kind, number, content, index=index)
            self._model.live.give_back_all()

    def drain(self) -> None:
        """Read the frames of the present call that have not been read, and forget them.

        Raises:
            NearError: The client is lost.
        """
        wire = self._wire
        while self.awaits_end:
            frame = wire.receive((*Kind,), self._number)
            wire.skip(frame)
            self.awaits_end = frame.kind != Kind.END

    def close(self) -> None:
        """Close the optimizer; the state that was not sealed is lost. Idempotent."""
        self.is_over = True
        self._optimizer.close()

    def _close(self, _: Mapping[str, Any]) -> dict[str, Any]:
        self.close()
        return {}

    def _take_groups(self, document: Mapping[str, Any]) -> None:
        groups = self._optimizer.param_groups
        for group, given in zip(
            groups, decode_groups(document["groups"], len(groups)), strict=True
        ):
            group.update(given)

    def _step(self, document: Mapping[str, Any]) -> dict[str, Any]:
        self._take_groups(document)
        if document["order"] is not None:
            # `TrainingState.chunks` ignores an order of another number of chunks.
            self._engine.state.learned_order = _permutation(each(count, document["order"]))
        numbers = each(self._number_of_tensor, document["have"])
        self._model.set_gradients(numbers)
        factors = tuple(float(one) for one in items(document["factors"]))
        optimizer = self._optimizer
        self._steps.announced = False
        try:
            with optimizer.gradients_times(*factors):
                optimizer.step()
        finally:
            self.awaits_end = self._steps.announced
            self._model.gradients.give_back_all()
        return {"groups": encode_groups(optimizer.param_groups)}

    def _number_of_tensor(self, value: object) -> int:
        if count(value) >= len(self._model.tensors):
            raise ValueError(f"there is no tensor {value}")
        return count(value)

    def _edit(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Take values that the client has changed between steps: of chunks, and whole tensors."""
        self.awaits_end = True
        chunks = each(count, document["chunks"])
        numbers = each(self._number_of_tensor, document["tensors"])
        if self._engine.state.seal is not None:
            self._engine.state.seal.wait_all_copied()
        live = self._model.live
        for chunk in chunks:
            parts = self._parts_of(chunk)
            frame = self._next(Kind.PARAMETER, chunk)
            self._wire.read_into(frame, views(parts, live.bytes))
            live.give_back(parts)
        for number in numbers:
            frame = self._next(Kind.TENSOR, number)
            content = live.bytes[number]
            self._wire.read_into(frame, [content])
            live.give_back([(number, 0, len(content))])
        return {}

    def _parts_of(self, chunk: int) -> list[Part]:
        parts = self._steps.known_parts()
        if chunk >= parts.num_chunks:
            raise ValueError(f"there is no chunk {chunk}")
        return parts.of(chunk)

    def _next(self, kind: Kind, index: int) -> Frame:
        frame = self._wire.receive((kind,), self._number)
        if frame.index != index:
            raise NearError(f"{self._wire.peer} sent {kind.name} {frame.index}, expected {index}")
        return frame

    def _checkpoint(self, document: Mapping[str, Any]) -> dict[str, Any]:
        self.awaits_end = True
        most = self.terms.options.train_state_bytes
        frame = self._wire.receive((Kind.BLOB,), self._number)
        encoded, _ = unpack_encoded(self._wire.read(frame, most), self._wire.peer)
        self._take_groups(document)
        metrics = document["metrics"]
        handle = self._optimizer.checkpoint(
            decode(encoded), metrics=None if metrics is None else mapping(metrics)
        )
        self._give_back_until(handle.done)
        self._handles[self._number] = handle
        for number in [n for n, one in self._handles.items() if one.done()][:-8]:
            del self._handles[number]
        return {"handle": self._number, "step": handle.step}

    def _give_back_until(self, is_over: Callable[[], bool]) -> None:
        """Give back memory of parameters time and again, on a thread, until something is over."""

        def give_back() -> None:
            """Give back what is not in use at the moment; the file keeps it."""
            while not is_over():
                self._model.live.give_back_all()
                time.sleep(_GIVE_BACK_S)
            self._model.live.give_back_all()

        start(threading.Thread(target=give_back, name="offload-serve-memory", daemon=True))

    @contextmanager
    def _giving_back(self) -> Iterator[None]:
        """Give back memory of parameters time and again in the block."""
        ended = threading.Event()
        self._give_back_until(ended.is_set)
        try:
            yield
        finally:
            ended.set()

    def sealed(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for a checkpoint, on any thread, and say what has become of it.

        Raises:
            SealError: It could not be sealed, or is of another session.
        """
        handle = self._handles.get(count(document["handle"]))
        if handle is None:
            raise InDoubtError(FORGOTTEN)
        timeout_s = document["timeout_s"]
        try:
            checkpoint = handle.result(None if timeout_s is None else float(timeout_s))
        except TimeoutError:
            return {"done": False}
        return {
            "done": True,
            "checkpoint": _described(checkpoint),
            "bytes_written": handle.bytes_written,
            "seal_s": handle.seal_s,
        }

    def _restore(self, document: Mapping[str, Any]) -> dict[str, Any]:
        which = document["which"]
        if which is not None and not isinstance(which, int | str):
            raise ValueError("a checkpoint is named by its step or its path")
        with self._giving_back():
            checkpoint = self._optimizer.restore(
                which,
                discard_newer=document["discard_newer"] is True,
                verify=document["verify"],
                reencode=document["reencode"],
            )
        if checkpoint is None:
            return {"checkpoint": None}
        state = packed(checkpoint.read_train_state())
        values = self._all_values()
        self._after = chain(self._after, [(Kind.BLOB, 0, [state])])
        return {"checkpoint": _described(checkpoint), "state_bytes": len(state), **values}

    def _parameters(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Send some chunks once more, for a client that has not received those of a step."""
        chunks = {chunk: self._parts_of(chunk) for chunk in each(count, document["chunks"])}
        self._after = self._values(Kind.PARAMETER, chunks)
        return {"groups": encode_groups(self._optimizer.param_groups)}

    def _all_values(self) -> dict[str, Any]:
        """Let all values of the model follow the result."""
        content, parts = self._model.live.bytes, self._steps.known_parts()
        chunks = {chunk: parts.of(chunk) for chunk in range(parts.num_chunks)}
        stepped = set(parts.numbers)
        others = {n: [(n, 0, len(one))] for n, one in enumerate(content) if n not in stepped}
        self._after = chain(self._values(Kind.PARAMETER, chunks), self._values(Kind.TENSOR, others))
        return {
            "groups": encode_groups(self._optimizer.param_groups),
            "layout": self._steps.layout_document(),
            "tensors": list(others),
        }

    def _values(self, kind: Kind, parts: Mapping[int, Sequence[Part]]) -> Iterator[_Following]:
        for index, found in parts.items():
            yield kind, index, views(found, self._model.live.bytes)

    def _state(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Let the whole state follow the result."""
        state = self._engine.state
        state.lifecycle.require_usable()
        self._engine.relayout(self._optimizer.param_groups)
        self._after = state_blocks(state, self._steps.known_parts())
        return {"scalars": encode_scalars(state.table.scalars), **self._steps.layout_if_new()}

    def _load_state(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Load a state dict whose tensors the client sends block by block."""
        wire, call, tensors = self._wire, self._number, self._model.tensors

        def source(place: tuple[int, str], code: str) -> ArrivingTensor:
            """Return a tensor of state that the client has."""
            shape = tensors[self._number_of_tensor(place[0])].shape
            return ArrivingTensor(wire, call, place, code, shape)

        members = [group[1] for group in self.terms.groups]
        with self._giving_back():
            self._optimizer.load_state_dict(arriving_dict(document, members, source))
        return self._all_values()

    def _pin(self, document: Mapping[str, Any]) -> dict[str, Any]:
        self._optimizer.pin(document["name"], document["which"])
        return {}

    def _unpin(self, document: Mapping[str, Any]) -> dict[str, Any]:
        self._optimizer.unpin(document["name"])
        return {}

    def _list(self, _: Mapping[str, Any]) -> dict[str, Any]:
        infos = self._optimizer.checkpoints()
        return {"checkpoints": [_info(one) for one in infos], "pins": self._optimizer.pins()}

    def _find(self, document: Mapping[str, Any]) -> dict[str, Any]:
        wanted = Position(**mapping(document["position"]))
        return {"checkpoint": _info(self._optimizer.find(wanted))}

    def _position(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"position": asdict(self._optimizer.position)}

    def _stats(self, _: Mapping[str, Any]) -> dict[str, Any]:
        found = asdict(self._optimizer.stats())
        return {"stats": {k: v for k, v in found.items() if isinstance(v, int | float | str)}}

    def _synchronize(self, _: Mapping[str, Any]) -> dict[str, Any]:
        self._optimizer.synchronize()
        return {}

    def _load_reference(self, document: Mapping[str, Any]) -> dict[str, Any]:
        self._optimizer.load_state_dict(mapping(document["reference"]))
        return {"groups": encode_groups(self._optimizer.param_groups)}


def _has_newer(directory: str, generation: int | None) -> bool:
    """Return whether a store has a checkpoint that is newer than a generation, if one is given."""
    if generation is None or not os.path.isdir(directory):
        return False
    return any(one.generation > generation for one in list_checkpoints(directory))


_caught = threading.local()


@contextmanager
def caught_warnings() -> Iterator[list[str]]:
    """Collect the warnings of this thread, which `note_warning` gets, instead of showing them."""
    _caught.messages = found = list[str]()
    try:
        yield found
    finally:
        del _caught.messages


def note_warning(message: Warning | str, *_: object) -> None:
    """Note a warning for the client whose call this thread carries out, or log it.

    It takes the place of `warnings.showwarning`.
    """
    if hasattr(_caught, "messages"):
        _caught.messages.append(str(message)[:2000])
    else:
        log_event(str(message), logging.WARNING)


def _permutation(order: Sequence[int]) -> Sequence[int]:
    """Return the value if it has each number from 0 once; raise ValueError otherwise."""
    if sorted(order) != list(range(len(order))):
        raise ValueError("an order of chunks that does not have each chunk once")
    return order


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a client knows of a checkpoint, besides its train state."""
    return {
        "path": checkpoint.path,
        "step": checkpoint.step,
        "metrics": dict(checkpoint.metrics),
        "generation": checkpoint.manifest.generation,
        "created": checkpoint.manifest.created,
    }


def _info(found: CheckpointInfo) -> dict[str, Any]:
    return {**asdict(found), "metrics": dict(found.metrics)}
