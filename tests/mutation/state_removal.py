"""State that checkpoints give up: when it may go, and what is left of an interruption."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation

_FILE = "offload/store/state_removal.py"

MUTATIONS = (
    Mutation(
        "state-goes-first",
        "no file of state leaves before the manifest without state is durable",
        (
            Edit(
                _FILE,
                """\
            slot.replace(MANIFEST_NAME, manifest)
            for part in slot.parts:
""",
                """\
            for part in slot.parts:
""",
            ),
            Edit(
                _FILE,
                """\
            checkpoint.known_ids = ids_at(""",
                """\
            slot.replace(MANIFEST_NAME, manifest)
            checkpoint.known_ids = ids_at(""",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "manifest-without-state-not-synced",
        "sync of the manifest without state, and of its name",
        (
            Edit(
                _FILE,
                """\
            slot.replace(MANIFEST_NAME, manifest)
            for part in slot.parts:
""",
                """\
            manifest.close()
            self._backend.rename(manifest.path, f"{slot.path}/{MANIFEST_NAME}")
            for part in slot.parts:
""",
            ),
        ),
        ("tests/crash/test_crash_points.py",),
    ),
    Mutation(
        "state-goes-under-a-reader",
        "a checkpoint that is read keeps its state",
        (Edit(_FILE, "if not is_locked or not self", "if not self"),),
        ("tests/torch_contract/test_parameters_only.py",),
    ),
    Mutation(
        "state-left-behind",
        "the next process removes what an interruption has left of the state",
        (
            Edit(
                "offload/store/store.py",
                """\
            with self._changed, suppress(StorageError):  # it only takes space
                self._withdrawal.remove_dropped()
""",
                "",
            ),
        ),
        ("tests/torch_contract/test_parameters_only.py",),
    ),
)
