"""Steps by which a rank steps and stores its own boxes of a model, and nothing else."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone

_LAYOUT = "offload/format/layout.py"
_DEALING = "offload/format/shares/dealing.py"
_MATCHING = "offload/engine/matching.py"
_SHARDS = "offload/model/shards.py"
_TABLE = "offload/model/table.py"
_FORWARD = "offload/overlap/forward.py"
_ROWS = "tests/ranks/test_rows.py"
_ONE = "tests/ranks/test_one_rank.py"
_DEALT = "tests/ranks/test_dealing.py"
_SHARDED = "tests/ranks/test_sharded.py"
_OWNERSHIP = "offload/distributed/ownership.py"
_GROUP = "offload/distributed/rank_group.py"
_SEALING = "offload/distributed/rank_sealing.py"
_DIFFER = "tests/ranks_training/test_different_terms.py"
_FROZEN = "tests/ranks_training/test_frozen.py"
_GRANTING = "offload/distributed/rank_granting.py"
_BUFFERS = "tests/ranks_training/test_buffers.py"
_REFUSED = f"{_SHARDED}::test_what_has_no_single_box_is_refused_by_name"
_STATE = f"{_ROWS}::test_the_state_is_that_of_one_process"

RANKS = (
    Mutation(
        "rounding-from-the-box",
        "random numbers of a box are counted from the first element of the whole parameter",
        (
            Edit(
                _LAYOUT,
                "(self.stored_name, 0) if found is None else (self.name, found[0])",
                "(self.stored_name, 0) if found is None else (self.name, 0)",
            ),
        ),
        (_STATE,),
    ),
    Mutation(
        "rounding-of-new-state-from-the-box",
        "random numbers of a piece are counted from the first element of the whole parameter",
        (
            Edit(
                "offload/update/coding/coder.py",
                "        if self._has_cuts:\n"
                "            pieces = [self._in_parameter(piece) for piece in pieces]\n",
                "",
            ),
        ),
        (_STATE,),
    ),
    Mutation(
        "boxes-not-compared",
        "state of other boxes is refused by name",
        (Edit(_MATCHING, "live[name].spec.cut != spec.cut", "not live[name].spec.name"),),
        (f"{_ROWS}::test_other_rows_of_a_parameter_are_refused_by_name",),
    ),
    Mutation(
        "cuts-inside-blocks",
        "rows are only cut at multiples of a block of int8 state",
        (
            Edit(
                _DEALING,
                "math.lcm(math.prod(shapes[index][1:]), multiple)",
                "math.prod(shapes[index][1:])",
            ),
        ),
        (_DEALT,),
    ),
    Mutation(
        "overlaps-owned",
        "boxes that overlap without being equal are refused",
        (
            Edit(
                _DEALING,
                "if common is not None:",
                "if common is not None and common == box == other:",
            ),
        ),
        (_DEALT,),
    ),
    Mutation(
        "gaps-owned",
        "boxes that do not cover their parameter are refused",
        (Edit(_DEALING, "    if found != expected:\n", "    if found > expected:\n"),),
        (_DEALT,),
    ),
    Mutation(
        "gradients-of-others-kept",
        "a step beside forward clears the gradients of parameters that other ranks step",
        (Edit(_FORWARD, "            parameter.grad = None\n\n", "            pass\n\n"),),
        (_ONE,),
    ),
    Mutation(
        "parameters-of-others-new",
        "parameters that other ranks step are known, and are not laid out at every step",
        (Edit(_TABLE, "is_stepped(p) and self.shards is None", "is_stepped(p)"),),
        (f"{_ROWS}::test_ranks_without_elements_count_their_steps",),
    ),
    Mutation(
        "writes-of-others-counted",
        "the new rows of other ranks are no edit during a seal",
        (Edit(_SHARDS, "        return parameter.data\n", "        return parameter.detach()\n"),),
        (f"{_ROWS}::test_an_edit_of_rows_during_a_seal_is_found",),
    ),
    Mutation(
        "local-memory-kept",
        "the local part of a DTensor is taken anew at every use",
        (
            Edit(
                _SHARDS,
                "    def part_of(tensor: torch.Tensor) -> torch.Tensor:\n",
                "    first = owner.to_local()\n\n"
                "    def part_of(tensor: torch.Tensor) -> torch.Tensor:\n",
            ),
            Edit(
                _SHARDS,
                "        part = tensor.to_local()",
                "        part = first if tensor is owner else tensor.to_local()",
            ),
        ),
        (f"{_SHARDED}::test_the_local_part_is_taken_anew_at_every_use",),
    ),
    Mutation(
        "other-gradients-taken",
        "a gradient with other placements than its parameter is refused",
        (Edit(_SHARDS, " or placements != owner.placements", ""),),
        (_REFUSED,),
    ),
    Mutation(
        "several-boxes-taken-for-one",
        "a local part that is several boxes is refused",
        (
            Edit(
                _SHARDS,
                "        if not _is_range(tensor, dim, box):\n",
                "        if dim < 0:\n",
            ),
        ),
        (_REFUSED,),
    ),
    Mutation(
        "empty-shards-stored",
        "a rank stores nothing of a parameter that it has no element of",
        (
            Edit(
                _SHARDS,
                "return cut is not None and not cut.box.num_elements and 0 not in cut.shape",
                "return cut is not None and cut.box.num_elements < 0",
            ),
        ),
        (f"{_ONE}::test_a_parameter_without_elements_here_is_not_stored",),
    ),
    Mutation(
        "kinds-not-compared",
        "ranks with plain parameters are not taken for ranks with shards",
        (
            Edit(
                _OWNERSHIP,
                'trained, "DTensor" if is_dtensor(tensor) else "plain"]',
                'trained, ""]',
            ),
        ),
        (f"{_DIFFER}::test_what_differs_is_named_by_the_constructor_of_all_ranks",),
    ),
    Mutation(
        "terms-not-compared",
        "ranks with other options, groups or versions are refused by the constructor",
        (gone(_GROUP, "            require_same_terms(terms, self._exchange)\n"),),
        (f"{_DIFFER}::test_what_differs_is_named_by_the_constructor_of_all_ranks",),
    ),
    Mutation(
        "model-tables-not-compared",
        "a seal of ranks whose models have other tensors is refused",
        (gone(_SEALING, "            model_digest=_digest_of_model(manifest),\n"),),
        (f"{_DIFFER}::test_a_state_dict_with_another_tensor_on_one_rank_fails_the_seal_on_all",),
    ),
    Mutation(
        "step-counts-not-compared",
        "a seal of shards that were stepped differently is refused",
        (
            gone(
                _SEALING,
                "            require_same_scalars(scalars, "
                "[tensor.name for tensor in manifest.layout.model])\n",
            ),
        ),
        (
            f"{_DIFFER}::test_shards_of_a_parameter_that_one_rank_has_not_stepped_fail_the_seal_on_all",
        ),
    ),
    Mutation(
        "torn-writers-file-believed",
        "nothing is known of the writer's model file after a seal of the others that failed",
        (
            gone(
                _SEALING,
                "            if self._last is not None:\n"
                "                self._last.model_leaves.forget(readable=False)\n",
            ),
        ),
        (
            f"{_FROZEN}::test_what_another_rank_could_not_sync_is_written_anew_after_a_torn_step_of_the_writer",
        ),
    ),
    Mutation(
        "buffers-not-compared",
        "a buffer that differs between ranks is named",
        (gone(_GRANTING, "            self._compare_buffers(granted.notes, call)\n"),),
        (f"{_BUFFERS}::test_a_buffer_that_differs_later_is_found_by_the_next_grant",),
    ),
    Mutation(
        "buffers-named-again-and-again",
        "a buffer that differs between ranks is named once",
        (gone(_GRANTING, "        self._watch.stop()\n"),),
        (f"{_BUFFERS}::test_a_buffer_that_differs_is_named_once_by_the_writer",),
    ),
)
