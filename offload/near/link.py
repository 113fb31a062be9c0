"""The client's end: calls, and the values that cross with them.

The client keeps a digest of what the server has of each chunk and each other tensor. A chunk whose
bytes differ from that was edited here. It is sent along, and replaces what the server has.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gds.waiting import start
from offload.errors import NearError
from offload.format._manifest_fields import count, each, mapping
from offload.near.chunks import ChunkParts, Part
from offload.near.errors_sent import decode_error
from offload.near.live import Memory, Received, read
from offload.near.place import Place, token_for
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
        with self._lock:
            wire = self._connected()
            number = self._begin(wire, call, arguments)
            if blob is not None:
                wire.send(Kind.BLOB, number, [blob])
                wire.send(Kind.END, number)
            return self._result(wire, number)

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
            OffloadError: The error of the step on the server.
        """
        with self._lock:
            wire, expected = self._connected(), self.num_steps + 1
            arguments = {
                "groups": list(groups),
                "have": list(have),
                "factors": list(factors),
                "order": None if order is None else list(order),
            }
            number = self._begin(wire, "step", arguments)
            frame = wire.receive((Kind.PASS, Kind.RESULT, Kind.ERROR), number)
            if frame.kind != Kind.PASS:
                return self._result(wire, number, frame)
            announced = wire.read_document(frame)
            if "layout" in announced:
                self._learn(mapping(announced["layout"]))
            exchange = _Exchange(self, wire, number, each(count, announced["chunks"]), {*have})
            try:
                exchange.run(gradients, updated)
                return self._result(wire, number)
            except NearError:
                if not exchange.all_sent:
                    raise
                return self._come_back(expected)

    def push(self) -> None:
        """Send what has been edited here since the server has sent it.

        Raises:
            NearError: The server is lost.
        """
        with self._lock:
            wire, parts = self._connected(), self.parts
            chunks: list[int] = []
            if parts is not None:
                chunks = [c for c in range(parts.num_chunks) if self._is_edited(parts.of(c), c)]
            others = [n for n in self._others() if self._is_other_edited(n)]
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
            self._result(wire, number)

    def restore(self, **arguments: Any) -> tuple[Result, bytes]:
        """Restore a checkpoint on the server; receive its values, and return its train state.

        Raises:
            NearError: The server is lost.
            OffloadError: The error of `restore` on the server.
        """
        with self._lock:
            wire = self._connected()
            number = self._begin(wire, "restore", arguments)
            result = self._result(wire, number)
            if result["checkpoint"] is None:
                return result, b""
            self._receive_values(wire, number, result)
            return result, wire.read(
                wire.receive((Kind.BLOB,), number), count(result["state_bytes"])
            )

    def close(self) -> None:
        """Leave the server in order, which closes the store. Idempotent."""
        with self._lock:
            if self._wire is None:
                return
            try:
                self.call("close")
            finally:
                self.drop()

    def drop(self) -> None:
        """End the connection without a word. Never raises."""
        wire, self._wire = self._wire, None
        if wire is not None:
            self.bytes_sent += wire.bytes_sent
            self.bytes_received += wire.bytes_received
            wire.close()

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

    def raise_error(self, wire: Wire, frame: Frame) -> None:
        """Raise the error that the server has sent."""
        raise decode_error(wire.read_document(frame), wire.peer)

    def _connect(self) -> None:
        """Connect, and say hello; `welcome` is the server's answer."""
        place = self._place
        wire = Wire(place.connect(), place.peer, self._terms.timeout_s)
        try:
            hello = {
                "terms": encode_terms(self._terms),
                "token": token_for(place),
                "secret": self._secret,
            }
            wire.send_document(Kind.HELLO, 0, hello)
            self.welcome = self._result(wire, 0)
            self._secret = str(self.welcome["secret"])
        except BaseException:
            wire.close()
            raise
        self._wire = wire

    def _connected(self) -> Wire:
        """Return the connection."""
        if self._wire is None:
            raise NearError(f"{self._place.peer} was lost, or the optimizer is closed")
        return self._wire

    def _begin(self, wire: Wire, name: str, arguments: Mapping[str, Any]) -> int:
        self._number += 1
        try:
            wire.send_document(Kind.CALL, self._number, {"call": name, **arguments})
        except NearError:
            self.drop()
            raise
        return self._number

    def _result(self, wire: Wire, number: int, frame: Frame | None = None) -> Result:
        """Return the result of a call, or raise its error, and repeat the server's warnings."""
        try:
            frame = frame or wire.receive((Kind.RESULT, Kind.ERROR), number)
            document = wire.read_document(frame)
        except NearError:
            self.drop()
            raise
        if frame.kind == Kind.ERROR:
            raise decode_error(document, wire.peer)
        self.num_steps = count(document["num_steps"])
        for message in document.get("warnings", ()):
            warnings.warn(str(message), RuntimeWarning, stacklevel=5)
        return document

    def _come_back(self, expected: int) -> Result:
        """Connect again after a loss, and receive what a step has computed.

        Raises:
            NearError: The server has not taken the step, or is not there.
        """
        self.drop()
        self._connect()
        wire = self._connected()
        if self.num_steps != expected:
            raise NearError(
                f"{wire.peer} was lost in step {expected}, which it has not taken: call restore()"
            )
        number = self._begin(wire, "parameters", {})
        result = self._result(wire, number)
        self._receive_values(wire, number, result)
        return result

    def _receive_values(self, wire: Wire, number: int, result: Result) -> None:
        """Receive all values of the model."""
        self._learn(mapping(result["layout"]))
        try:
            for chunk in range(self._known_parts().num_chunks):
                frame = wire.receive((Kind.PARAMETER,), number)
                self.receive_parameters(wire, frame, chunk)
            for other in each(count, result["tensors"]):
                frame = wire.receive((Kind.TENSOR,), number)
                received = Received([self._whole(other)], self._memory)
                wire.read_into(frame, received.views)
                received.store()
                self._known_others[other] = frame.digest
        except BaseException:
            self.drop()
            raise

    def _learn(self, document: Mapping[str, Any]) -> None:
        layout, numbers = decode_layout(document)
        self.parts = ChunkParts(layout, numbers)
        self._known.clear()

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
        parts = link._known_parts()
        thread = threading.Thread(target=self._send, args=(gradients,), name="offload-near")
        start(thread)
        try:
            for chunk in self._chunks:
                if not parts.of(chunk, self._have):
                    updated(chunk)
                    continue
                frame = wire.receive((Kind.PARAMETER, Kind.ERROR), self._number)
                if frame.kind == Kind.ERROR:
                    link.raise_error(wire, frame)
                link.receive_parameters(wire, frame, chunk)
                updated(chunk)
        except NearError as error:
            wire.shut()  # the other thread may be sending
            thread.join()
            if self._errors and not isinstance(self._errors[0], NearError):
                raise self._errors[0] from error
            link.drop()
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
