"""Steps of a seal: what must be on the drive before the rename, and when the rename counts."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, faults, gone, power

_SUPPLY = "offload/store/slots/supply.py"
_SEALING = "offload/store/sealing.py"
_STORE = "offload/store/store.py"
_SLOT = "offload/store/slots/slot.py"
_SEAL = "offload/engine/seal.py"
_MODEL = "offload/model/model_writing.py"
_RESEAL = "offload/engine/reseal.py"
_ENGINE = "offload/engine/engine.py"
_STATE = "offload/engine/training_state.py"
_SLOTS = "offload/engine/working_slot.py"
_STEPS = "tests/crash/test_protocol_steps.py"
_CONCURRENCY = "tests/crash/test_concurrency.py"
_BEHIND = f"{_CONCURRENCY}::TestSealBehindTraining"
_OVERLAP = "tests/numerics/test_overlap.py"
_RESIDENT = "tests/numerics/test_resident.py"
_RESUME = "tests/numerics/test_resume_identity.py"
_FROZEN = "tests/numerics/test_frozen.py"
_BLOCKS = "tests/numerics/test_model_blocks.py"

_THREE = power("three-checkpoints-keep=1")
_COMMIT = """\
                slot.sync()
                slot.manifest.write_bytes(encoded, 0)
                slot.manifest.sync()
                slot.sync_names()
"""
_PUBLISH = "                    self._rename_into_place(slot, path, exchange=in_the_way)\n"

SEALING = (
    Mutation(
        "seal-no-data-sync",
        "sync of a slot's files before its manifest",
        (gone(_SEALING, "                slot.sync()\n"),),
        _THREE,
    ),
    Mutation(
        "seal-no-manifest-sync",
        "sync of the manifest before the rename",
        (gone(_SEALING, "                slot.manifest.sync()\n"),),
        _THREE,
    ),
    Mutation(
        "seal-no-slot-dir-sync",
        "sync of a slot's names before the rename",
        (gone(_SEALING, "                slot.sync_names()\n"),),
        _THREE,
    ),
    Mutation(
        "seal-manifest-before-data",
        "order: the manifest is written when the data is durable",
        (
            Edit(
                _SEALING,
                """\
                slot.sync()
                slot.manifest.write_bytes(encoded, 0)
                slot.manifest.sync()
""",
                """\
                slot.manifest.write_bytes(encoded, 0)
                slot.manifest.sync()
                slot.sync()
""",
            ),
        ),
        _THREE,
    ),
    Mutation(
        "seal-rename-before-syncs",
        "order: the rename comes last",
        (
            Edit(_SEALING, _COMMIT, "                slot.manifest.write_bytes(encoded, 0)\n"),
            Edit(
                _SEALING,
                _PUBLISH,
                """\
                    self._rename_into_place(slot, path, exchange=in_the_way)
                    slot.sync()
                    slot.manifest.sync()
                    slot.sync_names()
""",
            ),
        ),
        _THREE,
    ),
    Mutation(
        "seal-no-store-sync",
        "sync of the store after the rename: the commit",
        (
            Edit(
                _SEALING,
                """\
            slot.renamed(path)
            self._backend.sync_dir(self._directory)
            slot.published()
""",
                """\
            slot.renamed(path)
            slot.published()
""",
            ),
        ),
        _THREE,
    ),
    Mutation(
        "exchange-no-store-sync",
        "sync of the store after two names have been exchanged",
        (
            Edit(
                _SEALING,
                """\
            old.path = working
        self._backend.sync_dir(self._directory)
""",
                """\
            old.path = working
""",
            ),
        ),
        power("sealed-twice-keep=1", "sealed-twice-keep=2"),
    ),
    Mutation(
        "exchange-in-two-renames",
        "atomicity: an older checkpoint of the same step is there until its successor is",
        (
            Edit(
                _SEALING,
                "        self._backend.exchange(working, path)\n",
                """\
        self._backend.rename(path, f"{working}9")
        self._backend.rename(working, path)
        self._backend.rename(f"{working}9", working)
""",
            ),
        ),
        power("sealed-twice-keep=1", "sealed-twice-keep=2"),
    ),
    Mutation(
        "seal-not-in-doubt",
        "a slot whose rename may have happened is not removed",
        (gone(_SEALING, "        slot.begin_publication()\n"),),
        faults("sync_dir-once-keep=1", "sync_dir-for-ever-keep=1"),
    ),
    Mutation(
        "seal-failed-sync-forgotten",
        "poison after a sync or rename of a seal has failed",
        (
            Edit(
                _SEALING,
                "with self._poison.fatal(_NOT_DURABLE):\n                slot.sync()\n",
                "if True:\n                slot.sync()\n",
            ),
            Edit(
                _SEALING,
                "with leaving, self._poison.fatal(_NOT_DURABLE):\n                    in_the_way",
                "with leaving:\n                    in_the_way",
            ),
        ),
        faults("sync-once-keep=1", "sync_dir-once-keep=1", "sync-once-keep=2"),
    ),
    Mutation(
        "seal-replaces-what-is-read",
        "a checkpoint of the same step is not replaced while it is read",
        (
            Edit(
                _SEALING,
                "replaced = lock_existing(self._backend, path, self._reader_timeout_s)",
                "replaced = self._backend.lock(path, shared=True)"
                " if self._backend.stat(path) else None",
            ),
        ),
        (f"{_CONCURRENCY}::TestReaders",),
    ),
    Mutation(
        "seal-model-not-synced",
        "sync of model.safetensors",
        (
            Edit(
                _SLOT,
                "            if name != MANIFEST_NAME:\n",
                "            if name not in (MANIFEST_NAME, MODEL_NAME):\n",
            ),
        ),
        _THREE,
    ),
    Mutation(
        "seal-train-state-not-synced",
        "sync of train_state.safetensors",
        (
            Edit(
                _SLOT,
                "            if name != MANIFEST_NAME:\n",
                "            if name not in (MANIFEST_NAME, TRAIN_STATE_NAME):\n",
            ),
        ),
        _THREE,
    ),
    Mutation(
        "seal-masters-not-synced",
        "sync of master.safetensors",
        (
            Edit(
                _SLOT,
                "            if name != MANIFEST_NAME:\n",
                '            if name not in (MANIFEST_NAME, "master.safetensors"):\n',
            ),
        ),
        _THREE,
    ),
    Mutation(
        "seal-moments-not-synced",
        "sync of exp_avg_sq.safetensors",
        (
            Edit(
                _SLOT,
                "            if name != MANIFEST_NAME:\n",
                '            if name not in (MANIFEST_NAME, "exp_avg_sq.safetensors"):\n',
            ),
        ),
        _THREE,
    ),
    Mutation(
        "train-state-no-sync",
        "sync of a new train state before it takes the old one's name",
        (
            Edit(
                _SLOT,
                "            file.sync()\n            self._backend.rename(file.path",
                "            self._backend.rename(file.path",
            ),
        ),
        power("replaced-train-state-keep=1"),
    ),
    Mutation(
        "train-state-no-dir-sync",
        "sync of the directory after a train state was replaced",
        (
            Edit(
                _SLOT,
                '/{name}")\n            self._backend.sync_dir(self._path)\n',
                '/{name}")\n',
            ),
        ),
        power("replaced-train-state-keep=1"),
    ),
    Mutation(
        "train-state-in-place",
        "atomicity: a train state is replaced by a rename",
        (
            Edit(
                _SLOT,
                '            self._backend.rename(file.path, f"{self._path}/{name}")\n',
                "            self._files[name] = self._backend.open(\n"
                '                f"{self._path}/{name}", writable=True\n'
                "            )\n"
                "            data = file.read_bytes(0, file.size_bytes)\n"
                "            self._files[name].write_bytes(data, 0)\n"
                "            self._files[name].sync()\n"
                "            self._backend.remove(file.path)\n",
            ),
        ),
        power("replaced-train-state-keep=1"),
    ),
    Mutation(
        "train-state-failed-sync-forgotten",
        "poison after a sync or rename of a train state has failed",
        (
            Edit(
                _STORE,
                'with self._poison.fatal(f"{name} could not be replaced"):',
                "if True:",
            ),
        ),
        (f"{_STEPS}::test_a_train_state_that_could_not_be_replaced_ends_all_reuse",),
    ),
    Mutation(
        "seal-no-train-state",
        "the train state is written",
        (gone(_SEALING, "        slot.train_state.write_bytes(composition.train_state, 0)\n"),),
        _THREE,
    ),
    Mutation(
        "seal-no-wait-for-writes",
        "all writes of the state have ended before anything is synced",
        (gone(_SEAL, "        self._flush.wait()\n"),),
        (f"{_STEPS}::test_nothing_is_synced_before_all_writes_of_the_state_have_ended",),
    ),
    Mutation(
        "seal-no-flush",
        "state that is only in memory is written",
        (gone(_SEAL, "        self._flush.start(slot)\n"),),
        (
            f"{_STEPS}::test_resident_state_is_still_to_be_written_after_a_seal_that_failed_before_it",
        ),
    ),
    Mutation(
        "seal-edit-unnoticed",
        "a parameter that changes while it is copied fails the seal",
        (Edit(_SEAL, "            if tensor._version != version:\n", "            if False:\n"),),
        (f"{_OVERLAP}::test_an_edit_amid_a_seal_fails_the_seal_and_nothing_else",),
    ),
    Mutation(
        "seal-buffers-by-reference",
        "buffers are captured by value",
        (
            Edit(
                _SEAL,
                "captured = [item.captured() for item in stored]",
                "captured = list(stored)",
            ),
        ),
        (_BEHIND, _OVERLAP),
    ),
    Mutation(
        "seal-hyperparameters-by-reference",
        "hyper-parameters are captured by value",
        (Edit(_SEAL, "{k: copy.deepcopy(v) for", "{k: v for"),),
        (_BEHIND,),
    ),
    Mutation(
        "failed-seal-model-believed",
        "after a failed seal nothing is known of the model file",
        (gone(_SEAL, "            model.forget()\n"),),
        (f"{_FROZEN}::TestInOneProcess", *faults("write-once-keep=1", "write-once-keep=2")),
    ),
    Mutation(
        "failed-seal-flush-lost",
        "after a failed seal state in memory is still to be written",
        (gone(_SEAL, "            self._flush.abandon()\n"),),
        (
            f"{_STEPS}::test_resident_state_is_still_to_be_written_after_a_seal_that_failed_before_it",
        ),
    ),
    Mutation(
        "model-no-wait-for-writes",
        "the last writes of the parameters have ended before the sync",
        (
            Edit(
                _MODEL,
                "        writer.finish_writes()\n    finally:\n        writer.wait()\n",
                "    finally:\n        pass\n",
            ),
        ),
        (f"{_STEPS}::test_the_bytes_of_the_parameters_are_those_of_when_they_were_copied",),
    ),
    Mutation(
        "model-buffer-reused-too-early",
        "a buffer is filled again only when its write has ended",
        (
            Edit(
                _MODEL,
                "        for write in self._writes.get(last, []):\n            write.result()\n",
                "",
            ),
        ),
        (f"{_STEPS}::test_the_bytes_of_the_parameters_are_those_of_when_they_were_copied",),
    ),
    Mutation(
        "model-block-half-waited-for",
        "when a write of a block has failed the block's other writes have ended",
        (
            Edit(
                _MODEL,
                "for write in self._writes.get(last, []):",
                "for write in self._writes.pop(last, []):",
            ),
        ),
        (f"{_BLOCKS}::test_when_a_write_of_a_block_fails_the_others_of_the_block_have_ended",),
    ),
    Mutation(
        "model-published-too-early",
        "order: parameters may change when they have been copied, not before",
        (
            Edit(
                _MODEL,
                "            image.gather(start, stop, data, "
                "on_one_thread=not writer.has_caught_up)\n            copied(stop)\n",
                "            copied(stop)\n            image.gather(start, stop, data)\n",
            ),
        ),
        (f"{_STEPS}::test_the_bytes_of_the_parameters_are_those_of_when_they_were_copied",),
    ),
    Mutation(
        "step-no-wait-for-copy",
        "a step waits until the seal has copied the parameters that it overwrites",
        (
            gone(
                "offload/engine/chunk_pass.py",
                "                if seal is not None:\n"
                "                    seal.wait_copied(self._stops[chunk])\n",
            ),
        ),
        (_OVERLAP, _BEHIND),
    ),
    Mutation(
        "step-no-wait-for-frozen",
        "a step returns when the seal has copied everything",
        (
            Edit(
                "offload/engine/chunk_pass.py",
                "            seal.wait_all_copied()\n",
                "            pass\n",
            ),
        ),
        (f"{_STEPS}::test_a_step_returns_when_frozen_parameters_have_been_copied_as_well",),
    ),
    Mutation(
        "seal-slot-still-written",
        "the step after a seal writes another slot",
        (
            Edit(
                _SLOTS,
                "        self.is_working, self.sealed = False, None\n",
                "        self.sealed = None\n",
            ),
        ),
        _THREE,
    ),
    Mutation(
        "two-seals-in-flight",
        "a checkpoint waits for the seal before it",
        (
            Edit(
                _ENGINE,
                "        state.collect_seal(wait=True)\n        if not state.slots.is_working:\n",
                "        if not state.slots.is_working:\n",
            ),
        ),
        (_BEHIND, f"{_CONCURRENCY}::TestFailedSeal"),
    ),
    Mutation(
        "seal-same-generation",
        "every slot that is written gets a generation of its own",
        (gone(_SUPPLY, "        self._generation += 1\n"),),
        (*_THREE, *power("started-over-keep=1")),
    ),
    Mutation(
        "seal-generations-start-anew",
        "generations go on from the highest that is there",
        (Edit(_SUPPLY, "max(generations, default=0) + _UNREADABLE_GAP", "0 + _UNREADABLE_GAP"),),
        power("two-processes-keep=2"),
    ),
    Mutation(
        "seal-no-gap-after-unreadable",
        "new generations are above those that cannot be read now",
        (Edit(_SUPPLY, " + _UNREADABLE_GAP * bool(opened.refused)\n", "\n"),),
        (f"{_STEPS}::test_what_cannot_be_read_now_is_never_the_newest_again",),
    ),
    Mutation(
        "reseal-hyperparameters-ignored",
        "a step that was sealed is sealed again if its hyper-parameters differ",
        (
            Edit(
                _RESEAL,
                "    return saved == [encode_group(i, group) for i, group in enumerate(groups)]\n",
                "    return True\n",
            ),
        ),
        (
            f"{_RESUME}::test_a_learning_rate_changed_after_the_checkpoint_is_in_the_next_of_the_same_step",
        ),
    ),
    Mutation(
        "reseal-parameters-ignored",
        "a step that was sealed is sealed again if its parameters differ",
        (
            Edit(
                _RESEAL,
                "    return tuple(digest_model(image, buffers, slot.context))"
                " == manifest.model_digests\n",
                "    return True\n",
            ),
        ),
        power("sealed-twice-keep=1"),
    ),
    Mutation(
        "reseal-train-state-kept",
        "a train state that differs is replaced",
        (
            Edit(
                _RESEAL,
                "    if several or store.reader_of(sealed).read_train_state() != encoded:\n",
                "    if False:\n",
            ),
        ),
        (f"{_RESUME}::test_sealing_the_same_step_again_replaces_the_train_state",),
    ),
    Mutation(
        "reseal-after-failed-sync",
        "after a failed sync a step that was sealed is sealed anew, above what has failed",
        (Edit(_ENGINE, "if store.poisoned or sealed", "if sealed"),),
        (
            f"{_STEPS}::test_a_checkpoint_that_failed_and_was_given_up_is_not_newer_than_a_later_one",
        ),
    ),
    Mutation(
        "sealing-not-announced",
        "a step that needs a slot waits for the seal in flight",
        (
            Edit(
                _SEALING,
                "            self.incoming = record_of(manifest)\n",
                "            del manifest\n",
            ),
        ),
        (
            f"{_CONCURRENCY}::test_there_is_never_more_than_one_slot_to_work_in",
            *power("sealed-behind-training-keep=1"),
        ),
    ),
    Mutation(
        "failed-durability-trained-on",
        "state that could not be made durable is not trained on",
        (
            Edit(
                _STATE,
                "            elif self.store.poisoned:\n",
                "            elif False:\n",
            ),
        ),
        (f"{_STEPS}::test_state_that_could_not_be_made_durable_is_not_trained_on",),
    ),
)
