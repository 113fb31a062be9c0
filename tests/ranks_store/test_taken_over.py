"""A history that begins in a store whose checkpoint never arrived has later generations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gds import MemoryBackend
from offload.retention.policy import LastK
from offload.store.shared import SharedStore
from offload.store.store import Store
from tests.ranks_store.job import LAYOUTS, ONE, TWO

COPY = "f" * 32


def opened(backend: MemoryBackend, *, shared: bool, fresh: bool = False) -> Store:
    """Open a store of two owners, or of one process on two drives."""
    return Store(
        backend,
        ONE,
        [] if shared else [(backend, TWO)],
        keep=LastK(2),
        train_state_bytes=8192,
        allow_volatile=True,
        fresh=fresh,
        shared=SharedStore({1: TWO}, {}) if shared else None,
    )


def next_generation(store: Store, *, shared: bool) -> int:
    """Return the generation of the next slot, which is given back."""
    layout = LAYOUTS[0] if shared else replace(LAYOUTS[0], shares=(1, 1))
    slot = store.acquire(layout, 1)
    generation: int = slot.context.generation
    store.release(slot)
    return generation


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_another_history_begins_after_the_one_that_was_taken_over(
    *, shared: bool, fresh: bool
) -> None:
    backend = MemoryBackend()
    store = opened(backend, shared=shared)
    store.take_over(COPY, 500)
    assert next_generation(store, shared=shared) == 500
    store.close()
    store = opened(backend, shared=shared, fresh=fresh)
    assert store.store_id == COPY
    assert next_generation(store, shared=shared) == 501
    store.close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_later_attempt_has_the_generation_of_what_arrives(*, shared: bool) -> None:
    backend = MemoryBackend()
    for generation in (500, 500, 503, 502):
        store = opened(backend, shared=shared)
        store.take_over(COPY, generation)
        assert next_generation(store, shared=shared) == generation
        store.close()
    store = opened(backend, shared=shared)
    assert next_generation(store, shared=shared) == 504
    store.close()


def test_the_manifest_of_what_arrives_has_room_for_a_reference_to_each_of_its_owners() -> None:
    """One process takes what 200 ranks have made; the next slot is one of its own again."""
    store = opened(MemoryBackend(), shared=False)
    layout = replace(LAYOUTS[0], shares=(1,))
    store.take_over(COPY, 500, [ONE] * 200)
    arriving = store.acquire(layout, 1)
    own = store.acquire(layout, 1)
    assert arriving.manifest.size_bytes >= own.manifest.size_bytes + 200 * 200
    store.close()
