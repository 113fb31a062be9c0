"""Protection of gradients against writes by the program while a step goes on after `step()`.

A gradient that autograd made belongs to its parameter alone, and is used without a copy. But the
program may still reach a gradient: it kept the tensor, a view of it or its storage, or made it from
memory of its own, such as a flat buffer for all gradients. The program may write to such a gradient
at any moment, mostly to clear it for the next batch. So `step()` copies such a gradient while it
still has its values.
"""

from __future__ import annotations

from sys import getrefcount
from typing import Any, TypeAlias
from weakref import getweakrefcount

import torch

# torch's type stubs declare neither function.
_num_owners: Any = torch.Tensor._use_count  # type: ignore[attr-defined]
_num_storage_owners: Any = torch._C._storage_Use_Count


_Owners: TypeAlias = tuple[int, int, int, int, bool, int]
"""Counts of references to a gradient, including those that exist only for counting.

In order: Python's references to the tensor; weak references to it; C++'s references to it (by its
parameter, Python, DLPack, a graph); Python's references to the storage; whether the memory belongs
to NumPy or another library, or is shared with other processes; C++'s references to the storage (by
each tensor that is a view of it, NumPy, Python).
"""


def copy_shared_gradients(gradients: list[torch.Tensor | None]) -> int:
    """Replace gradients in the list by copies, if the program could still write to them.

    A gradient that is not copied takes 2 to 4 microseconds, whatever its size. The function may
    copy more than necessary (a gradient that a local variable still names), but never less. It
    cannot detect code that has only an address, such as ``gradient.data_ptr()``.
    """
    probe = torch.empty(1, dtype=torch.float32, device="cpu")
    probe.grad = torch.empty(1, dtype=torch.float32, device="cpu")
    # Count an unshared gradient at each call, in the same way, for comparison: the counts depend on
    # the versions of torch and Python, and on debuggers.
    (alone,) = _owners_of([probe.grad])
    owners = _owners_of(gradients)
    held: list[int] = []
    parts: dict[int, list[int]] = {}  # numbers of gradients that share a storage, by storage
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
            held += numbers  # something else refers to the storage
    copied = {number: _copy(gradients[number]) for number in held}
    num_bytes = 0
    for number, gradient in copied.items():
        gradients[number] = gradient
        num_bytes += gradient.nbytes
    return num_bytes


def _owners_of(gradients: list[torch.Tensor | None]) -> list[_Owners | None]:
    """Count the references to each gradient. The caller must refer to it only by the list."""
    found: list[_Owners | None] = []
    for gradient in gradients:
        if gradient is None:
            found.append(None)
            continue
        storage = gradient.untyped_storage()
        shared = gradient.is_cpu and storage.is_shared()  # is_shared() is always true on a GPU
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
