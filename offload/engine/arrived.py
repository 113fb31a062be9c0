"""The end of an arrival: the state of all ranks is here, and becomes that of the next step."""

from __future__ import annotations

from offload.engine.rank_arrival import complete, note_damage
from offload.engine.resume import resume
from offload.engine.training_state import TrainingState
from offload.errors import DamagedError


def finish_arrival(state: TrainingState, call: str) -> None:
    """Wait until the state of all ranks has arrived, and go on from it. Collective.

    Nothing happens if none is arriving. Parameters, buffers and hyper-parameters stay as they are.
    """
    arriving, ranks = state.arriving, state.ranks
    if arriving is None:
        return
    with state.meter.timed("wait_seal_s"):
        arriving.wait()  # an interrupt leaves `arriving` set
    state.arriving = None
    state.lifecycle.broken = f"the state of {arriving.share.url} did not arrive"
    try:
        ranks.together(call, arriving.require)
        complete(state, arriving.share, call)
    except DamagedError as error:
        note_damage(state, arriving.share.url, error)
        raise
    finally:
        arriving.close()
    found = state.store.newest
    if found is None:
        raise RuntimeError("a checkpoint has been published, and the store has none")
    state.lifecycle.broken = f"restoring {found.path} failed half way"
    restored = state.meter.restore_s, state.meter.restore_bytes
    matched = state.arriving_trainables
    resume(state, state.arriving_groups, found, parameters=False, matched=matched)
    state.meter.restore_s, state.meter.restore_bytes = restored
