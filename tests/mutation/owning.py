"""Steps of the life of an owner's part, in a store that several ranks write."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone

_SLOT = "offload/store/owners/slot.py"
_OWNER = "offload/store/owners/store.py"
_CLAIMS = "offload/store/owners/claims.py"
_FREE = "offload/store/owners/free_parts.py"
_OPENING = "offload/store/opening.py"
_SEALING = "offload/store/sealing.py"
_SUPPLY = "offload/store/slots/supply.py"
_READERS = "offload/checkpoint/owner_parts.py"
_MANIFEST = "offload/format/manifest.py"
_OWNERS = "offload/format/shares/owners.py"
_FOLDER = "offload/store/slots/folder.py"
_SEALED = "offload/checkpoint/sealed_slot.py"

_UNITS = "tests/ranks_store/test_owner_store.py"
_FORMAT = "tests/ranks_store/test_owner_format.py"
_SEEN = "tests/ranks_store/test_owner_readers.py"
_SHARDS = "tests/ranks_store/test_shard_readers.py"
_REFUSED = "test_a_shard_file_that_is_not_as_it_was_written_refuses_the_checkpoint"
_SHARD_FORMAT = "tests/ranks_store/test_shard_format.py"
_CUTS = "tests/ranks_store/test_power_cuts.py::test_power_lost_on_any_node_after_any_effect"
_POWER = tuple(f"{_CUTS}[{name}-keep=1]" for name in ("checkpoints_in_turn", "aborted"))
_RESTART = (f"{_CUTS}[restarted-keep=1]",)

_DATA = """\
        for file in self._files.values():
            if file is not self.table:
                file.sync()
"""
_RANGES = """\
        if self.layout.shard is not None:
            for box in self._model_boxes:
"""
_TABLE = """\
        self.table.write_bytes(encoded, 0)
        self.table.sync()
"""

OWNING = (
    Mutation(
        "owner-no-data-sync",
        "sync of the state of a part before its table is written",
        (gone(_SLOT, _DATA),),
        _POWER,
    ),
    Mutation(
        "owner-table-before-data",
        "order: the state of a part is durable before its table",
        (Edit(_SLOT, _DATA + _TABLE, _TABLE + _DATA),),
        _POWER,
        redundant="the reference, and with it the manifest, follows both",
    ),
    Mutation(
        "owner-no-table-sync",
        "sync of the table of a part",
        (Edit(_SLOT, _TABLE, _TABLE.replace("        self.table.sync()\n", "")),),
        _POWER,
    ),
    Mutation(
        "owner-no-part-sync",
        "sync of the names of the files of a part",
        (gone(_SLOT, "        sync_names(self._backend, self.path, self._files)\n"),),
        _POWER,
    ),
    Mutation(
        "owner-no-name-sync",
        "sync of the name of a part",
        (gone(_SLOT, "            self._backend.sync_dir(self._directory)\n"),),
        _POWER,
    ),
    Mutation(
        "owner-ready-stays-valid",
        "a part that is used again is durably invalid before data is written",
        (
            Edit(
                _FREE,
                "            slot.invalidate()\n            slot.write_headers()\n",
                "            slot.write_headers()\n",
            ),
        ),
        (f"{_UNITS}::test_a_part_that_is_used_again_is_made_invalid_first",),
    ),
    Mutation(
        "owner-aborted-stays-valid",
        "a part whose seal was aborted is durably invalid before data is written",
        (
            Edit(
                _OWNER,
                "            with self._poison.fatal(NOT_READY):\n"
                "                slot.invalidate()\n",
                "            pass\n",
            ),
        ),
        (f"{_UNITS}::test_an_aborted_part_is_durably_invalid_and_may_be_written_again",),
    ),
    Mutation(
        "owner-rewrites-what-is-named",
        "a part that a checkpoint names is not rewritten",
        (
            Edit(
                _FREE,
                "        if name in named.of(owner) or directories_in(backend, path):\n",
                "        if directories_in(backend, path):\n",
            ),
        ),
        _RESTART,
    ),
    Mutation(
        "owner-rewrites-what-is-locked",
        "a part on which somebody holds a lock is not rewritten",
        (
            Edit(
                _FREE,
                "            lock = try_lock(self._backend, path)\n"
                "            if lock is None:\n"
                "                continue  # a reader",
                "            lock = self._backend.lock(path, shared=True)\n"
                "            if lock is None:\n"
                "                continue  # a reader",
            ),
        ),
        (f"{_UNITS}::test_a_part_on_which_somebody_holds_a_lock_is_passed_over",),
    ),
    Mutation(
        "owner-writes-without-a-lock",
        "a rank holds a shared lock on the part that it writes",
        (
            Edit(
                _SLOT,
                "        self._lock = self._backend.lock(self.path, shared=True)\n",
                "        self._lock = None\n",
            ),
        ),
        (f"{_UNITS}::test_a_part_on_which_somebody_holds_a_lock_is_passed_over",),
    ),
    Mutation(
        "owner-rank-0-without-a-lock",
        "rank 0 holds a shared lock on the slot that it writes",
        (Edit(_SUPPLY, "        if self._owners:\n", "        if False:\n"),),
        (f"{_UNITS}::TestJob::test_the_slot_of_a_left_over_rank_0_is_passed_over",),
    ),
    Mutation(
        "owner-served-twice",
        "the lock of the rank that serves an owner",
        (
            Edit(
                _OWNER,
                "                self._lock.take(backend, self.path)\n",
                "                pass\n",
            ),
        ),
        (f"{_UNITS}::test_a_second_process_cannot_serve_an_owner",),
    ),
    Mutation(
        "owner-undecided-part-reused",
        "a part that was reported and not decided is never written again",
        (
            Edit(
                _OWNER,
                "        if slot.state is not OwnerSlotState.ABANDONED:\n",
                "        if True:\n",
            ),
        ),
        (f"{_UNITS}::test_an_undecided_part_is_never_written_again",),
    ),
    Mutation(
        "owner-failed-sync-forgotten",
        "poison after a part could not be made durable",
        (
            Edit(
                _OWNER,
                "            with self._poison.fatal(_NOT_DURABLE):\n",
                "            if True:\n",
            ),
        ),
        (f"{_UNITS}::test_a_part_that_cannot_be_made_durable_is_given_up",),
    ),
    Mutation(
        "owner-freed-before-withdrawal",
        "the parts of a checkpoint are free only when its withdrawal is durable",
        (
            Edit(
                _CLAIMS,
                "        self._leaving.append(manifest)\n"
                "        yield\n"
                "        self._leaving.remove(manifest)\n",
                "        yield\n",
            ),
        ),
        (
            f"{_UNITS}::TestJob::test_a_withdrawal_that_failed_keeps_its_parts",
            f"{_UNITS}::TestJob::test_a_seal_in_doubt_keeps_its_parts",
        ),
    ),
    Mutation(
        "owner-unreadable-names-nothing",
        "a checkpoint whose manifest cannot be read may name any part",
        (gone(_OPENING, "        owners.claim_unknown(path)\n"),),
        (f"{_UNITS}::TestJob::test_an_unreadable_manifest_may_name_any_part",),
    ),
    Mutation(
        "owner-refused-names-nothing",
        "the parts of a checkpoint that is not usable stay",
        (Edit(_OPENING, "owners.claim(path, [manifest])", "owners.claim(path, [])"),),
        (f"{_UNITS}::TestJob::test_a_checkpoint_without_its_part_is_refused_and_not_deleted",),
    ),
    Mutation(
        "owner-missing-part-accepted",
        "a checkpoint of which a part is missing is not used",
        (
            Edit(
                _OPENING,
                "                known.require_parts(path, manifest)\n",
                "",
            ),
        ),
        (f"{_UNITS}::TestJob::test_a_checkpoint_without_its_part_is_refused_and_not_deleted",),
    ),
    Mutation(
        "owner-no-identity",
        "the identity of a store is durable before the part of an owner is written",
        (
            Edit(
                _OPENING,
                "has_parts = bool(others) or shared is not None",
                "has_parts = bool(others)",
            ),
        ),
        _POWER,
    ),
    Mutation(
        "owner-mark-overlooked",
        "the next opening learns of the mark of a damaged part",
        (
            Edit(
                _READERS,
                '"" if mark is None else _quarantined(path, mark))',
                '"")',
            ),
        ),
        (f"{_UNITS}::TestJob::test_a_quarantined_part_takes_its_checkpoint_out_of_use",),
    ),
    Mutation(
        "owner-mark-unread-by-readers",
        "readers do not use a part that is marked as damaged",
        (
            Edit(
                _READERS,
                "        mark = None if even_quarantined else read_quarantine(backend, part)\n",
                "        mark = None\n",
            ),
        ),
        (f"{_SEEN}::test_a_marked_part_can_be_looked_at",),
    ),
    Mutation(
        "owner-any-part-accepted",
        "a part is the one that was sealed with the checkpoint",
        (Edit(_READERS, "    if header.digest == reference.digest:\n", "    if True:\n"),),
        (f"{_SEEN}::test_a_part_that_is_not_that_of_the_checkpoint_refuses_it",),
    ),
    Mutation(
        "owner-headers-not-compared",
        "the files of an owner's part have the headers of its table",
        (
            Edit(
                _READERS,
                "        for name, header in layout.array_headers[0].items():\n",
                "        for name, header in {}.items():\n",
            ),
        ),
        (f"{_SEEN}::test_a_part_that_is_not_that_of_the_checkpoint_refuses_it",),
    ),
    Mutation(
        "owner-reader-without-a-lock",
        "a reader locks the parts that it reads",
        (
            Edit(
                "offload/checkpoint/opening.py",
                "locks = _lock_owners(backend, found, manifest, parts) if need_parts else []",
                "locks: list[Lock] = []",
            ),
        ),
        (f"{_SEEN}::test_an_open_checkpoint_keeps_its_parts",),
    ),
    Mutation(
        "owner-seals-without-agreement",
        "every owner has reported a part of the same generation",
        (
            gone(
                _SEALING,
                "        require_agreement(owners, expected, slot.context.generation)\n",
            ),
        ),
        (f"{_UNITS}::TestJob::test_ranks_that_do_not_agree_seal_nothing",),
    ),
    Mutation(
        "owner-hidden-by-a-flipped-bit",
        "a manifest with owners is one of version 4 only",
        (Edit(_MANIFEST, '    if "owners" in body:\n', "    if False:\n"),),
        (f"{_FORMAT}::test_a_flipped_bit_of_the_version_does_not_hide_owners",),
    ),
    Mutation(
        "shard-no-folder-sync",
        "sync of the name of a shard file before the manifest names its part",
        (Edit(_FOLDER, '        backend.sync_dir(f"{path}/{SHARD_FOLDER}")\n', "        pass\n"),),
        tuple(f"{_CUTS}[{name}-keep=1-sharded]" for name in ("checkpoints_in_turn", "aborted")),
    ),
    Mutation(
        "shard-not-verified",
        "the shard files of other owners than the first are verified",
        (Edit(_SEALED, _RANGES, _RANGES.replace("is not None", "is not None and False")),),
        (f"{_SHARDS}::test_a_flipped_bit_is_found_and_marks_what_has_it",),
    ),
    Mutation(
        "shard-header-not-compared",
        "a shard file of an owner has the header of its table",
        (
            Edit(
                _READERS,
                '            check_header(backend, f"{part}/{layout.model_name}", '
                "layout.model_file_header)\n",
                "            pass\n",
            ),
        ),
        (f"{_SHARDS}::test_a_shard_file_that_is_not_as_it_was_written_refuses_the_checkpoint",),
    ),
    Mutation(
        "shard-hidden-by-a-flipped-bit",
        "a document that names a shard file has a version that knows of them",
        (Edit(_OWNERS, '        if "model_file" in body:\n', "        if False:\n"),),
        (f"{_SHARD_FORMAT}::test_a_flipped_bit_of_the_version_does_not_hide_shard_files",),
    ),
    Mutation(
        "shard-of-another-kind",
        "the parts of a checkpoint are all with shard files, or all without",
        (
            Edit(
                _READERS,
                "        if (layout.shard is None) != (manifest.layout.shard is None):\n",
                "        if False:\n",
            ),
        ),
        (f"{_SHARDS}::test_a_part_of_the_other_kind_is_refused",),
    ),
)
