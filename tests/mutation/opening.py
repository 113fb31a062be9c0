"""Steps of opening a store: what is made durable, locked and checked before it is trusted."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone, killed, power

_READER_OPENING = "offload/checkpoint/opening.py"
_SUPPLY = "offload/store/slots/supply.py"
_EXPIRY = "offload/store/expiry.py"
_STORE = "offload/store/store.py"
_OPENING = "offload/store/opening.py"
_NEW_PLACES = "offload/store/new_directories.py"
_LOCK = "offload/store/writer_lock.py"
_IDENTITY = "offload/store/store_id.py"
_READING = "offload/checkpoint/reading.py"
_FILE_CHECK = "offload/checkpoint/file_check.py"
_DOCUMENT = "offload/format/document.py"
_READER_LOCK = "offload/checkpoint/reader_lock.py"
_STEPS = "tests/crash/test_protocol_steps.py"
_CONCURRENCY = "tests/crash/test_concurrency.py"
_DRIVES = "tests/crash/test_drives.py"
_DAMAGE = "tests/torch_contract/test_damaged_checkpoints.py::TestDamage"
_LOST = "tests/crash/test_lost_writes.py"
_STARTED_OVER = power("started-over-keep=1", "started-over-keep=2")

OPENING = (
    Mutation(
        "open-no-store-sync",
        "sync of the store before anything in it is trusted",
        (gone(_OPENING, "        drives[0][0].sync_dir(drives[0][1])\n"),),
        killed("three-checkpoints-keep=1", "three-checkpoints-keep=2"),
    ),
    Mutation(
        "open-no-checkpoint-sync",
        "sync of a checkpoint's directory before it is trusted",
        (
            gone(
                _OPENING,
                "            backend.sync_dir(path)"
                "  # a process may have died after it replaced the train state\n",
            ),
        ),
        killed("replaced-train-state-keep=1", "replaced-train-state-keep=2"),
    ),
    Mutation(
        "open-no-parent-sync",
        "sync of the directory in which the store's is made",
        (
            gone(
                _NEW_PLACES,
                "        backend.sync_dir(os.path.dirname(new))\n",
            ),
        ),
        power("three-checkpoints-keep=1"),
    ),
    Mutation(
        "open-no-existing-parent-sync",
        "sync of the directory in which an earlier process may have made the store's",
        (Edit(_NEW_PLACES, "        backend.sync_dir(os.path.dirname(path))\n", "        pass\n"),),
        (f"{_STEPS}::test_a_store_whose_maker_was_killed_is_durable_when_a_checkpoint_is",),
    ),
    Mutation(
        "open-shared-lock",
        "one writer at a time",
        (
            Edit(
                _LOCK,
                'of_file = backend.lock(f"{directory}/{LOCK_NAME}", create=True)',
                'of_file = backend.lock(f"{directory}/{LOCK_NAME}", shared=True, create=True)',
            ),
            Edit(
                _LOCK,
                'of_directory = backend.lock(f"{directory}/.")',
                'of_directory = backend.lock(f"{directory}/.", shared=True)',
            ),
        ),
        (f"{_CONCURRENCY}::TestProcesses::test_a_second_optimizer_is_refused",),
    ),
    Mutation(
        "open-locks-first-only",
        "one writer at a time on every drive",
        (
            Edit(
                _OPENING,
                "        for backend, directory in drives:\n",
                "        for backend, directory in drives[:1]:\n",
            ),
        ),
        (f"{_DRIVES}::TestSharedDirectory",),
    ),
    Mutation(
        "open-files-not-checked",
        "a checkpoint whose files are not those of its manifest is refused",
        (
            gone(
                _OPENING,
                "            known.check_files(backend, path, manifest, other_directories)\n",
            ),
        ),
        (_DAMAGE, f"{_DRIVES}::TestDamage"),
    ),
    Mutation(
        "open-name-not-checked",
        "a directory is named for the step that its manifest is of",
        (gone(_OPENING, "            check_name(path, manifest)\n"),),
        (_LOST,),
    ),
    Mutation(
        "open-number-of-directories",
        "a store is opened with as many directories as it has",
        (
            gone(
                _OPENING,
                "            require_number_of_directories(manifest, directory, len(drives))\n",
            ),
        ),
        (f"{_DRIVES}::TestDirectories",),
    ),
    Mutation(
        "open-by-step",
        "order: the newest checkpoint is that of the highest generation",
        (
            Edit(
                _EXPIRY,
                "key=lambda c: c.manifest.generation, default=None)",
                "key=lambda c: c.manifest.step, default=None)",
            ),
        ),
        (f"{_CONCURRENCY}::TestReaders",),
    ),
    Mutation(
        "expire-by-step",
        "order: the oldest checkpoint is that of the lowest generation",
        (
            Edit(
                _OPENING,
                "checkpoints.sort(key=lambda checkpoint: checkpoint.manifest.generation)",
                "checkpoints.sort(key=lambda checkpoint: checkpoint.manifest.step)",
            ),
        ),
        (f"{_CONCURRENCY}::TestReaders",),
    ),
    Mutation(
        "read-by-step",
        "order: a reader's newest checkpoint is that of the highest generation",
        (
            Edit(
                _READER_OPENING,
                "(generation, checkpoint))",
                "(manifest.step, checkpoint))",
            ),
        ),
        (*_STARTED_OVER, f"{_CONCURRENCY}::TestReaders"),
    ),
    Mutation(
        "fresh-forgets-to-give-up",
        "what fresh=True gives up is not the newest any more",
        (
            Edit(
                _STORE,
                "            checkpoint.superseded = fresh\n",
                "            checkpoint.superseded = False\n",
            ),
        ),
        (f"{_STEPS}::test_a_history_that_was_given_up_is_gone_when_the_new_one_is_durable",),
    ),
    Mutation(
        "unreadable-claims-nothing",
        "a directory that cannot be read may own any part",
        (gone(_OPENING, "        claims[path] = None\n"),),
        (f"{_DRIVES}::TestUnreadableManifest",),
    ),
    Mutation(
        "identity-not-written",
        "a store on several drives is named before a part of it is written",
        (
            gone(
                _SUPPLY,
                "            write_store_id("
                "self._backend, self._directory, identity, self._poison)\n",
            ),
        ),
        (f"{_DRIVES}::TestOrder",),
    ),
    Mutation(
        "identity-no-sync",
        "sync of store.json",
        (Edit(_IDENTITY, "            file.sync()\n            backend", "            backend"),),
        (f"{_DRIVES}::TestOrder",),
    ),
    Mutation(
        "identity-no-dir-sync",
        "sync of the name of store.json",
        (gone(_IDENTITY, "            backend.sync_dir(directory)\n"),),
        (f"{_DRIVES}::TestOrder",),
    ),
    Mutation(
        "identity-found-not-synced",
        "sync of a store.json that an earlier process may not have synced",
        (gone(_IDENTITY, "        if durable:\n            file.sync()\n"),),
        (f"{_DRIVES}::TestOrder",),
    ),
    Mutation(
        "identity-failed-sync-forgotten",
        "poison after a store could not be named",
        (
            Edit(
                _IDENTITY,
                '        with poison.fatal("a store\'s identity could not be made durable"):\n',
                "        if poison is not None:\n",
            ),
        ),
        (f"{_STEPS}::test_a_store_that_could_not_be_named_reuses_nothing",),
    ),
    Mutation(
        "header-not-compared",
        "the header of every tensor file is that of the manifest",
        (
            Edit(
                _FILE_CHECK,
                "    if found == expected.encoded:\n        return\n",
                "    if found or not found:\n        return\n",
            ),
        ),
        (_DAMAGE,),
    ),
    Mutation(
        "size-not-checked",
        "every tensor file has the size that the manifest asks for",
        (
            Edit(
                _FILE_CHECK,
                'if stat.kind != "file" or stat.size_bytes != expected.file_bytes:',
                'if stat.kind != "file":',
            ),
        ),
        (_DAMAGE,),
    ),
    Mutation(
        "manifest-digest-not-checked",
        "a manifest is what its digest says",
        (
            Edit(
                _DOCUMENT,
                'if not isinstance(body, dict) or document.get("digest") != _digest_or_none(body):',
                "if not isinstance(body, dict):",
            ),
        ),
        (_DAMAGE, _LOST),
    ),
    Mutation(
        "part-of-another-generation",
        "a part is the one that was sealed with the checkpoint",
        (Edit(_READING, "    if found.digest != reference.digest:\n", "    if False:\n"),),
        (f"{_DRIVES}::TestDamage",),
    ),
    Mutation(
        "part-digest-not-checked",
        "what a part says of itself is what its digest says",
        (
            Edit(
                _DOCUMENT,
                'if not isinstance(body, dict) or document.get("digest") != _digest_or_none(body):',
                "if not isinstance(body, dict):",
            ),
        ),
        (f"{_DRIVES}::TestDamage",),
    ),
    Mutation(
        "part-files-not-checked",
        "the files of a part have the headers of the manifest",
        (
            Edit(
                _READING,
                "    for name, header in manifest.layout.array_headers[drive].items():\n",
                "    for name, header in {}.items():\n",
            ),
        ),
        (f"{_DRIVES}::TestDamage",),
    ),
    Mutation(
        "train-state-of-another",
        "a train state belongs to its checkpoint",
        (
            Edit(
                "offload/checkpoint/train_state_reading.py",
                "    if dict(header) != train_state_header(manifest):\n",
                "    if False:\n",
            ),
        ),
        (_DAMAGE, _LOST),
    ),
    Mutation(
        "read-what-is-recycled",
        "a reader makes sure that the name is still that of what it has locked",
        (
            Edit(
                _READER_LOCK,
                "        if after is None or after.inode != before.inode:\n",
                "        if False:\n",
            ),
        ),
        (f"{_CONCURRENCY}::TestReaders",),
    ),
    Mutation(
        "read-without-lock",
        "a reader keeps what it reads from being recycled",
        (
            Edit(
                _READER_OPENING,
                "        lock = lock_for_reading(backend, found)\n",
                "        from contextlib import ExitStack\n"
                "        lock = ExitStack()\n"
                "        lock.release = lock.close\n",
            ),
        ),
        (f"{_CONCURRENCY}::TestReaders",),
    ),
    Mutation(
        "volatile-accepted",
        "a store in memory is refused",
        (
            Edit(
                _NEW_PLACES,
                "        if capabilities.volatile and not allow_volatile:\n",
                "        if False:\n",
            ),
        ),
        ("tests/torch_contract/test_unusable_directories.py::TestDirectories::test_in_memory",),
    ),
)
