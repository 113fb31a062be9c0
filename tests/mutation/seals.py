"""Seals: what must be on the drive before the rename, in which order, and what a failure leaves."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation

MUTATIONS = (
    Mutation(
        "seal-no-data-sync",
        "sync of a slot's files before its manifest",
        (
            Edit(
                "offload/store/sealing.py",
                """\
                slot.sync()
""",
                "",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "seal-no-manifest-sync",
        "sync of the manifest before the rename",
        (
            Edit(
                "offload/store/sealing.py",
                """\
                slot.manifest.sync()
""",
                "",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "seal-no-slot-dir-sync",
        "sync of a slot's names before the rename",
        (
            Edit(
                "offload/store/sealing.py",
                """\
                slot.folder.sync_names()
""",
                "",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "seal-manifest-before-data",
        "order: the manifest is written when the data is durable",
        (
            Edit(
                "offload/store/sealing.py",
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
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "seal-rename-before-syncs",
        "order: the rename comes last",
        (
            Edit(
                "offload/store/sealing.py",
                """\
                slot.sync()
                slot.manifest.write_bytes(encoded, 0)
                slot.manifest.sync()
                slot.folder.sync_names()
""",
                """\
                slot.manifest.write_bytes(encoded, 0)
""",
            ),
            Edit(
                "offload/store/sealing.py",
                """\
                    self._rename_into_place(slot, path, exchange=in_the_way)
""",
                """\
                    self._rename_into_place(slot, path, exchange=in_the_way)
                    slot.sync()
                    slot.manifest.sync()
                    slot.folder.sync_names()
""",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "seal-no-store-sync",
        "sync of the store after the rename: the commit",
        (
            Edit(
                "offload/store/sealing.py",
                """\
            slot.folder.renamed(path)
            self._backend.sync_dir(self._directory)
            slot.published()
""",
                """\
            slot.folder.renamed(path)
            slot.published()
""",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "exchange-no-store-sync",
        "sync of the store after two names have been exchanged",
        (
            Edit(
                "offload/store/sealing.py",
                """\
            old.path = working
        self._backend.sync_dir(self._directory)
""",
                """\
            old.path = working
""",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "seal-failed-sync-forgotten",
        "poison after a sync or rename of a seal has failed",
        (
            Edit(
                "offload/store/sealing.py",
                """\
with self._poison.fatal(_NOT_DURABLE):
                slot.sync()
""",
                """\
if True:
                slot.sync()
""",
            ),
            Edit(
                "offload/store/sealing.py",
                """\
with leaving, self._poison.fatal(_NOT_DURABLE):
                    in_the_way""",
                """\
with leaving:
                    in_the_way""",
            ),
        ),
        ("tests/crash/test_io_errors.py",),
    ),
    Mutation(
        "seal-model-not-synced",
        "sync of model.safetensors",
        (
            Edit(
                "offload/store/slots/folder.py",
                """\
            if name != self._document:
""",
                """\
            if name not in (self._document, "model.safetensors"):
""",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "seal-train-state-not-synced",
        "sync of train_state.safetensors",
        (
            Edit(
                "offload/store/slots/folder.py",
                """\
            if name != self._document:
""",
                """\
            if name not in (self._document, "train_state.safetensors"):
""",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "seal-masters-not-synced",
        "sync of master.safetensors",
        (
            Edit(
                "offload/store/slots/folder.py",
                """\
            if name != self._document:
""",
                """\
            if name not in (self._document, "master.safetensors"):
""",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "train-state-no-sync",
        "sync of a new train state before it takes the old one's name",
        (
            Edit(
                "offload/store/slots/slot.py",
                """\
            file.sync()
            backend.rename(file.path""",
                "            backend.rename(file.path",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "train-state-in-place",
        "atomicity: a train state is replaced by a rename",
        (
            Edit(
                "offload/store/slots/slot.py",
                """\
            backend.rename(file.path, path)
""",
                """\
            files[name] = backend.open(path, writable=True)
            data = file.read_bytes(0, file.size_bytes)
            files[name].write_bytes(data, 0)
            files[name].sync()
            backend.remove(file.path)
""",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "seal-no-wait-for-writes",
        "all writes of the state have ended before anything is synced",
        (
            Edit(
                "offload/engine/seal.py",
                """\
        self._flush.wait()
""",
                "",
            ),
        ),
        ("tests/crash/test_protocol_steps.py",),
    ),
    Mutation(
        "seal-no-flush",
        "state that is only in memory is written",
        (
            Edit(
                "offload/engine/seal.py",
                """\
        self._flush.start(slot)
""",
                "",
            ),
        ),
        ("tests/crash/test_waiting_for_a_seal.py",),
    ),
    Mutation(
        "model-no-wait-for-writes",
        "the last writes of the parameters have ended before the sync",
        (
            Edit(
                "offload/model/model_writing.py",
                """\
        writer.finish_writes()
    finally:
        writer.wait()
""",
                """\
    finally:
        pass
""",
            ),
        ),
        ("tests/crash/test_protocol_steps.py",),
    ),
    Mutation(
        "step-no-wait-for-copy",
        "a step waits until the seal has copied the parameters that it overwrites",
        (
            Edit(
                "offload/stream/passes.py",
                """\
                if seal is not None:
                    seal.wait_copied(self._stops[chunk])
""",
                "",
            ),
        ),
        ("tests/numerics/test_overlap.py", "tests/crash/test_waiting_for_a_seal.py"),
    ),
    Mutation(
        "two-seals-in-flight",
        "a checkpoint waits for the seal before it",
        (
            Edit(
                "offload/engine/engine.py",
                """\
        state.collect_seal(wait=True)
        if not state.slots.is_working:
""",
                """\
        if not state.slots.is_working:
""",
            ),
        ),
        ("tests/crash/test_sealed_behind_training.py", "tests/crash/test_waiting_for_a_seal.py"),
    ),
    Mutation(
        "seal-same-generation",
        "every slot that is written gets a generation of its own",
        (
            Edit(
                "offload/store/slots/supply.py",
                """\
        self._generation += 1
""",
                "",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "failed-durability-trained-on",
        "state that could not be made durable is not trained on",
        (
            Edit(
                "offload/engine/training_state.py",
                """\
            elif self.store.poisoned:
""",
                """\
            elif False:
""",
            ),
        ),
        ("tests/crash/test_protocol_steps.py",),
    ),
    Mutation(
        "slot-read-back-believed",
        "what is read back of a slot is compared with the live bytes",
        (
            Edit(
                "offload/model/model_writing.py",
                "{n for n, leaf in zip(numbers, found, strict=True) if leaf == wanted[n]}",
                "{n for n, leaf in zip(numbers, found, strict=True) if leaf}",
            ),
        ),
        ("tests/numerics/test_frozen.py",),
    ),
    Mutation(
        "seal-no-wait-for-parameters",
        "wait for the writes of parameters by steps before the seal writes edits of them",
        (
            Edit(
                "offload/engine/seal.py",
                """\
        self._flush.wait_parameters()
""",
                "",
            ),
        ),
        ("tests/numerics/test_parameters_on_drive.py",),
    ),
    Mutation(
        "step-parameters-still-known",
        "a leaf of the model file is unknown before a step begins to write some of it",
        (
            Edit(
                "offload/stream/model_part.py",
                """\
            known.note_leaves(first, [None] * (last - first))
""",
                "            pass\n",
            ),
        ),
        ("tests/numerics/test_parameters_on_drive.py",),
    ),
)
