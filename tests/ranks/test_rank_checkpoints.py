"""What a rank knows of checkpoints, while the thread of a seal adds to it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from offload.distributed import rank_checkpoints
from offload.distributed.rank_checkpoints import RankCheckpoints

NUM_SEALS = 400


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Let Python change threads after nearly every instruction."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> RankCheckpoints:
    """Return what a rank knows that is not the writer, and that sees no directory of the writer."""
    monkeypatch.setattr(rank_checkpoints, "sealed_manifest", lambda composed, *_: composed)
    opened: Any = SimpleNamespace(store=None, part=None, owner=1, owners=[0, 1], is_near=False)
    return RankCheckpoints(opened)


def test_a_seal_adds_a_checkpoint_while_a_step_goes_through_them(
    known: RankCheckpoints, many_switches: None
) -> None:
    """A step that fails by chance ends the training of all ranks; one that forgets is worse."""
    errors: list[BaseException] = []
    has_ended = threading.Event()
    slots: list[Any] = [SimpleNamespace() for _ in range(NUM_SEALS)]

    def seal() -> None:
        """Publish checkpoints, one after the other."""
        try:
            for number, slot in enumerate(slots):
                manifest: Any = SimpleNamespace(generation=number, owners=(), has_state=True)
                known.published(f"/run/step-{number:08d}", slot, manifest, manifest)
        except BaseException as error:  # noqa: BLE001  (the test raises it)
            errors.append(error)
        has_ended.set()

    thread = threading.Thread(target=seal)
    thread.start()
    while not has_ended.is_set():
        known.forget_recycled([])
        known.checkpoint_of(slots[0])
        assert known.newest is None or known.is_usable(known.newest)
    thread.join()
    assert errors == []
    generations = [one.manifest.generation for one in known.checkpoints]
    assert generations == [*range(NUM_SEALS)]
    assert known.checkpoint_of(slots[-1]) is known.newest
