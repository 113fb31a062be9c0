"""Ranks: parts of owners, shares of the model file, and what all have to agree on."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation

MUTATIONS = (
    Mutation(
        "owner-no-data-sync",
        "sync of the state of a part before its table is written",
        (
            Edit(
                "offload/store/slots/folder.py",
                """\
        self.sync_data()
""",
                "",
            ),
        ),
        ("tests/ranks_store/test_power_cuts.py",),
    ),
    Mutation(
        "owner-no-table-sync",
        "sync of the table of a part",
        (
            Edit(
                "offload/store/slots/folder.py",
                """\
        self.document.write_bytes(document, 0)
        self.document.sync()
""",
                """\
        self.document.write_bytes(document, 0)
""",
            ),
        ),
        ("tests/ranks_store/test_power_cuts.py",),
    ),
    Mutation(
        "owner-no-name-sync",
        "sync of the name of a part",
        (
            Edit(
                "offload/store/slots/folder.py",
                """\
            self.backend.sync_dir(os.path.dirname(self.path))
""",
                "",
            ),
        ),
        ("tests/ranks_store/test_power_cuts.py",),
    ),
    Mutation(
        "owner-ready-stays-valid",
        "a part that is used again is durably invalid before data is written",
        (
            Edit(
                "offload/store/slots/folder.py",
                """\
        folder.invalidate()
        folder.write_headers(layout, drive)
""",
                """\
        folder.write_headers(layout, drive)
""",
            ),
        ),
        ("tests/ranks_store/test_owner_store.py",),
    ),
    Mutation(
        "owner-rewrites-what-is-locked",
        "a part on which somebody holds a lock is not rewritten",
        (
            Edit(
                "offload/store/slots/folder.py",
                """\
    lock = try_lock(backend, path)
    try:
""",
                """\
    lock = backend.lock(path, shared=True)
    try:
""",
            ),
        ),
        ("tests/ranks_store/test_owner_store.py",),
    ),
    Mutation(
        "owner-writes-without-a-lock",
        "a rank holds a shared lock on the part that it writes",
        (
            Edit(
                "offload/store/slots/folder.py",
                """\
            self._lock = self.backend.lock(self.path, shared=True)
""",
                """\
            self._lock = None
""",
            ),
        ),
        ("tests/ranks_store/test_owner_store.py",),
    ),
    Mutation(
        "owner-served-twice",
        "the lock of the rank that serves an owner",
        (
            Edit(
                "offload/store/owner_store.py",
                """\
                self._lock.take(backend, self.path)
""",
                """\
                pass
""",
            ),
        ),
        ("tests/ranks_store/test_owner_store.py",),
    ),
    Mutation(
        "owner-failed-sync-forgotten",
        "poison after a part could not be made durable",
        (
            Edit(
                "offload/store/owner_store.py",
                """\
            with self._poison.fatal(_NOT_DURABLE):
""",
                """\
            if True:
""",
            ),
        ),
        ("tests/ranks_store/test_owner_store.py",),
    ),
    Mutation(
        "owner-freed-before-withdrawal",
        "the parts of a checkpoint are free only when its withdrawal is durable",
        (
            Edit(
                "offload/store/claims.py",
                """\
        self._leaving.append(manifest)
        yield
        self._leaving.remove(manifest)
""",
                """\
        yield
""",
            ),
        ),
        ("tests/ranks_store/test_owner_store.py",),
    ),
    Mutation(
        "owner-any-part-accepted",
        "a part is the one that was sealed with the checkpoint",
        (
            Edit(
                "offload/checkpoint/owner_parts.py",
                """\
    if header.digest == reference.digest:
""",
                """\
    if True:
""",
            ),
        ),
        ("tests/ranks_store/test_owner_readers.py",),
    ),
    Mutation(
        "owner-seals-without-agreement",
        "every owner has reported a part of the same generation",
        (
            Edit(
                "offload/store/sealing.py",
                """\
        _require_agreement(owners, expected, slot.context.generation)
""",
                "",
            ),
        ),
        ("tests/ranks_store/test_owner_store.py",),
    ),
    Mutation(
        "shard-no-folder-sync",
        "sync of the name of a shard file before the manifest names its part",
        (
            Edit(
                "offload/store/slots/folder.py",
                """\
            self.backend.sync_dir(f"{self.path}/{SHARD_FOLDER}")
""",
                """\
            pass
""",
            ),
        ),
        ("tests/ranks_store/test_power_cuts.py",),
    ),
    Mutation(
        "shard-not-verified",
        "the shard files of other owners than the first are verified",
        (
            Edit(
                "offload/checkpoint/sealed_slot.py",
                """\
        yield from self.model_ranges()
""",
                """\
        if isinstance(self._sealed, Manifest):
            yield from self.model_ranges()
""",
            ),
        ),
        ("tests/ranks_store/test_owner_readers.py",),
    ),
    Mutation(
        "share-no-sync",
        "each rank syncs what it has written",
        (
            Edit(
                "offload/model/model_sharing.py",
                """\
    file.sync()
""",
                "",
            ),
        ),
        ("tests/ranks_model/test_writing.py",),
    ),
    Mutation(
        "share-sync-before-edges",
        "order: the sync comes after the edges",
        (
            Edit(
                "offload/model/model_sharing.py",
                """\
    for offset, data in written.edges:
        file.write_bytes(data, offset)
    file.sync()
""",
                """\
    file.sync()
    for offset, data in written.edges:
        file.write_bytes(data, offset)
""",
            ),
        ),
        ("tests/ranks_model/test_writing.py",),
    ),
    Mutation(
        "share-read-unchecked",
        "what a rank reads is compared with its digest",
        (
            Edit(
                "offload/model/model_reading.py",
                """\
                        data, leaves = checked(work.stored.file, one, data, context)
""",
                """\
                        leaves = b""
""",
            ),
        ),
        ("tests/ranks_model/test_reading.py",),
    ),
    Mutation(
        "gather-before-the-seal-has-copied",
        "values are written only after a seal has copied the old ones",
        (
            Edit(
                "offload/distributed/gathering/gather.py",
                """\
        if self._before_write is not None:
""",
                """\
        if False:
""",
            ),
        ),
        ("tests/ranks_gather/test_gathering.py",),
    ),
    Mutation(
        "gather-failed-rank-leaves",
        "a rank that fails takes part in the remaining broadcasts",
        (
            Edit(
                "offload/distributed/gathering/gather.py",
                """\
        found = self._end()
        if found is None or""",
                """\
        found = None
        if found is None or""",
            ),
        ),
        ("tests/ranks_gather/test_gathering.py",),
    ),
    Mutation(
        "agree-no-steps",
        "all ranks take the same step",
        (
            Edit(
                "offload/distributed/gathering/step_agreement.py",
                """\
        if len({*steps}) > 1:
""",
                """\
        if False:
""",
            ),
        ),
        ("tests/ranks_gather/test_step_agreement.py",),
    ),
    Mutation(
        "arriving-parts-not-locked",
        "parts that arrive are locked before a slot is taken, which removes unnamed parts",
        (
            Edit(
                "offload/tiers/download.py",
                """\
            part.store = self._owner_store(part, served)
        if""",
                """\
            pass
        if""",
            ),
            Edit(
                "offload/tiers/download.py",
                """\
        for part in self._parts:
            if part.store is not None:
                named""",
                """\
        for part in self._parts:
            part.store = self._owner_store(part, served)
            if part.store is not None:
                named""",
            ),
        ),
        ("tests/tiers/test_ranks_restore.py",),
    ),
    Mutation(
        "arriving-step-early",
        "a step waits until the state of all ranks has arrived",
        (
            Edit(
                "offload/engine/engine.py",
                """\
        self.finish_arrival()
        self.strategy.step(groups)
""",
                """\
        self.strategy.step(groups)
""",
            ),
        ),
        ("tests/tiers/test_ranks_restore.py",),
    ),
)
