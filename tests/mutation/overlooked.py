"""Steps that were taken out by another hand, and that no test noticed then."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone

_SUPPLY = "offload/store/slots/supply.py"
_SEALING = "offload/store/sealing.py"
_MODEL = "offload/model/model_file.py"
_POOL = "offload/store/slots/part_pool.py"
_SLOT = "offload/store/slots/slot.py"
_NAMES = "gds/backends/names.py"
_TESTS = "tests/crash/test_overlooked_steps.py"
_PROCESS = "tests/contract/test_posix_process.py"

OVERLOOKED = (
    Mutation(
        "restore-first-block-only",
        "every block of the model file is compared with its digest",
        (
            Edit(
                _MODEL,
                "            if found != expected[index]:\n",
                "            if found != expected[index] and index == 0:\n",
            ),
        ),
        (f"{_TESTS}::test_every_block_of_the_parameters_is_checked",),
    ),
    Mutation(
        "fresh-generations-anew",
        "generations go on where a store starts over",
        (
            Edit(
                _SUPPLY,
                "        generations = [c.manifest.generation for c in opened.checkpoints]\n",
                "        generations = [c.manifest.generation for c in opened.checkpoints"
                " if not c.superseded]\n",
            ),
        ),
        (f"{_TESTS}::test_a_history_that_starts_over_is_newer_than_the_one_that_was_given_up",),
    ),
    Mutation(
        "unreadable-part-is-free",
        "a part that cannot be read is left alone",
        (
            Edit(
                _POOL,
                "                    continue  # its owner is unknown, so it is left alone\n",
                "                    owner = None\n",
            ),
        ),
        (f"{_TESTS}::test_a_part_of_another_store_is_not_taken_while_it_cannot_be_read",),
    ),
    Mutation(
        "part-number-kept-elsewhere",
        "a number that is kept on one drive is used on no other",
        (
            Edit(
                _POOL,
                "        candidates = set[int]().union(*free) - self._not_rewritable(free)\n",
                "        candidates = set[int]().union(*free)\n",
            ),
        ),
        (f"{_TESTS}::test_a_number_that_is_kept_on_one_drive_is_used_on_no_other",),
    ),
    Mutation(
        "removed-parts-not-noticed",
        "parts that somebody has removed are not opened",
        (
            Edit(
                "offload/store/withdrawal.py",
                "            if self._parts.all_exist(checkpoint.manifest):",
                "            if True:",
            ),
        ),
        (f"{_TESTS}::test_missing_parts_of_a_checkpoint_that_was_given_up_do_not_keep_its_slot",),
    ),
    Mutation(
        "take-leaks-made-parts",
        "parts that were made for a slot that could not be made are removed",
        (Edit(_POOL, "                if part in made:\n", "                if False:\n"),),
        (f"{_TESTS}::test_parts_that_were_made_for_a_slot_that_could_not_be_made_are_removed",),
    ),
    Mutation(
        "trim-failure-fails-seal",
        "what fails behind the commit does not fail the seal",
        (
            Edit(
                _SEALING,
                "            with suppress(StorageError, StoreError):\n",
                "            with suppress():\n",
            ),
        ),
        (f"{_TESTS}::test_what_fails_behind_the_commit_does_not_fail_the_seal",),
    ),
    Mutation(
        "leftover-new-file-blocks",
        "what a crash has left of a replacement is removed by the next",
        (
            gone(
                _SLOT,
                "        if self._backend.stat(path) is not None:\n"
                "            self._backend.remove(path)\n",
            ),
        ),
        (f"{_TESTS}::test_a_replacement_that_a_crash_has_left_half_made_does_not_block_the_next",),
    ),
    Mutation(
        "lock-of-renamed-dir",
        "what was renamed before it could be locked is not what is locked",
        (
            Edit(
                _NAMES,
                "                if current:\n",
                "                if current or not current:\n",
            ),
        ),
        (
            f"{_PROCESS}::test_what_is_renamed_between_opening_and_locking_is_not_what_was_asked_for",
        ),
    ),
    Mutation(
        "gap-of-one",
        "generations begin far above all that could not be read",
        (Edit(_SUPPLY, "_UNREADABLE_GAP = 1 << 20\n", "_UNREADABLE_GAP = 1\n"),),
        (f"{_TESTS}::test_several_that_cannot_be_used_now_are_never_the_newest_again",),
    ),
)
