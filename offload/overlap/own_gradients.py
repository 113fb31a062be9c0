"""Gradients of a step that goes on after `step()` has returned: nobody else may write into them.

A gradient that autograd made belongs to its parameter alone, and is taken as it is. One that the
program can still reach (it kept the tensor, a view of it or its storage, or made it of memory of
its own, such as a flat buffer for all gradients) may be written at any moment, mostly to clear it
for the next batch. Such a gradient is copied within `step()`, while it still has its values.
"""

from __future__ import annotations

from sys import getrefcount
from typing import Any, TypeAlias
from weakref import getweakrefcount

import torch

# torch declares neither.
_num_owners: Any = torch.Tensor._use_count  # type: ignore[attr-defined]
_num_storage_owners: Any = torch._C._storage_Use_Count


_Owners: TypeAlias = tuple[int, int, int, int, bool, int]
"""Who can reach a gradient; counts include those who do so in order to count.

References of Python to the tensor; weak ones; of C++ to the tensor (its parameter, Python, DLPack,
a graph); of Python to the memory; whether the memory is NumPy's, somebody else's, or shared with
other processes; of C++ to the memory (each tensor that is a view of it, NumPy, Python).
"""


def copy_what_others_hold(gradients: list[torch.Tensor | None]) -> int:
    """Replace gradients that somebody else could write by copies.

    For a gradient that nobody else has this takes 2 to 4 microseconds, whatever its size. It may
    copy more than it must (one that a local variable still names), and never less. It does not
    know of who has only an address, such as ``gradient.data_ptr()``.

    Args:
        gradients: Of all parameters; only this list and the parameters may refer to them.

    Returns:
        The bytes of the copies.
    """
    probe = torch.empty(1, dtype=torch.float32, device="cpu")
    probe.grad = torch.empty(1, dtype=torch.float32, device="cpu")
    # Each time, and in the same way: how torch, Python and debuggers count is their own affair.
    (alone,) = _owners_of([probe.grad])
    owners = _owners_of(gradients)
    held: list[int] = []
    parts: dict[int, list[int]] = {}  # gradients by the memory that they are parts of
    for number, found in enumerate(owners):
        gradient = gradients[number]
        if found is None or found == alone or gradient is None:
            continue
        if alone is not None and found[:-1] == alone[:-1]:
            parts.setdefault(gradient.untyped_storage()._cdata, []).append(number)
        else:
            held.append(number)
    for numbers in parts.values():
        found = owners[numbers[0]]
        if found is None or alone is None or found[-1] - alone[-1] != len(numbers) - 1:
            held += numbers  # they are not all that there is
    copied = {number: _copy(gradients[number]) for number in held}
    num_bytes = 0
    for number, gradient in copied.items():
        gradients[number] = gradient
        num_bytes += gradient.nbytes
    return num_bytes


def _owners_of(gradients: list[torch.Tensor | None]) -> list[_Owners | None]:
    """Count the owners of each gradient, for which the caller has nothing but the list."""
    found: list[_Owners | None] = []
    for gradient in gradients:
        if gradient is None:
            found.append(None)
            continue
        storage = gradient.untyped_storage()
        shared = gradient.is_cpu and storage.is_shared()  # on a GPU it always is
        found.append(
            (
                getrefcount(gradient),
                getweakrefcount(gradient),
                _num_owners(gradient),
                getrefcount(storage),
                shared or not storage.resizable(),
                _num_storage_owners(storage._cdata),
            )
        )
    return found


def _copy(gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        raise RuntimeError("there is no gradient to copy")
    return gradient.detach().clone()
