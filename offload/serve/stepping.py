"""A step whose gradients arrive while it runs, and whose new parameters leave while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from offload.engine.stepping import StepStrategy, advance, advanced, begin_pass, run_pass
from offload.engine.training_state import Groups, TrainingState
from offload.errors import NearError
from offload.format.layout import Layout
from offload.near.chunks import ChunkParts, views
from offload.near.terms import encode_layout
from offload.near.wire import Kind, Wire
from offload.serve.model import ServedModel


class ArrivingStep(StepStrategy):
    """Takes the steps of a server: the client sends each chunk's gradients in the pass's order.

    A chunk is updated when its gradients are here, and its parameters are sent when it has been
    updated, so only the chunk in hand is in memory.
    """

    wire: Wire
    """Connection to the client, set before each step."""

    number: int
    """Number of the call that takes the present step."""

    def __init__(self, state: TrainingState, model: ServedModel) -> None:
        super().__init__(state)
        self._model = model
        self.announced = False
        """Whether the client was told to send gradients in the present step."""
        self.parts: ChunkParts | None = None
        """Parts of the chunks of the present layout; None until they are needed."""
        self.told: Layout | None = None
        """Layout that the client knows."""
        self.lost: NearError | None = None
        """Why the client is lost, if it was lost after its last gradient had arrived."""

    def step(self, groups: Groups) -> None:
        """Update every parameter that has a gradient, as each chunk's gradients arrive."""
        state = self._state
        self.lost = None
        state.require_step()
        with state.meter.timed("step_s"):
            gradients, _ = state.begin_step(groups)
            changes, has_gradient = advanced(state, groups)
            if has_gradient:
                state_pass = begin_pass(state, groups, gradients)
                exchange = _Exchange(self, state, self._model, state_pass.chunks)
                try:
                    self._announce(state_pass.chunks)
                except BaseException:
                    state.slots.torn(state_pass.target)  # the slot is kept for the next pass
                    raise
                state_pass.schedule = exchange.arriving()
                run_pass(state, state_pass, exchange)
                state.meter.steps += 1
            advance(groups, changes)
            state.num_steps += 1

    def known_parts(self) -> ChunkParts:
        """Return the parts of the chunks of the present layout."""
        table = self._state.table
        if self.parts is None or self.parts.layout is not self._state.layout:
            numbers = [self._model.number_of(t.parameter) for t in table.trainables]
            self.parts = ChunkParts(self._state.layout, numbers)
        return self.parts

    def layout_document(self) -> dict[str, object]:
        """Return the present layout for the client."""
        parts = self.known_parts()
        self.told = parts.layout
        names = {p.name: n for p, n in zip(parts.layout.parameters, parts.numbers, strict=True)}
        return encode_layout(parts.layout, names)

    def layout_if_new(self) -> dict[str, object]:
        """Return a document with the present layout, or with nothing if the client knows it."""
        is_known = self.told is self._state.layout
        return {} if is_known else {"layout": self.layout_document()}

    def _announce(self, chunks: Sequence[int]) -> None:
        """Tell the client in which order the gradients are wanted, and of a layout that is new."""
        document = {"chunks": list(chunks), **self.layout_if_new()}
        self.announced = True
        self.wire.send_document(Kind.PASS, self.number, document)


class _Exchange:
    """Gradients that arrive and parameters that leave in one step; it is a `Values`."""

    num_arrived = 0
    stops: Mapping[str, int] = {}

    def __init__(
        self,
        strategy: ArrivingStep,
        state: TrainingState,
        model: ServedModel,
        chunks: Sequence[int],
    ) -> None:
        self._strategy = strategy
        self._wire, self._number = strategy.wire, strategy.number
        self._state = state
        self._model = model
        self._chunks = chunks
        self._parts = strategy.known_parts()

    def arriving(self) -> Iterator[int]:
        """Yield each chunk when its gradients have arrived.

        Raises:
            NearError: The client is lost, or has given up the step.
        """
        model, wire = self._model, self._wire
        wanted = (Kind.PARAMETER, Kind.GRADIENT, Kind.END)
        for chunk in self._chunks:
            frame = wire.receive(wanted, self._number)
            if frame.kind == Kind.PARAMETER:
                if self._state.seal is not None:
                    self._state.seal.wait_all_copied()
                self._require(chunk, frame.index)
                wire.read_into(frame, views(self._parts.of(chunk), model.live.bytes))
                frame = wire.receive(wanted, self._number)
            if frame.kind != Kind.GRADIENT:
                raise NearError(f"{wire.peer} has given up the step")
            self._require(chunk, frame.index)
            parts = self._parts.of(chunk, model.has_gradient)
            wire.read_into(frame, views(parts, model.gradients.bytes))
            yield chunk

    def updated(self, chunk: int) -> None:
        """Send the new parameters of a chunk, and give its memory back.

        If the client is lost after its last gradient, the step goes on to its end: the client can
        come back, and ask for what it has not received.
        """
        model = self._model
        changed = self._parts.of(chunk, model.has_gradient)
        if changed and self._strategy.lost is None:
            parts = self._parts.of(chunk)
            try:
                content = views(parts, model.live.bytes)
                self._wire.send(Kind.PARAMETER, self._number, content, index=chunk)
            except NearError as error:
                self._strategy.lost = error
        model.live.give_back(self._parts.of(chunk))
        model.gradients.give_back(changed)

    def advance(self) -> bool:
        """Do nothing."""
        return False

    def finish(self) -> None:
        """Do nothing."""

    def fail(self, error: BaseException) -> BaseException:
        """Return the error."""
        return error

    def _require(self, chunk: int, found: int) -> None:
        if found != chunk:
            raise NearError(f"{self._wire.peer} sent chunk {found}, expected {chunk}")
