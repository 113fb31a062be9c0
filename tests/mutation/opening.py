"""Opening, reading and restoring: locks, digests, and what is not believed."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation

MUTATIONS = (
    Mutation(
        "open-no-store-sync",
        "sync of the store before anything in it is trusted",
        (
            Edit(
                "offload/store/opening.py",
                """\
        drives[0][0].sync_dir(drives[0][1])
""",
                "",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "open-no-checkpoint-sync",
        "sync of a checkpoint's directory before it is trusted",
        (
            Edit(
                "offload/store/opening.py",
                """\
            backend.sync_dir(path)  # a process may have died after it replaced the train state
""",
                "",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "open-no-parent-sync",
        "sync of the directory in which the store's is made",
        (
            Edit(
                "offload/store/directories.py",
                """\
        backend.sync_dir(os.path.dirname(new))
""",
                "",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "open-shared-lock",
        "one writer at a time",
        (
            Edit(
                "offload/store/writer_lock.py",
                'of_file = backend.lock(f"{directory}/{LOCK_NAME}", create=True)',
                'of_file = backend.lock(f"{directory}/{LOCK_NAME}", shared=True, create=True)',
            ),
            Edit(
                "offload/store/writer_lock.py",
                'of_directory = backend.lock(f"{directory}/.")',
                'of_directory = backend.lock(f"{directory}/.", shared=True)',
            ),
        ),
        ("tests/crash/test_concurrency.py",),
    ),
    Mutation(
        "open-locks-first-only",
        "one writer at a time on every drive",
        (
            Edit(
                "offload/store/opening.py",
                """\
        for backend, directory in drives:
""",
                """\
        for backend, directory in drives[:1]:
""",
            ),
        ),
        ("tests/crash/test_drives.py",),
    ),
    Mutation(
        "open-by-step",
        "order: the newest checkpoint is that of the highest generation",
        (
            Edit(
                "offload/store/expiry.py",
                "key=lambda c: c.manifest.generation, default=None)",
                "key=lambda c: c.manifest.step, default=None)",
            ),
        ),
        ("tests/crash/test_concurrency.py",),
    ),
    Mutation(
        "identity-no-sync",
        "sync of store.json",
        (
            Edit(
                "offload/store/store_id.py",
                """\
            file.sync()
            backend""",
                "            backend",
            ),
        ),
        (
            "tests/crash/test_drives.py",
            "tests/crash/test_parts.py",
            "tests/crash/test_crash_points.py",
        ),
    ),
    Mutation(
        "size-not-checked",
        "every tensor file has the size that the manifest asks for",
        (
            Edit(
                "offload/checkpoint/file_check.py",
                'if stat.kind != "file" or stat.size_bytes != expected.file_bytes:',
                'if stat.kind != "file":',
            ),
        ),
        ("tests/torch_contract/test_damaged_checkpoints.py",),
    ),
    Mutation(
        "manifest-digest-not-checked",
        "a manifest is what its digest says",
        (
            Edit(
                "offload/format/document.py",
                'if not isinstance(body, dict) or document.get("digest") != _digest_or_none(body):',
                "if not isinstance(body, dict):",
            ),
        ),
        ("tests/torch_contract/test_damaged_checkpoints.py", "tests/crash/test_flipped_bits.py"),
    ),
    Mutation(
        "part-digest-not-checked",
        "what a part says of itself is what its digest says",
        (
            Edit(
                "offload/format/document.py",
                'if not isinstance(body, dict) or document.get("digest") != _digest_or_none(body):',
                "if not isinstance(body, dict):",
            ),
        ),
        ("tests/crash/test_drives.py",),
    ),
    Mutation(
        "read-without-lock",
        "a reader keeps what it reads from being recycled",
        (
            Edit(
                "offload/checkpoint/opening.py",
                """\
        lock = lock_for_reading(backend, found)
""",
                """\
        from contextlib import ExitStack
        lock = ExitStack()
        lock.release = lock.close
""",
            ),
        ),
        ("tests/crash/test_concurrency.py",),
    ),
    Mutation(
        "read-what-is-recycled",
        "a reader makes sure that the name is still that of what it has locked",
        (
            Edit(
                "offload/checkpoint/reader_lock.py",
                """\
        if after is None or after.inode != before.inode:
""",
                """\
        if False:
""",
            ),
        ),
        ("tests/crash/test_readers_meanwhile.py",),
    ),
    Mutation(
        "lock-not-looked-at-before-the-commit",
        "the lock is looked at again just before the rename that commits",
        (
            Edit(
                "offload/store/sealing.py",
                """\
                self._lock.require()
""",
                "",
            ),
        ),
        ("tests/crash/test_writer_lock.py",),
    ),
    Mutation(
        "error-counts-as-damage",
        "what could not be read stops the opening of a store",
        (
            Edit(
                "offload/store/opening.py",
                """\
        except CheckpointError as error:
""",
                """\
        except (CheckpointError, OSError) as error:
""",
            ),
        ),
        ("tests/crash/test_environment_errors.py",),
    ),
    Mutation(
        "restore-first-block-only",
        "every block of the model file is compared with its digest",
        (
            Edit(
                "offload/model/model_reading.py",
                """\
                        data, leaves = checked(work.stored.file, one, data, context)
""",
                """\
                        if not number:
                            data, _ = checked(work.stored.file, one, data, context)
                        leaves = b""
""",
            ),
        ),
        ("tests/crash/test_protocol_steps.py",),
    ),
    Mutation(
        "restore-parameters-unchecked",
        "parameters are compared with their digests when they are restored",
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
        ("tests/torch_contract/test_damaged_checkpoints.py", "tests/crash/test_flipped_bits.py"),
    ),
    Mutation(
        "first-pass-unchecked",
        "state is compared with its digests in the first step after a restore",
        (
            Edit(
                "offload/stream/streamer.py",
                """\
check_read(frame, source)
""",
                """\
pass
""",
            ),
        ),
        ("tests/crash/test_quarantine.py",),
    ),
    Mutation(
        "restore-half-way-goes-on",
        "a restore that failed half way leaves an optimizer that refuses to go on",
        (
            Edit(
                "offload/engine/resume.py",
                """\
        lifecycle.broken = f"restoring {found.path} failed half way"
""",
                "",
            ),
        ),
        ("tests/torch_contract/test_damaged_checkpoints.py", "tests/crash/test_io_errors.py"),
    ),
    Mutation(
        "going-back-before-reading",
        "order: newer checkpoints are withdrawn when the older one has proved readable",
        (
            Edit(
                "offload/engine/resume.py",
                """\
            ranks.together("restore()", partial(store.withdraw_newer, found))
""",
                "",
            ),
            Edit(
                "offload/engine/resume.py",
                """\
        lifecycle.broken = f"restoring {found.path} failed half way"
""",
                """\
        lifecycle.broken = f"restoring {found.path} failed half way"
        store.withdraw_newer(found)
""",
            ),
        ),
        ("tests/torch_contract/test_refused_restores.py",),
    ),
    Mutation(
        "torn-step-goes-on",
        "a step that failed half way leaves an optimizer that refuses to go on",
        (
            Edit(
                "offload/engine/stepping.py",
                """\
    state.lifecycle.broken = f"step {state_pass.step} failed half way ({error!r})"
""",
                "",
            ),
        ),
        ("tests/crash/test_io_errors.py",),
    ),
    Mutation(
        "quarantine-no-sync",
        "sync of the file that marks a checkpoint",
        (
            Edit(
                "offload/store/quarantine.py",
                """\
                with poison.fatal(_NOT_MARKED):
                    file.sync()
""",
                "",
            ),
        ),
        ("tests/crash/test_quarantine.py",),
    ),
    Mutation(
        "quarantine-no-dir-sync",
        "sync of the name of the file that marks a checkpoint",
        (
            Edit(
                "offload/store/quarantine.py",
                """\
    with poison.fatal(_NOT_MARKED):
        backend.sync_dir(path)
""",
                "",
            ),
        ),
        ("tests/crash/test_quarantine.py",),
    ),
)
