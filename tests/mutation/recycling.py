"""Steps of taking a checkpoint back, and of using its slot and its parts again."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, faults, gone, killed, power

_SUPPLY = "offload/store/slots/supply.py"
_SEALING = "offload/store/sealing.py"
_STORE = "offload/store/store.py"
_WITHDRAWAL = "offload/store/withdrawal.py"
_RETENTION = "offload/retention/policy.py"
_SLOT = "offload/store/slots/slot.py"
_FREE = "offload/store/slots/free.py"
_PARTS = "offload/store/slots/part.py"
_POOL = "offload/store/slots/part_pool.py"
_STEPS = "tests/crash/test_protocol_steps.py"
_CONCURRENCY = "tests/crash/test_concurrency.py"
_DRIVES = "tests/crash/test_drives.py"
_HF_FILES = "tests/exchange/test_hf_files.py"
_QUARANTINE = "tests/crash/test_quarantine.py"

_THREE = power("three-checkpoints-keep=1")
_DRIVES_2 = power("three-checkpoints-keep=1-drives=2")
_WITHDRAWN = """\
                self._backend.rename(checkpoint.path, name)
                self._checkpoints.remove(checkpoint)
                if slot is not None:
                    slot.renamed(name)
                self._backend.sync_dir(self._directory)
                if slot is not None and _may_be_shared(slot):
                    slot = None  # will be unlinked, and must not be written: not even invalidated
                if slot is not None:
                    slot.invalidate()
                    if remove_mark(self._backend, name):  # a reader has found it damaged
                        slot.model_leaves.forget(readable=True)
"""

RECYCLING = (
    Mutation(
        "withdraw-no-store-sync",
        "sync of the store after a checkpoint has lost its name",
        (
            Edit(
                _WITHDRAWAL,
                _WITHDRAWN,
                _WITHDRAWN.replace("                self._backend.sync_dir(self._directory)\n", ""),
            ),
        ),
        _THREE,
    ),
    Mutation(
        "withdraw-manifest-stays",
        "the manifest of a slot is made invalid before it is rewritten",
        (Edit(_WITHDRAWAL, _WITHDRAWN, _WITHDRAWN.replace("slot.invalidate()", "pass")),),
        _THREE,
    ),
    Mutation(
        "withdraw-manifest-before-name",
        "order: the name is taken back durably, then the manifest is made invalid",
        (
            Edit(
                _WITHDRAWAL,
                _WITHDRAWN,
                """\
                if slot is not None:
                    slot.invalidate()
                self._backend.rename(checkpoint.path, name)
                self._checkpoints.remove(checkpoint)
                if slot is not None:
                    slot.renamed(name)
                self._backend.sync_dir(self._directory)
                if slot is not None:
                    remove_mark(self._backend, name)
""",
            ),
        ),
        _THREE,
    ),
    Mutation(
        "withdraw-in-use",
        "a checkpoint that is read is passed over",
        (
            Edit(
                _WITHDRAWAL,
                "lock = try_lock(self._backend, checkpoint.path)",
                "lock = self._backend.lock(checkpoint.path, shared=True)",
            ),
        ),
        (f"{_CONCURRENCY}::TestReaders",),
    ),
    Mutation(
        "withdraw-after-failed-sync",
        "nothing is withdrawn any more when a sync or rename has failed",
        (
            Edit(
                _WITHDRAWAL,
                """\
        if self._poison:
            return False
        self._lock.require()""",
                "        self._lock.require()",
            ),
        ),
        faults("sync-once-keep=1", "sync_dir-once-keep=1", "sync-once-keep=2"),
    ),
    Mutation(
        "withdraw-failed-sync-forgotten",
        "poison after a sync or rename of a withdrawal has failed",
        (
            Edit(
                _WITHDRAWAL,
                "with guard, self._parts.owners",
                "with self._parts.owners",
            ),
        ),
        (f"{_STEPS}::test_a_checkpoint_that_could_not_be_withdrawn_ends_all_reuse",),
    ),
    Mutation(
        "withdraw-the-last",
        "the newest durable checkpoint stays while its successor is sealed",
        (
            Edit(
                _WITHDRAWAL,
                "for c in self._keeping.expired(incoming) if c is not newest]\n",
                "for c in self._keeping.expired(incoming)]\n",
            ),
        ),
        _THREE,
    ),
    Mutation(
        "withdraw-what-is-leaving",
        "a checkpoint that is being copied to a tier stays while there is room",
        (
            Edit(
                _WITHDRAWAL,
                "return any(self.withdraw(c) for c in found if stages[c.path] is None)\n",
                "return any(self.withdraw(c) for c in found)\n",
            ),
        ),
        ("tests/tiers/test_leaving.py::test_nothing_is_recycled_before_its_copy_is_verified[1]",),
    ),
    Mutation(
        "withdraw-the-newest",
        "order: of those that are more than retention asks for the oldest go",
        (
            Edit(
                _RETENTION, "for record in records[-self.k :]}", "for record in records[: self.k]}"
            ),
        ),
        (f"{_CONCURRENCY}::test_the_newest_are_kept_and_nothing_else_grows",),
    ),
    Mutation(
        "withdraw-more-than-expired",
        "as many checkpoints stay as retention asks for",
        (
            Edit(
                _RETENTION,
                "for record in records[-self.k :]}",
                "for record in records[max(len(records) - self.k + 1, 0) :]}",
            ),
        ),
        (f"{_CONCURRENCY}::test_the_newest_are_kept_and_nothing_else_grows",),
    ),
    Mutation(
        "one-slot-too-many",
        "no slot is made beyond those that retention has room for",
        (Edit(_SUPPLY, "if self._keeping.expired(self._sealing.incoming):", "if False:"),),
        (
            f"{_CONCURRENCY}::test_there_is_never_more_than_one_slot_to_work_in",
            *power("sealed-behind-training-keep=1"),
        ),
    ),
    Mutation(
        "fresh-withdraws-nothing",
        "the history that was given up is withdrawn when the new one is durable",
        (
            Edit(
                _WITHDRAWAL,
                "for checkpoint in [c for c in self._checkpoints if c.superseded]:",
                "for checkpoint in list[StoredCheckpoint]():",
            ),
        ),
        (f"{_STEPS}::test_a_history_that_was_given_up_is_gone_when_the_new_one_is_durable",),
    ),
    Mutation(
        "going-back-withdraws-nothing",
        "going back withdraws what is newer",
        (
            gone(
                "offload/engine/resume.py",
                "        store.withdraw_newer(found)"
                "  # now that the older one has proved to be readable\n",
            ),
        ),
        power("gone-back-keep=2"),
    ),
    Mutation(
        "free-slot-after-failed-sync",
        "no free slot is used any more when a sync or rename has failed",
        (
            Edit(
                _SUPPLY,
                "            if not self._poison:\n                self._identify()\n",
                "            if True:\n                self._identify()\n",
            ),
        ),
        (f"{_STEPS}::test_a_train_state_that_could_not_be_replaced_ends_all_reuse",),
    ),
    Mutation(
        "sealed-slot-given-back",
        "a slot that is a checkpoint after all is not taken for a free one",
        (
            gone(
                _STORE,
                """\
            if self.checkpoint_of(slot) is not None:
                return  # the slot has been sealed meanwhile
""",
            ),
        ),
        (
            f"{_CONCURRENCY}::TestFailedSeal",
            *faults("sync_dir-once-keep=1", "rename-once-keep=1", "sync-once-keep=1"),
        ),
        redundant="a guard against bugs: only an exception that is no StorageError, and is raised "
        "behind the commit, leads there",
    ),
    Mutation(
        "invalid-manifest-not-synced",
        "sync of the invalid manifest before data is written",
        (
            gone(
                _SLOT,
                "        self.manifest.sync()\n",
            ),
        ),
        _THREE,
    ),
    Mutation(
        "parts-stay-valid",
        "what parts say of themselves is overwritten before they are",
        (
            gone(
                _SLOT,
                "        for part in self.parts:\n            part.invalidate()\n",
            ),
        ),
        (f"{_DRIVES}::TestOrder", *_DRIVES_2),
    ),
    Mutation(
        "leftover-slot-stays-valid",
        "a slot that an earlier process left is made invalid before it is rewritten",
        (
            Edit(
                _SLOT,
                "    slot.invalidate()\n    _write_headers(slot)\n    return slot\n",
                "    _write_headers(slot)\n    return slot\n",
            ),
        ),
        killed("three-checkpoints-keep=1", "two-processes-keep=1"),
    ),
    Mutation(
        "leftover-slot-of-any-size",
        "a slot that an earlier process left is used only if its files have their sizes",
        (
            Edit(
                _SLOT,
                'if stat is None or stat.kind != "file" or stat.size_bytes != size:',
                'if stat is None or stat.kind != "file":',
            ),
        ),
        power("three-checkpoints-keep=1", "added-group-keep=1"),
    ),
    Mutation(
        "leftover-slot-marked-as-damaged",
        "a slot that an earlier process left is not used if it is marked as damaged",
        (
            Edit(
                _SLOT,
                "    if not names >= set(sizes) or QUARANTINE_NAME in names:\n"
                "        return None\n",
                "",
            ),
        ),
        (f"{_HF_FILES}::test_a_slot_that_a_process_has_left_is_used_again_without_these_files",),
    ),
    Mutation(
        "leftover-slot-keeps-other-files",
        "files that are not part of a checkpoint are removed from a slot that is used again",
        (
            Edit(
                _SLOT,
                "    for name in sorted(names - set(sizes)):\n"
                '        backend.remove(f"{path}/{name}")\n',
                "",
            ),
        ),
        (f"{_HF_FILES}::test_a_slot_that_a_process_has_left_is_used_again_without_these_files",),
    ),
    Mutation(
        "leftover-slot-keeps-headers",
        "the headers of a slot that an earlier process left are written anew",
        (
            Edit(
                _SLOT,
                "    slot.invalidate()\n    _write_headers(slot)\n    return slot\n",
                "    slot.invalidate()\n    return slot\n",
            ),
        ),
        (f"{_STEPS}::test_a_leftover_slot_whose_headers_were_lost_is_written_anew",),
    ),
    Mutation(
        "free-slot-of-another-layout",
        "a free slot is used only for the layout that it has",
        (
            Edit(
                _FREE,
                "if is_alike and candidate.sizes == sizes and in_place:",
                "if in_place:",
            ),
        ),
        power("added-group-keep=1", "added-group-keep=2"),
    ),
    Mutation(
        "free-slot-without-parts",
        "a free slot is used only if its files and those of its parts are there",
        (Edit(_FREE, "candidate.sizes == sizes and in_place:", "candidate.sizes == sizes:"),),
        (f"{_DRIVES}::TestByHand::test_the_part_of_a_free_slot_is_removed_in_mid_run",),
    ),
    Mutation(
        "leftover-slot-that-is-read",
        "a slot that somebody still reads, under its former name, is passed over",
        (
            Edit(
                _FREE,
                "        lock = try_lock(self.backend, path)\n        try:\n",
                "        lock = self.backend.lock(path, shared=True)\n        try:\n",
            ),
        ),
        (f"{_CONCURRENCY}::TestReaders",),
    ),
    Mutation(
        "doubtful-slot-removed",
        "a slot that may be a checkpoint by now is not removed",
        (Edit(_FREE, "        if slot.state is not SlotState.IN_DOUBT:\n", "        if True:\n"),),
        faults("sync_dir-once-keep=1", "sync_dir-for-ever-keep=1"),
    ),
    Mutation(
        "ready-failed-sync-forgotten",
        "poison after a free slot could not be made ready",
        (
            Edit(
                _FREE,
                "                    with self._poison.fatal(_NOT_READY):\n"
                "                        adopted = adopt_slot(",
                "                    if True:\n                        adopted = adopt_slot(",
            ),
        ),
        faults("sync-once-keep=1", "sync-once-keep=2"),
    ),
    Mutation(
        "part-no-data-sync",
        "sync of a part's data before what it says of itself",
        (
            gone(
                _PARTS,
                "        for file in self._files.values():\n"
                "            if file is not own:\n"
                "                file.sync()\n",
            ),
        ),
        _DRIVES_2,
    ),
    Mutation(
        "part-sealed-before-data",
        "order: what a part says of itself is written when its data is durable",
        (
            gone(
                _PARTS,
                "        for file in self._files.values():\n"
                "            if file is not own:\n"
                "                file.sync()\n",
            ),
            Edit(
                _PARTS,
                "        own.sync()\n",
                "        own.sync()\n"
                "        for file in self._files.values():\n"
                "            file.sync()\n",
            ),
        ),
        (f"{_DRIVES}::TestOrder", *_DRIVES_2),
    ),
    Mutation(
        "part-no-own-sync",
        "sync of what a part says of itself",
        (gone(_PARTS, "        own.sync()\n"),),
        _DRIVES_2,
    ),
    Mutation(
        "part-no-names-sync",
        "sync of the names in a part",
        (gone(_PARTS, "        self._backend.sync_dir(self.path)\n"),),
        _DRIVES_2,
    ),
    Mutation(
        "part-no-name-sync",
        "sync of the name of a part",
        (gone(_PARTS, "            self._backend.sync_dir(self.directory)\n"),),
        _DRIVES_2,
    ),
    Mutation(
        "parts-not-sealed",
        "parts are sealed",
        (
            Edit(
                _SLOT,
                "            part.seal(sealed)\n",
                "            del sealed\n",
            ),
        ),
        _DRIVES_2,
    ),
    Mutation(
        "parts-sealed-last",
        "order: parts are sealed before the rename that makes them a checkpoint's",
        (
            Edit(
                _SLOT,
                "        for part, sealed in zip(self.parts, self._sealed_parts(), strict=True):\n"
                "            part.seal(sealed)\n        for name",
                "        for name",
            ),
            Edit(
                _SEALING,
                "                    self._rename_into_place(slot, path, exchange=in_the_way)\n",
                "                    self._rename_into_place("
                "slot, path, exchange=in_the_way)\n"
                "                for part, sealed in zip(slot.parts, slot._sealed_parts()):\n"
                "                    part.seal(sealed)\n",
            ),
        ),
        (f"{_DRIVES}::TestOrder", *_DRIVES_2),
    ),
    Mutation(
        "part-invalid-not-synced",
        "sync of a part that is made invalid, before data is written",
        (gone(_PARTS, "        self._files[PART_FILE_NAME].sync()\n"),),
        (f"{_DRIVES}::TestOrder", *_DRIVES_2),
    ),
    Mutation(
        "free-part-stays-valid",
        "a part that was found is made invalid before it is rewritten",
        (gone(_PARTS, "        part.invalidate()\n"),),
        (f"{_DRIVES}::TestOrder",),
    ),
    Mutation(
        "free-part-of-any-size",
        "a part that was found is used only if its files fit",
        (Edit(_PARTS, "stat.size_bytes == sizes[name]\n", "True\n"),),
        (*power("added-group-keep=1-drives=2"), _DRIVES),
    ),
    Mutation(
        "parts-of-checkpoints-not-taken",
        "parts that checkpoints have are not free",
        (
            Edit(
                _POOL,
                "set[int]().union(*map(part_numbers, manifests))",
                "set[int]()",
            ),
        ),
        power("two-processes-keep=1-drives=2"),
    ),
    Mutation(
        "parts-of-refused-not-kept",
        "parts that a refused checkpoint names are kept",
        (
            Edit(
                _POOL,
                "        claimed = self._taken.union(*(numbers or () for numbers in"
                " self._claims.values()))\n        unknown",
                "        claimed = self._taken\n        unknown",
            ),
        ),
        (f"{_DRIVES}::TestUnreadableManifest",),
    ),
    Mutation(
        "parts-of-unreadable-not-kept",
        "sealed parts are kept as long as a manifest cannot be read",
        (
            Edit(
                _POOL,
                "owner == self._store_id and not unknown",
                "owner == self._store_id",
            ),
        ),
        (f"{_DRIVES}::TestUnreadableManifest",),
    ),
    Mutation(
        "parts-of-other-stores-taken",
        "parts that are sealed for another store are kept",
        (
            Edit(
                _POOL,
                "if owner is None or (owner == self._store_id and not unknown):",
                "if owner is None or not unknown:",
            ),
        ),
        (f"{_DRIVES}::TestSharedDirectory",),
    ),
    Mutation(
        "free-part-after-failed-sync",
        "no part is used again when a sync or rename has failed",
        (Edit(_POOL, "if candidates and not self._poison:", "if candidates:"),),
        (f"{_DRIVES}::test_after_a_failed_sync_no_part_is_reused",),
    ),
    Mutation(
        "parts-removed-after-failed-sync",
        "no part is removed when a sync or rename has failed",
        (
            Edit(
                _POOL,
                "        if self._poison:\n            return\n        keep = num_slots",
                "        keep = num_slots",
            ),
        ),
        (
            f"{_DRIVES}::test_after_a_failed_sync_no_part_is_reused",
            *faults("sync-once-keep=1-drives=2"),
        ),
    ),
)
