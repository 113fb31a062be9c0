"""Steps of what several ranks, or what of several ranks, arrives from a tier."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone

_SHARE = "offload/tiers/ranks/arriving_share.py"
_STATE = "offload/tiers/ranks/arriving_state.py"
_ENGINE = "offload/engine/engine.py"
_ARRIVED = "offload/engine/arrived.py"
_KNOWN = "offload/distributed/rank_checkpoints.py"
_SUPPLY = "offload/store/slots/supply.py"

_RESTORE = "tests/tiers/test_ranks_restore.py"
_TAKEN = "tests/ranks_store/test_taken_over.py"
_ROOM = "test_the_manifest_of_what_arrives_has_room_for_a_reference_to_each_of_its_owners"
_RECUT = "tests/tiers/test_ranks_recut.py"
_FIRST = "tests/tiers/test_ranks_first_forward.py"
_CALLS = f"{_FIRST}::test_every_call_that_needs_the_state_waits_for_it"

ARRIVING = (
    Mutation(
        "arriving-owner-dropped",
        "shares of owners that no rank serves are dealt over the ranks",
        (Edit(_SHARE, "        if owner not in served:\n", "        if False:\n"),),
        (f"{_RECUT}::test_shares_are_dealt_over_the_ranks",),
    ),
    Mutation(
        "arriving-on-hosts",
        "ranks on several hosts do not take what another number of ranks has made",
        (Edit(_SHARE, "if self.is_recut and not sees_all:", "if False:"),),
        (f"{_RESTORE}::test_other_ranks_on_several_hosts_are_told_what_to_do",),
    ),
    Mutation(
        "arriving-parts-not-locked",
        "parts that arrive are locked before a slot is taken, which removes unnamed parts",
        (
            Edit(
                _SHARE,
                "            part.store = self._owner_store(part, served)\n        if",
                "            pass\n        if",
            ),
            Edit(
                _SHARE,
                "        for part in self._parts:\n            if part.store is not None:\n"
                "                named",
                "        for part in self._parts:\n"
                "            part.store = self._owner_store(part, served)\n"
                "            if part.store is not None:\n                named",
            ),
        ),
        (f"{_RECUT}::test_a_rank_is_killed_while_it_downloads[one-2-1-0-27]",),
    ),
    Mutation(
        "arriving-no-room-for-references",
        "the manifest of what arrives has room for a reference to each of its owners",
        (Edit(_SUPPLY, "if self._is_arriving and len(", "if False and len("),),
        (f"{_TAKEN}::{_ROOM}",),
    ),
    Mutation(
        "arriving-kept-as-open",
        "a part that is about to be published is opened anew when it is",
        (
            gone(
                _KNOWN,
                "                if isinstance(slot, OwnerSlot):\n"
                "                    self._slots.pop(manifest.generation, None)\n",
            ),
        ),
        (f"{_CALLS}[checkpoint]",),
    ),
    Mutation(
        "arriving-step-early",
        "a step waits until the state of all ranks has arrived",
        (
            Edit(
                _ENGINE,
                "        self.finish_arrival()\n        self.strategy.step(groups)\n",
                "        self.strategy.step(groups)\n",
            ),
        ),
        (f"{_CALLS}[overlap lr]",),
    ),
    Mutation(
        "arriving-error-of-one",
        "an error of one rank while state arrives is raised on all of them",
        (Edit(_ARRIVED, "ranks.together(call, arriving.require)", "arriving.require()"),),
        (f"{_FIRST}::test_an_error_while_the_state_arrives_is_raised_on_all_ranks[flip]",),
    ),
    Mutation(
        "arriving-reference-to-nothing",
        "a reference names the state that arrives",
        (
            Edit(
                _ENGINE,
                "        if state.arriving is not None:\n            gen",
                "        if False:\n            gen",
            ),
        ),
        (f"{_CALLS}[state_dict load_state_dict]",),
    ),
    Mutation(
        "arriving-goes-on-after-close",
        "a download ends when the optimizer is closed",
        (gone(_STATE, "        self._is_stopped.set()\n"),),
        (f"{_FIRST}::test_ranks_that_close_before_the_state_is_there_leave_what_has_arrived",),
    ),
)
