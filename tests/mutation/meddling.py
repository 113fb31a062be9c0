"""Steps by which a process notices what others do to a store while it trains in it."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone

_SEALING = "offload/store/sealing.py"
_STORE = "offload/store/store.py"
_CENSUS = "offload/store/census.py"
_WITHDRAWAL = "offload/store/withdrawal.py"
_EXPIRY = "offload/store/expiry.py"
_FREE = "offload/store/slots/free.py"
_IN_PLACE = "offload/store/file_identity.py"
_ENGINE = "offload/engine/engine.py"
_RESUME = "offload/engine/resume.py"
_STATE = "offload/engine/training_state.py"
_TESTS = "tests/crash/test_meddled_beside.py"
_SEALED = f"{_TESTS}::test_a_slot_that_is_replaced_while_it_is_sealed_is_no_checkpoint"
_STEPPED = f"{_TESTS}::test_a_slot_that_was_replaced_while_it_is_stepped_is_no_checkpoint"
_LAST = f"{_TESTS}::test_the_last_one_that_is_usable_is_not_withdrawn"
_ANEW = f"{_TESTS}::test_a_step_is_sealed_anew_if_its_checkpoint_is_not_what_it_was"
_DAMAGED = f"{_TESTS}::test_state_that_was_marked_and_is_damaged_is_not_sealed_anew"
_FREED = f"{_TESTS}::test_a_free_slot_that_was_removed_or_replaced_is_made_anew"
_REMOVED = f"{_TESTS}::test_state_is_read_from_the_parts_of_a_checkpoint_that_was_removed"
_BEHIND = f"{_TESTS}::test_a_process_goes_back_behind_what_was_lost_beside_it"
_PINNED = f"{_TESTS}::test_what_was_replaced_by_the_same_can_be_pinned"
_ACKNOWLEDGED = f"{_TESTS}::test_what_is_acknowledged_after_files_were_replaced_is_there"

MEDDLING = (
    Mutation(
        "seal-begun-in-other-files",
        "before a seal syncs anything its slot is the one at its path: else no slot is used again",
        (
            Edit(
                _SEALING,
                "            slot.require_in_place()  # raises before",
                "            pass  # said before",
            ),
        ),
        (f"{_TESTS}::test_a_slot_that_is_removed_on_the_local_file_system_is_made_anew",),
    ),
    Mutation(
        "seal-of-other-files",
        "what is renamed to be a checkpoint is what was written",
        (
            Edit(
                _SEALING,
                "                slot.require_in_place()\n                leaving = self._owners",
                "                leaving = self._owners",
            ),
        ),
        (f"{_SEALED}[replace_state]",),
    ),
    Mutation(
        "slot-of-other-files-stays",
        "after a seal whose slot was replaced the state moves to another slot",
        (
            Edit(
                _STATE,
                "slots.is_working = self.store.is_in_place(seal.slot)",
                "slots.is_working = True",
            ),
        ),
        (f"{_STEPPED}[1-replace_state]",),
    ),
    Mutation(
        "free-slot-of-other-files-removed",
        "what is at the path of a slot is not removed with it if it is not the slot",
        (Edit(_FREE, "        if not at_path:\n", "        if False:\n"),),
        (f"{_TESTS}::test_a_slot_that_has_taken_the_name_of_a_removed_one_stays",),
    ),
    Mutation(
        "withdraw-other-files",
        "a checkpoint whose files are replaced while it is withdrawn is not written to",
        (
            Edit(
                _WITHDRAWAL,
                "slot.is_linked() or not slot.is_in_place()",
                "slot.is_linked()",
            ),
        ),
        (f"{_TESTS}::test_what_is_replaced_at_the_moment_of_its_withdrawal_is_not_written_to",),
    ),
    Mutation(
        "expiry-counts-what-is-gone",
        "before a checkpoint is withdrawn all others are looked at",
        (Edit(_WITHDRAWAL, "        self._census.update()  # so that", "        # so that"),),
        (f"{_TESTS}::test_what_is_marked_after_checkpoint_has_looked_does_not_count_either",),
    ),
    Mutation(
        "expiry-counts-what-is-marked",
        "a mark that was made beside training counts",
        (
            Edit(
                _CENSUS,
                "        if is_quarantined(self._backend, checkpoint.path):\n",
                "        if False:\n",
            ),
        ),
        (f"{_LAST}[2-mark-1]",),
    ),
    Mutation(
        "expiry-counts-another-checkpoint",
        "another checkpoint in the place of one does not count as that",
        (
            Edit(
                _CENSUS,
                "if replace(found, metrics={}).digest != replace(known, metrics={}).digest:",
                "if False:",
            ),
        ),
        (f"{_TESTS}::test_another_checkpoint_in_its_place_is_left_alone[1]",),
    ),
    Mutation(
        "pin-of-what-is-gone",
        "what was marked or removed beside training is not pinned",
        (
            gone(_EXPIRY, "            self._census.update()\n"),
            Edit(
                _ENGINE,
                "        self.store.refresh()\n        if state.ranks.size > 1:\n",
                "        if state.ranks.size > 1:\n",
            ),
        ),
        (f"{_TESTS}::test_what_was_marked_or_removed_cannot_be_pinned",),
    ),
    Mutation(
        "reseal-of-what-is-gone",
        "a step counts as sealed only if its checkpoint still is what was sealed",
        (
            Edit(
                _STORE,
                "return checkpoint.slot is not None and checkpoint in self.checkpoints",
                "return True",
            ),
        ),
        (f"{_ANEW}[the-same-remove_tree-1]",),
    ),
    Mutation(
        "moved-store-has-no-checkpoints",
        "nothing counts as removed as long as the store itself is not at its path",
        (
            Edit(
                _CENSUS,
                "            if not self._lock.is_held():\n                return  # the whole",
                "            if False:\n                return  # the whole",
            ),
        ),
        ("tests/crash/test_writer_lock.py::test_a_directory_that_comes_back_is_gone_on_with",),
    ),
    Mutation(
        "restore-of-what-is-gone",
        "restore() looks at the checkpoints before it chooses one",
        (gone(_RESUME, "    store.refresh(warn_of_refused=False)\n"),),
        (f"{_TESTS}::test_a_process_goes_back_behind_what_was_lost_beside_it",),
    ),
    Mutation(
        "marked-state-trained-on",
        "state of a checkpoint that others marked is compared with its digests when it is read",
        (Edit(_CENSUS, "slot.distrust()  # the next", "pass  # the next"),),
        (_DAMAGED,),
    ),
    Mutation(
        "lost-slot-closed-at-once",
        "the files of a lost checkpoint stay open as long as the state is read from them",
        (
            Edit(
                _CENSUS,
                "        if slot is not None and checkpoint is newest:\n",
                "        if False:\n",
            ),
        ),
        (_DAMAGED, f"{_ANEW}[the-same-remove_tree-1]"),
    ),
    Mutation(
        "lost-parts-free-at-once",
        "the parts of a removed checkpoint are not free as long as the state is read from them",
        (
            Edit(
                _CENSUS,
                "            self._old_files.append((slot, free))\n",
                "            self._old_files.append((slot, free))\n"
                "            self._parts.release(checkpoint.manifest)\n",
            ),
        ),
        (f"{_REMOVED}[2]",),
    ),
    Mutation(
        "lost-slot-never-let-go",
        "the slot of a lost checkpoint is closed, and not used again, when the state has moved",
        (gone(_STORE, "            if self._census.release(slot):\n                return\n"),),
        (f"{_BEHIND}[mark-1]", f"{_PINNED}[replace_files-2]"),
    ),
    Mutation(
        "marked-parts-free",
        "the parts of a checkpoint that others marked are kept",
        (
            Edit(
                _CENSUS,
                "            self._parts.claim(path, known, found)\n",
                "            self._parts.release(known)\n",
            ),
        ),
        (f"{_TESTS}::test_what_was_marked_wrongly_can_be_used_again_later[2]",),
    ),
    Mutation(
        "link-in-place-of-a-checkpoint",
        "a directory that is a link holds no files of a store",
        (
            Edit(
                _IN_PLACE,
                '    if own is None or own.kind != "directory":\n',
                "    if own is None:\n",
            ),
        ),
        (f"{_TESTS}::test_a_link_in_its_place_is_not_followed",),
    ),
    Mutation(
        "replaced-files-not-noticed",
        "files are known by their inodes",
        (
            Edit(
                _IN_PLACE,
                "        name: (stat.inode, stat.size_bytes)\n",
                "        name: (0, stat.size_bytes)\n",
            ),
            Edit(
                _IN_PLACE,
                "{name: (file.inode, file.size_bytes) for",
                "{name: (0, file.size_bytes) for",
            ),
        ),
        (f"{_ACKNOWLEDGED}[newest-1-replace_files-1]",),
    ),
)
