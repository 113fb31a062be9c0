"""Slots, parts and pins: what is invalid before it is rewritten, and what is kept."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation

MUTATIONS = (
    Mutation(
        "withdraw-in-use",
        "a checkpoint that is read is passed over",
        (
            Edit(
                "offload/store/withdrawal.py",
                "lock = try_lock(self._backend, checkpoint.path)",
                "lock = self._backend.lock(checkpoint.path, shared=True)",
            ),
        ),
        ("tests/crash/test_concurrency.py",),
    ),
    Mutation(
        "withdraw-the-last",
        "the newest durable checkpoint stays while its successor is sealed",
        (
            Edit(
                "offload/store/withdrawal.py",
                """\
for c in choose(incoming) if c is not newest]
""",
                """\
for c in choose(incoming)]
""",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "invalid-manifest-not-synced",
        "sync of the invalid manifest before data is written",
        (
            Edit(
                "offload/store/slots/folder.py",
                """\
        self._write_invalid()
        self.document.sync()
""",
                """\
        self._write_invalid()
""",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "parts-stay-valid",
        "what parts say of themselves is overwritten before they are",
        (
            Edit(
                "offload/store/slots/slot.py",
                """\
        for part in self.parts:
            part.invalidate()
""",
                "",
            ),
        ),
        ("tests/crash/test_drives.py", "tests/crash/test_crash_points.py"),
    ),
    Mutation(
        "leftover-slot-stays-valid",
        "a slot that an earlier process left is made invalid before it is rewritten",
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
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "leftover-slot-that-is-read",
        "a slot that somebody still reads, under its former name, is passed over",
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
        ("tests/crash/test_concurrency.py",),
    ),
    Mutation(
        "part-no-data-sync",
        "sync of a part's data before what it says of itself",
        (
            Edit(
                "offload/store/slots/folder.py",
                """\
        self.sync_data()
""",
                "",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "part-sealed-before-data",
        "order: what a part says of itself is written when its data is durable",
        (
            Edit(
                "offload/store/slots/folder.py",
                """\
        self.sync_data()
""",
                "",
            ),
            Edit(
                "offload/store/slots/folder.py",
                """\
        self.document.sync()
        self.sync_names()
""",
                """\
        self.document.sync()
        self.sync_data()
        self.sync_names()
""",
            ),
        ),
        ("tests/crash/test_drives.py", "tests/crash/test_crash_points.py"),
    ),
    Mutation(
        "part-no-name-sync",
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
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "parts-sealed-last",
        "order: parts are sealed before the rename that makes them a checkpoint's",
        (
            Edit(
                "offload/store/slots/slot.py",
                """\
        for part, sealed in zip(self.parts, self._sealed_parts(), strict=True):
            part.seal(sealed.encode())
""",
                "",
            ),
            Edit(
                "offload/store/sealing.py",
                """\
                    self._rename_into_place(slot, path, exchange=in_the_way)
""",
                """\
                    self._rename_into_place(slot, path, exchange=in_the_way)
                for part, sealed in zip(slot.parts, slot._sealed_parts()):
                    part.seal(sealed.encode())
""",
            ),
        ),
        ("tests/crash/test_drives.py", "tests/crash/test_crash_points.py"),
    ),
    Mutation(
        "parts-of-checkpoints-not-taken",
        "parts that checkpoints have are not free",
        (
            Edit(
                "offload/store/slots/part_pool.py",
                "self._taken = {part.name for manifest in manifests for part in manifest.parts}",
                "self._taken = set[str]()",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "pin-no-sync",
        "sync of a pin before it takes its name",
        (
            Edit(
                "offload/retention/pins.py",
                """\
            with guard:
                file.sync()
                backend.rename(new, f"{directory}/{pin.name}")
                backend.sync_dir(directory)
                backend.sync_dir(store)
""",
                """\
            with guard:
                backend.rename(new, f"{directory}/{pin.name}")
                backend.sync_dir(directory)
                backend.sync_dir(store)
""",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "pin-no-dir-sync",
        "sync of the name of a pin",
        (
            Edit(
                "offload/retention/pins.py",
                """\
            with guard:
                file.sync()
                backend.rename(new, f"{directory}/{pin.name}")
                backend.sync_dir(directory)
                backend.sync_dir(store)
""",
                """\
            with guard:
                file.sync()
                backend.rename(new, f"{directory}/{pin.name}")
                backend.sync_dir(store)
""",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "pin-removed-first",
        "atomicity: a name is on the old checkpoint until it is on the new one",
        (
            Edit(
                "offload/retention/pins.py",
                """\
            with guard:
                file.sync()
                backend.rename(new, f"{directory}/{pin.name}")
                backend.sync_dir(directory)
                backend.sync_dir(store)
""",
                """\
            with guard:
                file.sync()
                if backend.stat(f"{directory}/{pin.name}") is not None:
                    backend.remove(f"{directory}/{pin.name}")
                backend.rename(new, f"{directory}/{pin.name}")
                backend.sync_dir(directory)
                backend.sync_dir(store)
""",
            ),
        ),
        ("tests/torch_contract/test_pins.py",),
    ),
    Mutation(
        "unpin-no-sync",
        "sync of the removal of a pin",
        (
            Edit(
                "offload/retention/pins.py",
                """\
    with writing(store), guard or nullcontext():
        backend.remove(path)
        backend.sync_dir(f"{store}/{PINS_NAME}")
""",
                """\
    with writing(store), guard or nullcontext():
        backend.remove(path)
""",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "pins-not-counted",
        "a pinned checkpoint does not expire",
        (
            Edit(
                "offload/retention/policy.py",
                "return (pinned | newest).union(",
                "return newest.union(",
            ),
        ),
        ("tests/torch_contract/test_pins.py",),
    ),
    Mutation(
        "pin-without-lock",
        "a checkpoint is locked while it is pinned from outside",
        (
            Edit(
                "offload/store/pinning.py",
                """\
        write_pin(opened.backend, store, pin_of(name, opened.path, opened.manifest))
        return opened.path
""",
                """\
        made = pin_of(name, opened.path, opened.manifest)
    write_pin(opened.backend, store, made)
    return opened.path
""",
            ),
        ),
        ("tests/torch_contract/test_pin_races.py",),
    ),
    Mutation(
        "pin-digest-not-checked",
        "a pin is what its digest says",
        (
            Edit(
                "offload/format/document.py",
                'if not isinstance(body, dict) or document.get("digest") != _digest_or_none(body):',
                "if not isinstance(body, dict):",
            ),
        ),
        ("tests/torch_contract/test_pins.py",),
    ),
    Mutation(
        "unreadable-pin-replaced",
        "nothing is replaced while a pin cannot be read",
        (
            Edit(
                "offload/store/expiry.py",
                """\
        if found.unreadable:
            raise PinError(
                f"{path}: would be replaced""",
                """\
        if False:
            raise PinError(
                f"{path}: would be replaced""",
            ),
        ),
        ("tests/torch_contract/test_pins.py",),
    ),
    Mutation(
        "prune-verify-after",
        "order: what is kept is read before anything is removed",
        (
            Edit(
                "offload/store/pruning.py",
                """\
            if verify:
                _require_whole(storage, opened, given, progress)
            return _prune(storage, opened, others, newest, owners, dry_run=dry_run, verified=verify)
""",
                """\
            report = _prune(
                storage, opened, others, newest, owners, dry_run=dry_run, verified=verify
            )
            if verify:
                _require_whole(storage, opened, given, progress)
            return report
""",
            ),
        ),
        ("tests/cli/test_cli_retention.py",),
    ),
    Mutation(
        "prune-no-store-sync",
        "sync of the store after it was pruned",
        (
            Edit(
                "offload/store/store.py",
                """\
            drop_unfinished(self.backend, self.directory)
            self.backend.sync_dir(self.directory)
""",
                """\
            drop_unfinished(self.backend, self.directory)
""",
            ),
        ),
        ("tests/crash/test_protocol_steps.py",),
    ),
)
