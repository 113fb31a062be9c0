"""What may be done in directories that only a manifest names, and with a name that is wrong."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone

_READER_OPENING = "offload/checkpoint/opening.py"
_PRUNING = "offload/store/maintenance/pruning.py"
_STORE = "offload/store/store.py"
_FREE = "offload/store/slots/free.py"
_POOL = "offload/store/slots/part_pool.py"
_UNNAMED = "offload/store/maintenance/unnamed_parts.py"
_QUARANTINE = "offload/store/quarantine.py"
_CHECKPOINT = "offload/checkpoint/checkpoint.py"
_VERIFY = "offload/checkpoint/verify.py"
_TESTS = "tests/cli/test_recorded_directories.py"
_PRUNE = f"{_TESTS}::TestPrune"
_VERIFIED = f"{_TESTS}::TestVerify"
_NAME = f"{_TESTS}::TestName"

RECORDED = (
    Mutation(
        "prune-follows-manifests",
        "nothing is pruned in directories that only a manifest names",
        (
            Edit(
                _PRUNING,
                "    if newest is not None and are_only_recorded(newest, parts):\n",
                "    if parts is None and newest is not None:\n"
                "        parts = [part.directory for part in newest.parts]\n"
                "    if newest is not None and are_only_recorded(newest, parts):\n",
            ),
        ),
        (f"{_PRUNE}::test_prune_of_a_copy_touches_nothing_before_it_is_told_where_its_drives_are",),
    ),
    Mutation(
        "prune-removes-unnamed-parts",
        "a sealed part that no manifest names is not removed by who prunes",
        (
            Edit(
                _POOL,
                "                if sealed is None or sealed.digest in self._withdrawn:\n"
                "                    if number in free:\n",
                "                if True:\n                    if number in free:\n",
            ),
        ),
        (
            f"{_PRUNE}::test_a_sealed_part_that_no_manifest_names_is_left_alone_and_reported",
            f"{_PRUNE}::test_it_is_said_to_people_as_well",
        ),
    ),
    Mutation(
        "prune-where-a-store-has-gone-on",
        "nothing is pruned in directories that hold newer parts than any checkpoint",
        (Edit(_UNNAMED, "generation > newest.generation", "False"),),
        (f"{_PRUNE}::test_the_drives_of_a_store_that_has_gone_on_are_refused",),
    ),
    Mutation(
        "prune-leaves-parts-of-linked-checkpoints",
        "parts of what has just been withdrawn are removed, also if they are still sealed",
        (
            gone(
                _STORE,
                "            self._free.note_withdrawn()  # including the slots that have just been"
                " withdrawn\n",
            ),
        ),
        (f"{_PRUNE}::test_parts_of_hard_linked_checkpoints_go_with_them",),
    ),
    Mutation(
        "prune-leaves-parts-of-half-withdrawn-checkpoints",
        "parts are removed that a slot names whose withdrawal was not finished",
        (
            Edit(
                _FREE,
                "for path in self.paths() if self._parts.directories else ():",
                "for path in ():",
            ),
        ),
        (f"{_PRUNE}::test_what_a_withdrawal_has_left_half_done_is_removed_on_every_drive",),
    ),
    Mutation(
        "marked-for-another-store",
        "nothing is marked as damaged because of a directory that only its manifest names",
        (Edit(_VERIFY, "marks = not part and (marks_parts or not sealed.drive)", "marks = True"),),
        (f"{_VERIFIED}::test_damage_of_the_original_marks_nothing_in_the_copy",),
    ),
    Mutation(
        "lifted-for-another-store",
        "no mark is lifted because a directory is whole that only its manifest names",
        (
            Edit(
                _QUARANTINE,
                "        elif report.ok and not checkpoint.parts_are_only_recorded:\n",
                "        elif report.ok:\n",
            ),
        ),
        (f"{_VERIFIED}::test_a_mark_is_not_lifted_because_the_original_is_whole",),
    ),
    Mutation(
        "verify-passes-a-wrong-name",
        "verify finds that a checkpoint is named for another step",
        (
            Edit(
                _CHECKPOINT,
                "                check_name(self.path, self.manifest)\n",
                "                pass\n",
            ),
        ),
        (f"{_NAME}::test_verify_finds_what_restore_refuses",),
    ),
    Mutation(
        "wrong-name-opened",
        "a reader refuses a checkpoint that is named for another step",
        (
            gone(
                _READER_OPENING,
                "        if not even_quarantined:\n            check_name(found, manifest)\n",
            ),
        ),
        (f"{_NAME}::test_a_reader_that_names_the_step_gets_no_other",),
    ),
)
