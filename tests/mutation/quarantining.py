"""Steps of giving up a checkpoint that was found damaged, also for later processes."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone

_SEALED_SLOT = "offload/checkpoint/sealed_slot.py"
_SEALING = "offload/store/sealing.py"
_QUARANTINE = "offload/store/quarantine.py"
_STORE = "offload/store/store.py"
_WITHDRAWAL = "offload/store/withdrawal.py"
_READING = "offload/checkpoint/reading.py"
_OPENING = "offload/store/opening.py"
_PASSES = "offload/engine/state_passes.py"
_RESUME = "offload/engine/resume.py"
_STREAMER = "offload/stream/streamer.py"
_SYNCED = """\
                with poison.fatal(_NOT_MARKED):
                    file.sync()
"""
_TESTS = "tests/crash/test_quarantine.py"
_DURABLE = f"{_TESTS}::test_the_mark_is_durable_when_restore_returns"
_NOT_DURABLE = f"{_TESTS}::test_after_a_mark_that_could_not_be_made_durable_nothing_is_reused"
_AT_ONCE = f"{_TESTS}::test_restore_takes_the_one_before"
_FIRST_STEP = f"{_TESTS}::test_state_that_the_first_step_finds_damaged"
_LATER = f"{_TESTS}::test_later_processes_do_not_try_it_again"

QUARANTINING = (
    Mutation(
        "quarantine-no-sync",
        "sync of the file that marks a checkpoint",
        (gone(_QUARANTINE, _SYNCED),),
        (_DURABLE,),
    ),
    Mutation(
        "quarantine-no-dir-sync",
        "sync of the name of the file that marks a checkpoint",
        (
            gone(
                _QUARANTINE,
                "    with poison.fatal(_NOT_MARKED):\n        backend.sync_dir(path)\n",
            ),
        ),
        (_DURABLE,),
    ),
    Mutation(
        "quarantine-found-not-synced",
        "sync of the name of a mark that is there already, of a process that may have died",
        (
            Edit(
                _QUARANTINE,
                "    if backend.stat(mark) is None:\n        data",
                "    if backend.stat(mark) is not None:\n        return\n"
                "    if True:\n        data",
            ),
        ),
        (f"{_TESTS}::test_a_mark_that_another_process_has_just_made_is_made_durable",),
    ),
    Mutation(
        "quarantine-failed-sync-forgotten",
        "poison after the mark could not be synced",
        (
            Edit(
                _QUARANTINE,
                _SYNCED,
                "                file.sync()\n",
            ),
        ),
        (f"{_NOT_DURABLE}[sync]",),
    ),
    Mutation(
        "quarantine-failed-dir-sync-forgotten",
        "poison after the name of the mark could not be synced",
        (
            Edit(
                _QUARANTINE,
                "    with poison.fatal(_NOT_MARKED):\n        backend.sync_dir(path)\n",
                "    backend.sync_dir(path)\n",
            ),
        ),
        (f"{_NOT_DURABLE}[sync_dir]",),
    ),
    Mutation(
        "quarantine-not-written",
        "a checkpoint that was found damaged is marked",
        (
            Edit(
                _QUARANTINE,
                "write_quarantine(self._backend, checkpoint.path, reason, self._poison)",
                "pass",
            ),
        ),
        (f"{_AT_ONCE}[model]",),
    ),
    Mutation(
        "quarantine-unread",
        "the mark is read",
        (Edit(_READING, "    if reason is not None:\n", "    if False:\n"),),
        (f"{_LATER}[model]",),
    ),
    Mutation(
        "quarantine-unread-at-opening",
        "the mark is read where training goes on",
        (
            Edit(
                _OPENING,
                "        except CheckpointError as error:\n"
                "            refused.append((path, str(error)))\n"
                "        else:\n",
                "        except CheckpointError as error:\n"
                "            if 'quarantined' not in str(error):\n"
                "                refused.append((path, str(error)))\n"
                "                continue\n"
                "        if True:\n",
            ),
        ),
        (f"{_TESTS}::test_what_was_marked_before_training_starts_over_stays",),
    ),
    Mutation(
        "quarantine-unread-by-readers",
        "the mark is read by readers",
        (
            Edit(
                _READING,
                "        if not even_quarantined:\n",
                "        if not even_quarantined and need_parts and parts is not None:\n",
            ),
        ),
        (f"{_LATER}[model]",),
    ),
    Mutation(
        "quarantine-not-refused",
        "a checkpoint that was given up is named when the next one is chosen",
        (
            gone(
                _STORE,
                "        self.refused.append((checkpoint.path, reason))\n",
            ),
        ),
        (f"{_TESTS}::test_when_none_is_left", f"{_FIRST_STEP}[master-None-1]"),
    ),
    Mutation(
        "quarantine-parts-not-claimed",
        "parts of a damaged checkpoint are not free",
        (
            gone(
                _STORE,
                "        self._parts.claim(checkpoint.path, checkpoint.manifest)\n",
            ),
        ),
        (
            f"{_TESTS}::test_its_files_stay_as_they_are[2]",
            f"{_TESTS}::test_its_place_is_taken_when_training_comes_to_its_step_again",
        ),
    ),
    Mutation(
        "quarantine-claim-never-released",
        "parts of a damaged checkpoint are free when its place has been taken",
        (gone(_SEALING, "        self._parts.release_claim(path)\n"),),
        (
            f"{_TESTS}::test_its_place_is_taken_when_training_comes_to_its_step_again",
            "tests/crash/test_drives.py::TestUnreadableManifest",
        ),
    ),
    Mutation(
        "quarantined-slot-given-back",
        "the slot of a damaged checkpoint is not a free one",
        (
            Edit(
                _STORE,
                "            if self._quarantine.has(slot) or not self._lock.is_held():\n",
                "            if not self._lock.is_held():\n",
            ),
        ),
        (f"{_TESTS}::test_its_files_stay_as_they_are",),
    ),
    Mutation(
        "quarantine-not-lifted",
        "the mark is removed from a slot that is used again",
        (
            Edit(
                _WITHDRAWAL,
                "                    if remove_mark(self._backend, name):"
                "  # a reader has found it damaged\n",
                "                    if False:\n",
            ),
        ),
        (f"{_TESTS}::test_a_mark_made_beside_the_training_does_not_outlive_its_checkpoint",),
    ),
    Mutation(
        "restore-no-fallback",
        "restore() goes on from the checkpoint before a damaged one",
        (
            Edit(
                _RESUME,
                "    return store.newest if which is None else None\n",
                "    return None\n",
            ),
        ),
        (f"{_AT_ONCE}[model]",),
    ),
    Mutation(
        "restore-falls-back-unasked",
        "one that was asked for is not replaced by another",
        (
            Edit(
                _RESUME,
                "    return store.newest if which is None else None\n",
                "    return store.newest\n",
            ),
        ),
        (f"{_TESTS}::test_one_that_was_asked_for_is_not_replaced_by_another",),
    ),
    Mutation(
        "restored-state-believed",
        "what this process wrote is not believed either when it goes back to it",
        (Edit(_RESUME, "    slot.distrust()  #", "    #"),),
        (f"{_TESTS}::test_one_that_this_process_wrote_is_checked_when_it_goes_back_to_it",),
    ),
    Mutation(
        "stored-state-believed",
        "what is opened is marked as not checked",
        (Edit(_SEALED_SLOT, "        self.distrust()\n", ""),),
        ("tests/crash/test_interrupted.py::test_damaged_state_is_not_trained_on",),
        redundant="state is read from a slot that was opened only after a restore, which marks it",
    ),
    Mutation(
        "verify-always-ignored",
        "with verify='always' every read is checked",
        (
            Edit(
                _STREAMER,
                "source is not None and (source.unchecked or self._verify_reads):\n",
                "source is not None and source.unchecked:\n",
            ),
        ),
        (f"{_TESTS}::TestVerifyAlways",),
    ),
    Mutation(
        "first-pass-damage-not-quarantined",
        "a checkpoint whose state the first step finds damaged is given up",
        (
            Edit(
                _PASSES,
                "        refusal = try_to_quarantine(state.store, checkpoint, damage)\n",
                "        del checkpoint\n",
            ),
        ),
        (f"{_FIRST_STEP}[master-None-1]",),
    ),
)
