"""The ranks of one training: what each of them steps and stores, and how they work together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from offload.ambient import in_neutral
from offload.device.boundary import Marks
from offload.device.staging import Traffic
from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.peers import Json
from offload.distributed.agreement.torch_channel import TorchChannel
from offload.distributed.gathering.gather import BounceBuffer, Gathering, part_of, share_boxes
from offload.distributed.gathering.gather_plan import (
    SLICE_BYTES,
    GatherPlan,
    layout_chunks,
)
from offload.distributed.gathering.holder_groups import HolderGroups, share_bytes
from offload.distributed.gathering.step_agreement import (
    Replicas,
    StepAgreement,
    StepTerms,
    digest_of,
)
from offload.distributed.node import measure_in_turns
from offload.distributed.ownership import Ownership
from offload.distributed.rank_model import RankModel
from offload.distributed.rank_store import RankStore
from offload.distributed.ranks import Drive, Ranks
from offload.distributed.rendezvous import rendezvous
from offload.distributed.terms import require_same_terms, terms_of
from offload.errors import OffloadError, reason_of
from offload.format.arrays import BLOCK_ELEMENTS
from offload.format.boxes import Box, Cut
from offload.format.layout import Layout, ParameterSpec
from offload.format.manifest import Manifest
from offload.format.shares.dealing import OwnedBox
from offload.model.buffer_watch import BufferWatch
from offload.model.model_copy import ModelCopy
from offload.model.new_values import Step, Values
from offload.model.parameters import all_parameters
from offload.model.process_groups import ProcessGroup
from offload.model.stored import Stored
from offload.options import Options
from offload.retention.policy import Retention
from offload.store.opening import StoredCheckpoint
from offload.store.shared import Serving
from offload.store.state_store import StateSlot, StateStore

T = TypeVar("T")

_WHOLE: Final = 1 << 62
"""Multiple of elements at which no parameter can be cut."""


class RankGroup(Ranks):
    """Several ranks that train one model into one store. The constructor is collective."""

    @in_neutral
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        named: Sequence[tuple[str, torch.Tensor]],
        terms: Mapping[str, Json],
        watch: BufferWatch,
        *,
        multiple: int,
        timeout_s: float,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group, self._timeout_s = group, timeout_s
        self._watch = watch
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._agreement, self._name = rendezvous(ranks, self.rank, timeout_s)
        """Agreement of the ranks, and text before the keys of all notes of this optimizer."""
        self._traffic = Traffic()
        self._store: RankStore | None = None
        self._ownership = Ownership(self.rank, self.size, multiple, self._exchange, ranks)
        self.shards, self.cuts = self._ownership.shard, self._ownership.cuts
        try:
            require_same_terms(terms, self._exchange)
            self._ownership.know(named, replaces=True)
            self._sets = self._ownership.holder_sets
            self._groups, self._steps = self._connect()
        except BaseException as error:
            self.close(error)
            raise
        progress = self._agreement.progress
        self._replicas = Replicas(self.rank, self._ownership.find, self._traffic, progress)
        self._replicas.know(self._ownership.holders)
        self._model = RankModel(self.rank, self._ownership, self._traffic, progress, self._replicas)
        self._buffer = BounceBuffer(SLICE_BYTES)
        self.gathers = bool(self._sets)
        self._encoded: tuple[Layout, bytes, int] | None = None
        """Layout of the last step on this rank, with its encoding and the digest of that."""
        self._layouts: list[Layout] = []
        """Layouts of all ranks, by rank."""
        self._exchanged: tuple[int, ...] = ()
        """Digests of `_layouts`; the same on all ranks."""
        self._plan: tuple[object, GatherPlan] | None = None
        """Plan of the last step, with what it was made of."""

    @property
    def agreement(self) -> Agreement:
        """Agreement of the ranks, for checkpoints that are not of one store."""
        return self._agreement

    def know(self, named: Sequence[tuple[str, torch.Tensor]], *, replaces: bool) -> None:
        """Decide with all ranks who steps parameters that are new; see `Ownership.know`."""
        if not self._ownership.know(named, replaces=replaces):
            return
        self._plan = None
        self._model.forget()
        self._replicas.know(self._ownership.holders)
        sets = self._ownership.holder_sets
        if sets != self._sets:
            self._sets, self.gathers = sets, bool(sets)
            self._groups, self._steps = self._connect()

    def _connect(self) -> tuple[HolderGroups, StepAgreement]:
        """Connect the ranks that hold boxes together. Collective."""
        sets = {tuple(range(self.size)), *self._sets}
        groups = HolderGroups(sets, group=self._group, timeout_s=self._timeout_s)
        return groups, StepAgreement(groups.everyone, self._look)

    def _look(self) -> None:
        """Raise an error if a rank will never come to the step that this one is about to take."""
        self._agreement.require_all_here("step()")
        self._agreement.require_same_calls("step()")

    def _exchange(self, mine: Json) -> list[Any]:
        """Return what each rank says, by rank. Collective."""

        def make(asked: Mapping[int, Json]) -> Json:
            return [asked[rank] for rank in sorted(asked)]

        what = "the constructor" if self._store is None else "a change of parameters"
        agreed = self._agreement.agree(what, make, lambda _: None, ask=mine)
        return list(agreed.offer)

    def open_store(
        self, drives: Sequence[Drive], keep: Retention, options: Options, *, fresh: bool
    ) -> StateStore:
        """Open the store with all ranks."""
        directories = [directory for _, directory in drives]
        (backend, _), *_ = drives
        self._store = RankStore(
            self._agreement,
            backend,
            directories,
            self._model.share_of,
            keep,
            options,
            fresh=fresh,
            settle=self._ownership.settle,
            lay_out=self._model.lay_out,
            watch=self._watch,
        )
        return self._store

    def together(self, what: str, action: Callable[[], T]) -> T:
        """Do something on every rank, and return when it has succeeded on all of them."""
        return self._agreement.together(what, action)

    def everywhere(self, what: str, action: Callable[[], Any]) -> list[Any]:
        """Do something on every rank, and return what each of them says, by rank."""
        return self._agreement.everywhere(what, action)

    def progress(self) -> None:
        """Give a sign of progress."""
        self._agreement.progress()

    def measure(
        self, what: str, directory: str, state_bytes: int, action: Callable[[int], None]
    ) -> None:
        """Measure the drives of all ranks, each directory on one rank."""
        backend = self._opened().backend
        measure_in_turns(self._agreement, what, backend, directory, state_bytes, action)

    def begin_call(self, what: str, num_steps: int) -> None:
        """Record which call of the user begins, and how many steps have been taken."""
        self._agreement.begin_call(num_steps)
        if self._store is not None:
            self._store.call = what

    def fail_seal(
        self, slot: StateSlot | None, step: int, error: Exception
    ) -> Callable[[], None] | None:
        """Begin a seal with the other ranks although it has failed on this one."""
        sealing = self._opened().sealing
        sealing.begin_failed(slot, step)
        return partial(sealing.abandon, error)

    def refuse_step(self, number: int, error: Exception, *, needs_slot: bool) -> None:
        """Take part, with an error, in a step that begins on all ranks."""
        with suppress(OffloadError, RuntimeError):  # the caller raises the error of this rank
            if needs_slot:
                self._opened().refuse(error)
            if not self.gathers:
                return  # no rank waits for another one in a step
            self._steps.agree(StepTerms(number, [], [], refusal=reason_of(error)))

    def serving(self) -> Serving | None:
        """Return which rank serves which part of the open store."""
        store = self._opened()
        origin = _get_default_store()  # of this moment: the process group may end before the thread
        return Serving(
            self.rank,
            store.plan.writer,
            tuple(store.plan.homes),
            store.state_directories[0],
            partial(TorchChannel, origin, f"{self._name}tier/", timeout_s=self._timeout_s),
            all(store.plan.near),
        )

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that a step has failed here."""
        self._agreement.broadcast_error(error)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the ranks, and tell them so; see `Agreement.close`."""
        self._agreement.close(error)

    def model_copy(
        self, slot: StateSlot, stored: Sequence[Stored], marks: Marks
    ) -> ModelCopy | None:
        """Return the copy of this rank's share of the model into a slot."""
        return self._model.copy(self._opened(), slot, stored, marks)

    def has_same_model(self, checkpoint: StoredCheckpoint, stored: Sequence[Stored]) -> bool | None:
        """Return whether this rank's share of the model equals a checkpoint's, bit for bit."""
        return self._model.is_same(self._opened(), checkpoint, stored)

    def check_model(self, checkpoint: StoredCheckpoint) -> None:
        """Check that this rank can load its share of a checkpoint's model."""
        self._model.check(self._opened(), checkpoint)

    def as_checkpoint(
        self, path: str, manifest: Manifest, own: Manifest, slot: StateSlot
    ) -> AbstractContextManager[StoredCheckpoint]:
        """Use a slot that is about to become a checkpoint as one, in a ``with`` block."""
        return self._opened().as_checkpoint(path, manifest, own, slot)

    def load_model(self, checkpoint: StoredCheckpoint, stored: Sequence[Stored]) -> int | None:
        """Load this rank's share of a checkpoint's model."""
        return self._model.load(self._opened(), checkpoint, stored)

    def share_model(self, stored: Sequence[Stored]) -> None:
        """Bring what each rank has loaded to all ranks that hold it."""
        self._replicas.forget()
        self._model.share(stored, self._groups, self._buffer)

    def bring(self, stored: Sequence[Stored]) -> None:
        """Bring tensors from the rank that steps each box to all that hold it; buffers from rank 0.

        Collective. For ranks that have no common store.
        """
        dealt, everyone = self._ownership.boxes, tuple(range(self.size))
        names = {one.name for one in dealt}
        buffers = [
            OwnedBox(item.spec.name, Cut(item.spec.shape, Box.whole(item.spec.shape)), 0, everyone)
            for item in stored
            if item.spec.name not in names
        ]
        tensors = [(item.spec.name, item.spec.dtype, item.parameter) for item in stored]
        share_boxes([*dealt, *buffers], tensors, self._groups, self._buffer)

    def share_state(self, tensors: Sequence[tuple[str, str, torch.Tensor]]) -> None:
        """Bring the boxes of tensors from the rank that steps each box to all that hold it."""
        if self.gathers:
            share_boxes(self._ownership.boxes, tensors, self._groups, self._buffer)

    def require_same_calls(self) -> None:
        """Check that no rank is in a call that this one, which is about to step, has not made."""
        self._agreement.require_same_calls("step()")

    def begin_step(self, terms: Step) -> Values:
        """Agree with all ranks on a step, and return what brings its new values to all of them."""
        if self._encoded is None or self._encoded[0] is not terms.layout:
            encoded = _encode_layout(terms.layout)
            self._encoded = terms.layout, encoded, digest_of(encoded)
        _, encoded, digest = self._encoded
        orders = self._steps.agree(
            StepTerms(
                terms.number,
                list(terms.stepped),
                list(terms.chunks),
                layout=digest,
                changed=self._replicas.changed(),
                digests=self._replicas.digests,
            )
        )
        # Another layout on one rank is one for all: each knows from the digests that it must send.
        if self._steps.layouts != self._exchanged:
            found = share_bytes(encoded, self._groups.everyone)
            self._layouts = [_decode_layout(data) for data in found]
            self._exchanged = self._steps.layouts
        made_of = (tuple(terms.stepped), tuple(orders), self._exchanged)
        if self._plan is None or self._plan[0] != made_of:
            stepped = set(terms.stepped)
            chunks = [
                layout_chunks(layout, order=order, stepped=stepped)
                for layout, order in zip(self._layouts, orders, strict=True)
            ]
            late = {
                key
                for key in self._ownership.holders
                if key[0] in stepped
                and self.rank in self._ownership.holders[key]
                and not part_of(terms.memory(key[0]), key[1]).is_contiguous()
            }
            self._plan = made_of, GatherPlan(chunks, self._ownership.holders, late=late)
        return Gathering(
            self._plan[1],
            self._groups,
            lambda name, box: part_of(terms.memory(name), box),
            self._buffer,
            before_write=lambda piece: terms.before_write(piece.name),
            ended=self._replicas.note,
        )

    def _opened(self) -> RankStore:
        if self._store is None:
            raise RuntimeError("the store has not been opened")
        return self._store


def _encode_layout(layout: Layout) -> bytes:
    """Return what other ranks need to know of the layout of this rank's state."""
    mine = [
        [p.name, p.dtype, p.shape, p.cut and [p.cut.shape, p.cut.box.offsets]]
        for p in layout.parameters
    ]
    fields = [layout.chunk_elements, layout.state_dtype, mine]
    return json.dumps(fields).encode()


def _decode_layout(data: bytes) -> Layout:
    chunk_elements, state_dtype, parameters = json.loads(data)
    specs = []
    for name, dtype, shape, cut in parameters:
        box = cut and Cut(tuple(cut[0]), Box(tuple(cut[1]), tuple(shape)))
        specs.append(ParameterSpec(name, dtype, tuple(shape), 0, ("exp_avg",), box or None))
    return Layout(tuple(specs), (), chunk_elements, state_dtype)


def join_ranks(
    process_group: ProcessGroup,
    param_groups: Sequence[Mapping[str, Any]],
    model: torch.nn.Module | None,
    options: Options,
    *,
    optimizer: str,
    keep: Retention,
    whole: bool = False,
    more: Mapping[str, Json] = MappingProxyType({}),
) -> RankGroup:
    """Return the ranks that train a model. Collective.

    Parameters that all ranks hold are dealt as wholes if `whole` is set. There may be more terms
    that all ranks must share than the arguments.

    Raises the errors of `RankGroup`, and ValueError for an option that ranks do not have.
    """
    if options.drives.shares is not None:
        raise ValueError(
            "DriveTuning(shares=...) is not supported with several ranks: each of them keeps its "
            "share of the state in one of the directories. Leave it out"
        )
    if options.parameters == "drive":
        raise ValueError(
            'parameters="drive" is not supported with several ranks so far: leave it out, so that '
            "only checkpoints write parameters"
        )
    group = process_group if isinstance(process_group, dist.ProcessGroup) else None
    named = all_parameters(param_groups, model)
    has_fused = any(one.get("fused") for one in param_groups)
    multiple = BLOCK_ELEMENTS if options.state_dtype == "int8" or has_fused else 1
    multiple = _WHOLE if whole else multiple
    if options.overlap is not None:
        require_beside_forward(named)
    return RankGroup(
        group,
        named,
        {**terms_of(optimizer, param_groups, model, keep, options), **more},
        BufferWatch(model),
        multiple=multiple,
        timeout_s=options.agreement_timeout_s,
    )


def require_beside_forward(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse steps beside the forward where it was not shown that they have the same bits."""
    for name, tensor in named:
        if tensor.device.type not in ("cpu", "meta"):  # the latter is refused with its own remedy
            raise ValueError(
                'overlap="forward" is not supported with several ranks on a device, with NCCL for '
                f"example: {name!r} is on {tensor.device}, and this was tried in host memory with "
                "gloo only. Leave it out"
            )
