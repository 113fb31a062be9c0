"""Hooks on blocks: they load a unit before its block runs, and replace what its backward saves.

Tensors that autograd saves are replaced by a `_Saved` if they are views of a unit's buffer.
Backward loads the unit when a node unpacks one, whatever the order of the nodes. Saved tensors that
a hook returns are not checked by autograd for edits, so this is done here. None of this is needed
within activation checkpointing, where the block runs again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from offload.blocks.streaming import StreamedBlocks
from offload.blocks.units import Member, Unit
from offload.errors import OffloadError

_autograd: Any = torch._C._autograd

_EDITED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation"
)


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    """Stands in a graph for a view of a parameter."""

    unit: Unit
    member: Member
    version: int
    dtype: torch.dtype
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class _Calls(threading.local):
    """The calls of blocks that a thread is in."""

    def __init__(self) -> None:
        self.stack: list[tuple[object, bool]] = []
        """For each call its `_Block`, and whether saved tensors are replaced since then."""


_calls = _Calls()


def put_hooks(blocks: StreamedBlocks) -> list[RemovableHandle]:
    """Put hooks on all blocks; return the handles that remove them.

    Parts of a block have none: they would divide the graphs of a compiled block. If activation
    checkpointing runs ``forward`` of a block again without its hooks, as transformers 5 does, the
    watch of the parameters loads them.
    """
    handles = []
    for unit in blocks.units:
        block = _Block(blocks, unit)
        before, behind = _Hook(block.before), _Hook(block.behind)
        handles += [
            unit.module.register_forward_pre_hook(before, prepend=True),
            unit.module.register_forward_hook(behind, always_call=True),
        ]
    return handles


class _Hook:
    """A hook. A copy of the model, in memory or in a file, has one that does nothing."""

    def __init__(self, function: Callable[[torch.nn.Module], None]) -> None:
        self._function = function

    @_disable_dynamo
    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        """Call the function."""
        self._function(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inert, ()


class _Inert:
    """Replacement of a hook in a copy of the model."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


class _Block:
    """What happens around the calls of one block."""

    def __init__(self, blocks: StreamedBlocks, unit: Unit) -> None:
        self._blocks = blocks
        self._unit = unit

    def before(self, module: torch.nn.Module) -> None:
        """Load the unit."""
        unit = self._unit
        if module is not unit.module or self._blocks.is_ended:
            return
        if unit.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise OffloadError(
                f"{unit.name} is streamed, so it cannot be captured in a CUDA graph: capture the "
                "rest of the model only, or leave out parameters="
            )
        is_first = not unit.num_calls
        self._blocks.enter(unit)
        is_replacing = is_first and torch.is_grad_enabled() and self._replace_saved()
        _calls.stack.append((self, is_replacing))

    def behind(self, module: torch.nn.Module) -> None:
        """Allow the unit to be dropped, whether the call has succeeded or not."""
        stack = _calls.stack
        # After an error in another hook, `before` may not have been called.
        if module is not self._unit.module or not stack or stack[-1][0] is not self:
            return
        _, is_replacing = stack.pop()
        if is_replacing:
            _autograd._pop_saved_tensors_default_hooks()
        self._blocks.leave(self._unit)

    def _replace_saved(self) -> bool:
        """Replace what autograd saves in this call, unless the call is made again in backward."""
        if not _autograd._saved_tensors_hooks_is_enabled():  # within torch.func
            self._blocks.note_saved(self._unit)
            return False
        outer = _autograd._top_saved_tensors_default_hooks(False)
        if outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint":
            return False
        _autograd._push_saved_tensors_default_hooks(
            lambda tensor: self._pack(tensor, outer), lambda packed: self._unpack(packed, outer)
        )
        return True

    def _pack(self, tensor: torch.Tensor, outer: Any) -> object:
        unit = self._blocks.saved_in(_storage(tensor))
        if unit is None:
            # Not the tensor itself: the node would refer to its own result, which nothing frees.
            return outer[0](tensor) if outer else (tensor.detach(), tensor._version)
        offset, strides = int(tensor.storage_offset()), tensor.stride()
        member = unit.member_at(offset * tensor.itemsize)
        version = member.present_version
        return _Saved(unit, member, version, tensor.dtype, tuple(tensor.shape), strides, offset)

    def _unpack(self, packed: Any, outer: Any) -> torch.Tensor:
        if isinstance(packed, _Saved):
            version = packed.member.present_version
            if version != packed.version:
                raise RuntimeError(
                    f"{_EDITED}: {packed.member.name}, by the program or by a step, is at version "
                    f"{version}; expected version {packed.version} instead"
                )
            buffer = self._blocks.saved_buffer(packed.unit).view(packed.dtype)
            return buffer.as_strided(packed.size, packed.strides, packed.offset)
        if outer:
            found: torch.Tensor = outer[1](packed)
            return found
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                f"{_EDITED}: [{tensor.dtype} {list(tensor.shape)}] is at version "
                f"{tensor._version}; expected version {version} instead"
            )
        kept: torch.Tensor = tensor
        return kept


def _storage(tensor: torch.Tensor) -> int:
    """Return what identifies a tensor's memory; 0 if it has none."""
    if tensor.layout != torch.strided:
        return 0
    try:
        found: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # some subclasses only stand for other tensors
        return 0
    return found
