"""Which tests run when: the tiers ``unit`` and ``integration``, and a sample of each campaign.

``make test`` runs the tier ``unit``: every promise, alone and with a few ranks.
``make integration`` runs those that need other programs: training libraries, more ranks, object
stores, faults of the kernel, installations, command lines. CI runs both. pytest runs ``unit`` if it
is called without files, and both tiers of files and folders that it is given; ``--tier`` says
otherwise.

Of the long enumerations below, both tiers run a sample. ``FULL_TESTS=1`` runs all of them, as
``make campaign NAME=...`` does for those of one campaign: `bench/campaign.py`. A test or file that
is named on the command line always runs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

FULL: Final = os.environ.get("FULL_TESTS") == "1"
"""Whether everything runs."""

TIERS: Final = ("unit", "integration", "all")

INTEGRATION: Final = (
    "bench/",
    "blocks/test_libraries.py",
    "blocks/test_on_the_drive.py::test_frozen_parameters_take_no_memory",
    "cli/",
    "device/test_nvrtc.py",
    "exchange/test_import_weights.py::test_a_model_of_transformers_by_the_command_alone",
    "exchange/test_import_weights.py::test_memory_does_not_grow_with_the_number_of_layers",
    "exchange/test_peft.py",
    "install/",
    "integrations/",
    "kernel/",
    "near/",
    "ranks_agreement/test_model.py",
    "ranks_gather/",
    "ranks_store/test_failing_operations.py",
    "ranks_store/test_power_cuts.py",
    "ranks_store/test_restores_by_ranks.py",
    "ranks_training/",
    "tiers/",
    "torch_contract/test_outside_memory.py::test_a_model_of_transformers",
    "torch_contract/test_outside_memory.py::test_building_takes_the_memory_of_one_parameter",
    "torch_contract/test_process_groups.py",
    "update_kernel/test_compressed_state.py",
    "update_kernel/test_other_instructions.py",
    "update_kernel/test_stores_are_the_same.py",
    "update_kernel/test_threads.py",
)
"""Files and folders below `tests` whose tests are of the tier `integration`."""

UNIT: Final = (
    "bench/test_ranks.py::test_the_page_of_all_ratios_has_the_recorded_figures",
    "near/test_cut_connections.py",
    "near/test_hostile_clients.py",
    "near/test_parameters.py",
    "ranks_training/test_ddp.py",
    "ranks_training/test_fsdp2.py",
    "ranks_training/test_different_ranks.py::test_what_differs_is_named_by_the_constructor",
    "ranks_training/test_kills.py::test_a_rank_is_killed",
    "tiers/test_arriving.py",
    "tiers/test_background.py",
    "tiers/test_kills.py",
    "tiers/test_push_pull.py",
)
"""Those of `INTEGRATION` that are of the tier `unit` all the same."""

NEVER: Final = 0
"""The rate of tests of which `make test` runs none."""

ONE_IN: Final = {
    "bench/test_bench.py::test_frozen": NEVER,
    "bench/test_bench.py::test_resume": NEVER,
    "bench/test_bench.py::test_revisions": NEVER,
    "bench/test_ranks.py::test_bytes": NEVER,
    "bench/test_ranks.py::test_campaign_of_kills": NEVER,
    "bench/test_ranks.py::test_step": NEVER,
    "cli/test_demo.py::test_losses_that_differ_after_the_resume_fail_the_demo": NEVER,
    "exchange/test_exchange_memory.py": NEVER,
    "kernel/test_copies.py::test_a_copy_goes_on_and_the_original_is_untouched": 4,
    "kernel/test_system_calls.py::test_a_system_call_fails_or_never_returns": 4,
    "near/test_kills.py": 4,
    "near/test_ranks_killed.py::test_they_resume_one_step_with_its_bits": 4,
    "numerics/test_memory.py": NEVER,
    "ranks_store/test_many_owners.py::"
    "test_one_process_uses_the_state_of_as_many_owners_as_are_allowed": NEVER,
    "ranks_training/test_elastic.py::test_a_run_goes_on_with_the_nodes_that_are_left": NEVER,
    "ranks_training/test_every_operation.py::test_opening": NEVER,
    "ranks_training/test_every_operation.py::test_restoring": 4,
    "ranks_training/test_killed_recuts.py": 2,
    "torch_contract/test_published_optimizers.py::test_its_bits_or_a_refusal": NEVER,
    "tiers/test_kills.py::test_a_killed_pull_offers_nothing_and_goes_on": 24,
    "tiers/test_kills.py::test_a_killed_push_offers_nothing_and_goes_on": 40,
}
"""How many tests of a file below `tests`, or of a function, there are to each that is run."""


def of_another_tier(names: Iterable[str], asked_for: Iterable[str], tier: str | None) -> set[str]:
    """Return the tests that do not belong to a tier.

    Args:
        names: Node ids of all tests that were collected.
        asked_for: Arguments of pytest: files, folders and node ids.
        tier: One of `TIERS`; None for `unit` if nothing narrower than `tests` is asked for, and
            for `all` otherwise.
    """
    if tier is None:
        tier = "unit" if all(Path(one).name == "tests" for one in asked_for) else "all"
    if tier == "all":
        return set()
    return {name for name in names if (tier == "integration") != _is_integration(name)}


def _is_integration(name: str) -> bool:
    name = name.removeprefix("tests/")
    return name.startswith(INTEGRATION) and not name.startswith(UNIT)


def sampled(names: Iterable[str], asked_for: Iterable[str]) -> set[str]:
    """Return the tests that are left for another time.

    Args:
        names: Node ids of all tests that were collected, in order.
        asked_for: Arguments of pytest: files, folders and node ids.
    """
    if FULL:
        return set()
    named = {argument.removeprefix("./") for argument in asked_for}
    seen: Counter[str] = Counter()
    left = set[str]()
    for name in names:
        function = name.partition("[")[0]
        file = name.partition("::")[0]
        keys = (key.removeprefix("tests/") for key in (function, file))
        key = next((key for key in keys if key in ONE_IN), None)
        if key is None or named & {name, function, file}:
            continue
        if ONE_IN[key] == NEVER or seen[key] % ONE_IN[key]:
            left.add(name)
        seen[key] += 1
    return left
