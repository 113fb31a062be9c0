"""Which modules are mutated, and where their tests are: the one place to change when files move.

A module is known by its short name everywhere else (in the names of mutants, in the record, in the
reasons), so that nothing but this table changes when a file moves into a folder.
"""

from __future__ import annotations

from typing import Final

MODULES: Final[dict[str, str]] = {
    # sealing
    "seal": "offload/seal.py",
    "reseal": "offload/reseal.py",
    "store": "offload/store.py",
    "slot": "offload/slot.py",
    "state_slots": "offload/state_slots.py",
    "model_file": "offload/model_file.py",
    "model_writing": "offload/model_writing.py",
    "known_leaves": "offload/known_leaves.py",
    "digests": "offload/digests.py",
    "manifest": "offload/manifest.py",
    "poison": "offload/poison.py",
    # opening
    "opening": "offload/opening.py",
    "places": "offload/places.py",
    "writer_lock": "offload/writer_lock.py",
    "unreadable": "offload/unreadable.py",
    "identity": "offload/identity.py",
    "reading": "offload/reading.py",
    "checkpoint": "offload/checkpoint.py",
    "listing": "offload/listing.py",
    "reader_lock": "offload/reader_lock.py",
    "second_look": "offload/second_look.py",
    "train_state_reading": "offload/train_state_reading.py",
    "verify": "offload/_verify.py",
    # restoring
    "resume": "offload/resume.py",
    "loading": "offload/loading.py",
    "state_check": "offload/state_check.py",
    "giving_up": "offload/giving_up.py",
    "quarantine": "offload/quarantine.py",
    "usable": "offload/usable.py",
    # recycling
    "withdrawal": "offload/withdrawal.py",
    "hard_links": "offload/hard_links.py",
    "free_slots": "offload/free_slots.py",
    "keeping": "offload/keeping.py",
    "retention": "offload/retention.py",
    "pins": "offload/pins.py",
    "pinning": "offload/pinning.py",
    "pruning": "offload/pruning.py",
    "space": "offload/space.py",
    "full_disk": "offload/full_disk.py",
    # parts
    "parts": "offload/parts.py",
    "part_pool": "offload/part_pool.py",
    "part_file": "offload/part_file.py",
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
    "tests/numerics/test_update_threads.py",
    "tests/placement/test_cuda_calls.py",
    "tests/placement/test_device_bench.py",
    "tests/placement/test_rates.py",
)
"""Files in those folders that are left out: they cost time, and run none of the modules."""
