"""The client's end: calls, and the values that cross with them.

The client keeps a digest of what the server has of each chunk and each other tensor. A chunk whose
bytes differ from that was edited here. It is sent along, and replaces what the server has.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from gds.waiting import start
from offload.errors import BrokenOptimizerError, NearError
from offload.format._manifest_fields import count, each, items, mapping
from offload.near.chunks import ChunkParts, Part
from offload.near.errors_sent import decode_error
from offload.near.live import Memory, Received, read
from offload.near.place import Place, token_for
from offload.near.reading import ask
from offload.near.terms import Terms, decode_layout, encode_terms
from offload.near.wire import Frame, Kind, Wire, digest_of

Result = dict[str, Any]


class Link:
    """A connection to a server that trains one run, and what the server has of its values.

    Args:
        place: Run on the server.
        terms: What is trained.
        memory: Function that returns the present memory of a tensor in the terms.

    Raises:
        NearError: The server cannot be reached.
        OffloadError: The server cannot train this; its own error.
    """

    def __init__(self, place: Place, terms: Terms, memory: Memory) -> None:
        self._place = place
        self._terms = terms
        self._memory = memory
        self._number = 0
        self._secret = ""
        self._lock = threading.RLock()
        self.parts: ChunkParts | None = None
        """Parts of the chunks of the server's layout; None if it is not known yet."""
        self._known: dict[int, int] = {}
        """Digest of what the server has of each chunk."""
        self._known_others: dict[int, int] = {}
        """Digest of what the server has of each tensor that is in no chunk."""
        self.num_steps = 0
        """Steps that the server's state has seen."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.welcome: Result = {}
        self._wire: Wire | None = None
        self._is_closed = False
        self._in_call = False
        """Whether frames of a call are on their way."""
        self._has_stepped = False
        """Whether a step has begun; a server that has forgotten the run does not have its state."""
        self._is_torn = False
        """Whether the values here belong to no state that the server has."""
        self._connect()

    def call(self, call: str, *, blob: bytes | None = None, **arguments: Any) -> Result:
        """Make a call, and return its result.

        Args:
            call: Name of the call.
            blob: Bytes that follow it.
            arguments: Its arguments, as JSON values.

        Raises:
            NearError: The server is lost.
            OffloadError: The error of the call on the server.
        """
        with self.calling(call, **arguments) as (wire, number):
            if blob is not None:
                wire.send(Kind.BLOB, number, [blob])
                wire.send(Kind.END, number)
            return self.result(wire, number)

    @contextmanager
    def calling(self, call: str, **arguments: Any) -> Iterator[tuple[Wire, int]]:
        """Begin a call, and yield the connection and its number; the block receives the result."""
        with self._talking() as wire:
            yield wire, self._begin(wire, call, arguments)

    def ask(self, what: str, **arguments: Any) -> Result:
        """Return the answer to a question about this run; no other call waits meanwhile.

        Raises:
            NearError: The server is lost.
            OffloadError: The error of the server.
        """
        wire = Wire(self._place.connect(), self._place.peer, self._terms.timeout_s)
        try:
            return ask(wire, self._place, {"what": what, "secret": self._secret, **arguments})
        finally:
            self._end(wire)

    def step(
        self,
        groups: Sequence[Mapping[str, Any]],
        have: Sequence[int],
        gradients: Memory,
        factors: Sequence[float],
        *,
        order: Sequence[int] | None = None,
        updated: Callable[[int], object] = lambda _: None,
    ) -> Result:
        """Take a step: send gradients, and receive parameters into the live tensors.

        Args:
            groups: Encoded hyper-parameters.
            have: Numbers of the tensors that have a gradient.
            gradients: Function that returns the gradient of a tensor.
            factors: Factors that gradients are multiplied by.
            order: All chunks in the order in which they are wanted; None for any order.
            updated: Function that is called with each chunk whose new parameters are here.

        Raises:
            NearError: The server is lost, and the step may be half taken.
            BrokenOptimizerError: A step was lost before.
            OffloadError: The error of the step on the server.
        """
        with self._talking() as wire, self.changing():
            expected = self.num_steps + 1
            arguments = {
                "groups": list(groups),
                "have": list(have),
                "factors": list(factors),
                "order": None if order is None else list(order),
            }
            number = self._begin(wire, "step", arguments)
            frame = self.frame(wire, number, Kind.PASS, Kind.RESULT)
            if frame.kind != Kind.PASS:
                return self.result(wire, number, frame)
            announced = wire.read_document(frame)
            with self.understood():
                self.learn(announced)
                chunks = self._chunks(announced["chunks"])
            exchange = _Exchange(self, wire, number, chunks, {*have})
            try:
                exchange.run(gradients, updated)
                return self.result(wire, number)
            except NearError:
                if not exchange.all_sent:
                    raise
                return self._come_back(expected, exchange.missing)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Note, if a call is broken off in the block, that no state belongs to the values here.

        Raises:
            BrokenOptimizerError: A step was lost before.
        """
        self._require_whole()
        self._has_stepped = self._is_torn = True
        try:
            yield
        except Exception:
            self._is_torn = self._in_call  # the server remembers an error of its own
            raise
        self._is_torn = False

    def push(self) -> None:
        """Send what has been edited here since the server has sent it.

        Raises:
            NearError: The server is lost.
            BrokenOptimizerError: A step was lost before.
        """
        with self._talking() as wire:
            self._require_whole()
            chunks, others = self._edited()
            if not (chunks or others):
                return
            number = self._begin(wire, "edit", {"chunks": chunks, "tensors": others})
            for chunk in chunks:
                self.send_parameters(wire, number, chunk)
            for other in others:
                content = read([self._whole(other)], self._memory)
                digest = wire.send(Kind.TENSOR, number, content, index=other)
                self._known_others[other] = digest
            wire.send(Kind.END, number)
            self.result(wire, number)

    @property
    def is_edited(self) -> bool:
        """Whether `push` would send anything."""
        return any(self._edited())

    def connect_again(self) -> None:
        """Connect, if the connection was lost.

        Raises:
            NearError: The server cannot be reached.
        """
        with self._lock:
            if self._wire is None and not self._is_closed:
                self._connect()

    def restore(self, **arguments: Any) -> tuple[Result, bytes]:
        """Restore a checkpoint on the server; receive its values, and return its train state.

        A connection that was lost is made anew.

        Raises:
            NearError: The server is lost.
            BrokenOptimizerError: Steps were lost, and there is no checkpoint.
            OffloadError: The error of `restore` on the server.
        """
        self.connect_again()
        with self.calling("restore", **arguments) as (wire, number):
            result = self.result(wire, number)
            with self.understood():
                if result["checkpoint"] is None:
                    self._give_up_if_torn()
                    return result, b""
                state_bytes = count(result["state_bytes"])
            self.receive_values(wire, number, result)
            state = wire.read(self.frame(wire, number, Kind.BLOB), state_bytes)
            self._is_torn = False
            return result, state

    def receive_values(self, wire: Wire, number: int, result: Result) -> None:
        """Receive all values that the server has, which follow a result."""
        with self.understood():
            self.learn(result)
            others = self._others()
            if items(result["tensors"]) != others:
                raise ValueError("tensors that are not there")
        self._receive_chunks(wire, number, range(self._known_parts().num_chunks))
        for other in others:
            frame = self.frame(wire, number, Kind.TENSOR)
            received = Received([self._whole(other)], self._memory)
            wire.read_into(frame, received.views)
            received.store()
            self._known_others[other] = frame.digest

    def close(self) -> None:
        """Leave the server in order, which closes the store. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._wire is None:
                return
            try:
                self.call("close")
            finally:
                self.drop()

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Say that a document is none of a server, if something cannot be read from it."""
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise NearError(
                f"{self._place.peer} sent a document with {error!r:.200}: it is no offload server "
                "of this version"
            ) from error

    def drop(self) -> None:
        """End the connection without a word. Never raises."""
        wire, self._wire = self._wire, None
        if wire is not None:
            self._end(wire)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that have been sent, and received, on all connections."""
        wire = self._wire
        if wire is None:
            return self.bytes_sent, self.bytes_received
        return self.bytes_sent + wire.bytes_sent, self.bytes_received + wire.bytes_received

    def send_parameters(self, wire: Wire, number: int, chunk: int) -> None:
        """Send the present parameters of a chunk."""
        content = read(self._known_parts().of(chunk), self._memory)
        self._known[chunk] = wire.send(Kind.PARAMETER, number, content, index=chunk)

    def send_gradients(
        self, wire: Wire, number: int, chunk: int, have: set[int], gradients: Memory
    ) -> None:
        """Send the gradients of a chunk, and its parameters before them if they were edited."""
        parts = self._known_parts()
        if self._is_edited(parts.of(chunk), chunk):
            self.send_parameters(wire, number, chunk)
        wire.send(Kind.GRADIENT, number, read(parts.of(chunk, have), gradients), index=chunk)

    def receive_parameters(self, wire: Wire, frame: Frame, chunk: int) -> None:
        """Receive the new parameters of a chunk.

        Raises:
            NearError: The server is lost, or the frame is not of this chunk.
        """
        if frame.index != chunk:
            raise NearError(f"{wire.peer} sent chunk {frame.index}, expected {chunk}")
        received = Received(self._known_parts().of(chunk), self._memory)
        self._known.pop(chunk, None)
        wire.read_into(frame, received.views)
        received.store()
        self._known[chunk] = frame.digest

    def frame(self, wire: Wire, number: int, *kinds: Kind) -> Frame:
        """Receive the header of a frame of some kinds; raise the error that comes instead of it."""
        frame = wire.receive((*kinds, Kind.ERROR), number)
        if frame.kind == Kind.ERROR:
            document = wire.read_document(frame)
            self._in_call = False  # an error ends the call in order
            raise decode_error(document, wire.peer)
        return frame

    def _connect(self) -> None:
        """Connect, and say hello; `welcome` is the server's answer.

        Nothing is known of what the server has, unless it says later on.
        """
        place, before = self._place, self._secret
        wire = Wire(place.connect(), place.peer, self._terms.timeout_s)
        try:
            hello = {"token": token_for(place), "secret": before}
            wire.send_document(Kind.HELLO, 0, hello)
            self.result(wire, 0)
            wire.send_document(Kind.HELLO, 0, encode_terms(self._terms))
            self.welcome = self.result(wire, 0)
            self._secret = str(self.welcome.get("secret"))
        except BaseException:
            wire.close()
            raise
        if self._secret != before:
            self.parts = None
            self._is_torn |= self._has_stepped
        if self._terms.replaces is None:
            with self.understood():
                self._terms = replace(self._terms, replaces=count(self.welcome["newest"]))
        self._known.clear()
        self._known_others.clear()
        self._wire = wire

    @contextmanager
    def _talking(self) -> Iterator[Wire]:
        """Yield the connection, for one call; end it if the call is broken off."""
        with self._lock:
            wire = self._connected()
            try:
                yield wire
            except BaseException:
                if self._in_call:
                    self.drop()
                raise
            finally:
                self._in_call = False

    def _connected(self) -> Wire:
        """Return the connection."""
        if self._wire is None:
            why = "the optimizer is closed" if self._is_closed else "restore() connects again"
            raise NearError(f"there is no connection to {self._place.peer}: {why}")
        return self._wire

    def _end(self, wire: Wire) -> None:
        self.bytes_sent += wire.bytes_sent
        self.bytes_received += wire.bytes_received
        wire.close()

    def _require_whole(self) -> None:
        if self._is_torn:
            raise BrokenOptimizerError(
                f"{self._place.peer} was lost in a step, or has forgotten it: call restore()"
            )

    def _give_up_if_torn(self) -> None:
        """Leave the server for good if there is no state that fits the values here."""
        if self._is_torn:
            self.drop()
            raise BrokenOptimizerError(
                f"{self._place.peer} has lost the steps of this run, and there is no checkpoint "
                "yet: construct model and optimizer again"
            )

    def _begin(self, wire: Wire, name: str, arguments: Mapping[str, Any]) -> int:
        self._number += 1
        self._in_call = True
        wire.send_document(Kind.CALL, self._number, {"call": name, **arguments})
        return self._number

    def result(self, wire: Wire, number: int, frame: Frame | None = None) -> Result:
        """Return the result of a call, or raise its error, and repeat the server's warnings."""
        frame = frame or self.frame(wire, number, Kind.RESULT)
        document = wire.read_document(frame)
        with self.understood():
            self.num_steps = count(document.get("num_steps", self.num_steps))
            messages = each(str, document.get("warnings", []))
        for message in messages:
            warnings.warn(message, RuntimeWarning, stacklevel=5)
        return document

    def _come_back(self, expected: int, chunks: Sequence[int]) -> Result:
        """Connect again after a loss, and receive what a step has computed of some chunks.

        Raises:
            NearError: The server has not taken the step, or is not there.
        """
        self.drop()
        before = self._secret
        self._connect()
        wire = self._connected()
        if self._secret != before or self.num_steps != expected:
            raise NearError(
                f"{wire.peer} was lost in step {expected}, which it has not taken: call restore()"
            )
        number = self._begin(wire, "parameters", {"chunks": list(chunks)})
        result = self.result(wire, number)
        self._receive_chunks(wire, number, chunks)
        return result

    def _receive_chunks(self, wire: Wire, number: int, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self.receive_parameters(wire, self.frame(wire, number, Kind.PARAMETER), chunk)

    def learn(self, document: Mapping[str, Any]) -> ChunkParts:
        """Return how the server lays out its state, which a document says if it is new."""
        if "layout" in document:
            self.parts = ChunkParts(
                *decode_layout(mapping(document["layout"]), self._terms.tensors)
            )
            self._known.clear()
        return self._known_parts()

    def _chunks(self, value: object) -> tuple[int, ...]:
        found = each(count, value)
        if len({*found}) != len(found) or not {*found} <= {*range(self._known_parts().num_chunks)}:
            raise ValueError("chunks that are not there")
        return found

    def _known_parts(self) -> ChunkParts:
        if self.parts is None:
            raise NearError(f"{self._place.peer} has not said how its state is laid out")
        return self.parts

    def _others(self) -> list[int]:
        """Return the numbers of the tensors that are in no chunk."""
        stepped = set() if self.parts is None else {*self.parts.numbers}
        return [n for n in range(len(self._terms.tensors)) if n not in stepped]

    def _whole(self, number: int) -> Part:
        tensor = self._memory(number)
        if tensor is None:
            raise LookupError(f"tensor {number} is missing")
        return number, 0, tensor.numel() * tensor.element_size()

    def _edited(self) -> tuple[list[int], list[int]]:
        """Return the chunks, and the other tensors, that the server does not have as they are."""
        chunks: list[int] = []
        if (parts := self.parts) is not None:
            chunks = [c for c in range(parts.num_chunks) if self._is_edited(parts.of(c), c)]
        return chunks, [n for n in self._others() if self._is_other_edited(n)]

    def _is_edited(self, parts: Sequence[Part], chunk: int) -> bool:
        known = self._known.get(chunk)
        return known is None or digest_of(read(parts, self._memory)) != known

    def _is_other_edited(self, number: int) -> bool:
        known = self._known_others.get(number)
        return known is None or digest_of(read([self._whole(number)], self._memory)) != known


class _Exchange:
    """Gradients that leave on a thread of their own, and parameters that arrive meanwhile."""

    def __init__(
        self, link: Link, wire: Wire, number: int, chunks: Sequence[int], have: set[int]
    ) -> None:
        self._link, self._wire, self._number = link, wire, number
        self._chunks = chunks
        self._have = have
        self.missing = [c for c in chunks if link._known_parts().of(c, have)]
        """Chunks whose new parameters have not been received."""
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self.all_sent = False
        """Whether the last gradient has left."""

    def run(self, gradients: Memory, updated: Callable[[int], object]) -> None:
        """Exchange the values of all chunks.

        Raises:
            NearError: The server is lost.
            OffloadError: The error of the step on the server.
        """
        link, wire = self._link, self._wire
        thread = threading.Thread(target=self._send, args=(gradients,), name="offload-near")
        start(thread)
        try:
            for chunk in self._chunks:
                if chunk in self.missing[:1]:
                    frame = link.frame(wire, self._number, Kind.PARAMETER)
                    link.receive_parameters(wire, frame, chunk)
                    del self.missing[0]
                updated(chunk)
            thread.join()  # chunks without a gradient may follow
        except NearError as error:
            wire.shut()  # the other thread may be sending
            thread.join()
            if self._errors and not isinstance(self._errors[0], NearError):
                raise self._errors[0] from error
            raise
        finally:
            self._stop.set()
            thread.join()

    def _send(self, gradients: Memory) -> None:
        try:
            for chunk in self._chunks:
                if self._stop.is_set():
                    break
                self._link.send_gradients(self._wire, self._number, chunk, self._have, gradients)
            else:
                self.all_sent = True
        except BaseException as error:  # noqa: BLE001  (raised by the other thread)
            self._errors.append(error)
        finally:
            with suppress(NearError):
                self._wire.send(Kind.END, self._number)
