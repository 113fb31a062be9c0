"""Which modules are mutated, and where their tests are: the one place to change when files move.

A module is known by its short name everywhere else (in the names of mutants, in the record, in the
reasons), so that nothing but this table changes when a file moves into a folder.
"""

from __future__ import annotations

from typing import Final

MODULES: Final[dict[str, str]] = {
    # sealing
    "seal": "offload/engine/seal.py",
    "reseal": "offload/engine/reseal.py",
    "store": "offload/store/store.py",
    "sealing": "offload/store/sealing.py",
    "slot_supply": "offload/store/slots/supply.py",
    "slot": "offload/store/slots/slot.py",
    "state_slots": "offload/engine/working_slot.py",
    "model_file": "offload/model/model_file.py",
    "model_writing": "offload/model/model_writing.py",
    "known_leaves": "offload/format/known_leaves.py",
    "digests": "offload/format/digests.py",
    "manifest": "offload/format/manifest.py",
    "document": "offload/format/document.py",
    "poison": "offload/store/poison.py",
    # opening
    "opening": "offload/store/opening.py",
    "places": "offload/store/directories.py",
    "new_places": "offload/store/new_directories.py",
    "store_errors": "offload/store/store_errors.py",
    "writer_lock": "offload/store/writer_lock.py",
    "unreadable": "offload/format/unreadable.py",
    "identity": "offload/store/store_id.py",
    "reading": "offload/checkpoint/reading.py",
    "checkpoint_opening": "offload/checkpoint/opening.py",
    "sealed_slot": "offload/checkpoint/sealed_slot.py",
    "checkpoint": "offload/checkpoint/checkpoint.py",
    "listing": "offload/checkpoint/listing.py",
    "reader_lock": "offload/checkpoint/reader_lock.py",
    "second_look": "offload/checkpoint/second_read.py",
    "train_state_reading": "offload/checkpoint/train_state_reading.py",
    "verify": "offload/checkpoint/verify.py",
    # restoring
    "matching": "offload/engine/matching.py",
    "resume": "offload/engine/resume.py",
    "loading": "offload/model/loading.py",
    "state_check": "offload/stream/state_check.py",
    "giving_up": "offload/store/quarantine_limit.py",
    "quarantine": "offload/store/quarantine.py",
    "usable": "offload/engine/lifecycle.py",
    # recycling
    "withdrawal": "offload/store/withdrawal.py",
    "census": "offload/store/census.py",
    "in_place": "offload/store/file_identity.py",
    "unnamed_parts": "offload/store/maintenance/unnamed_parts.py",
    "free_slots": "offload/store/slots/free.py",
    "keeping": "offload/store/expiry.py",
    "retention": "offload/retention/policy.py",
    "pins": "offload/retention/pins.py",
    "pinning": "offload/store/maintenance/pinning.py",
    "pruning": "offload/store/maintenance/pruning.py",
    "space": "offload/store/space.py",
    "full_disk": "offload/store/full_disk.py",
    # parts
    "parts": "offload/store/slots/part.py",
    "part_pool": "offload/store/slots/part_pool.py",
    "part_file": "offload/format/part_file.py",
}
"""Path within the checkout of each module that is mutated, by its short name."""

TEST_FOLDERS: Final = (
    "tests/format",
    "tests/torch_contract",
    "tests/crash",
    "tests/cli",
    "tests/attacks",
    "tests/numerics",
    "tests/exchange",
    "tests/placement",
    "tests/contract",
    "tests/kernel",
    "tests/ranks_store",
)
"""Where tests may notice a mutant. Others train whole models, or never come near these modules."""

NOT_FOR_MUTANTS: Final = (
    "tests/crash/test_mutations.py",  # of the mutations themselves: reads the sources
    "tests/contract/test_kvikio.py",  # of `gds` alone, and with what they need of a machine
    "tests/contract/test_hybrid.py",
    "tests/contract/test_backends.py",
    "tests/contract/test_posix.py",
    "tests/contract/test_posix_parts.py",
    "tests/contract/test_posix_process.py",
    "tests/contract/test_buffers.py",
    "tests/contract/test_buffer_pool.py",
    "tests/contract/test_probe.py",
    "tests/contract/test_tuning.py",
    "tests/numerics/test_codecs_blocks8.py",  # of arithmetic alone
    "tests/numerics/test_codecs_blocks8_edges.py",
    "tests/numerics/test_codecs_split.py",
    "tests/numerics/test_codecs_stochastic.py",
    "tests/placement/test_cuda_calls.py",
    "tests/placement/test_device_bench.py",
    "tests/placement/test_rates.py",
    "tests/ranks_store/test_many_owners.py",  # of sizes alone
)
"""Files in those folders that are left out: they cost time, and run none of the modules."""
