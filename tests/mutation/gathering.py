"""Steps that bring new values from the rank that updated them to all others."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone

_PLAN = "offload/distributed/gathering/gather_plan.py"
_GATHER = "offload/distributed/gathering/gather.py"
_AGREEMENT = "offload/distributed/gathering/step_agreement.py"
_GROUPS = "offload/distributed/gathering/holder_groups.py"
_ARITHMETIC = "tests/ranks_gather/test_plan.py"
_PROCESSES = "tests/ranks_gather/test_gathering.py"
_AGREED = "tests/ranks_gather/test_step_agreement.py"

GATHERING = (
    Mutation(
        "gather-alone",
        "a box with one holder causes no traffic",
        (Edit(_PLAN, "        if len(ranks) > 1:\n", "        if ranks:\n"),),
        (_ARITHMETIC,),
    ),
    Mutation(
        "gather-no-order-of-groups",
        "all ranks issue broadcasts in one order, round by round",
        (Edit(_PLAN, "(item[0], item[1], item[2].holders, item[2].owner)", "item[2].owner"),),
        (_ARITHMETIC,),
    ),
    Mutation(
        "gather-late-boxes-early",
        "values of a parameter that is not contiguous are sent when it is whole",
        (Edit(_PLAN, "            if piece.key in late:\n", "            if False:\n"),),
        (_ARITHMETIC, _PROCESSES),
    ),
    Mutation(
        "gather-no-slices",
        "a broadcast has at most the bytes of a slot",
        (Edit(_PLAN, "nbytes > room or packed[0]", "packed[0]"),),
        (_ARITHMETIC,),
    ),
    Mutation(
        "gather-before-the-seal-has-copied",
        "values are written only after a seal has copied the old ones",
        (
            Edit(
                _GATHER,
                "        if self._before_write is not None:\n",
                "        if False:\n",
            ),
        ),
        (_PROCESSES,),
    ),
    Mutation(
        "gather-direct-before-the-seal-has-copied",
        "values that arrive in live memory directly wait for the seal, too",
        (
            Edit(
                _GATHER,
                "                if transfer.owner != self._rank:\n"
                "                    self._begin_write(piece)\n",
                "",
            ),
        ),
        (_PROCESSES,),
    ),
    Mutation(
        "gather-same-version",
        "a tensor that is written has another version",
        (Edit(_GATHER, "            if not memory.is_inference():\n", "            if False:\n"),),
        (_PROCESSES,),
    ),
    Mutation(
        "gather-a-version-for-each-piece",
        "the version of a tensor changes once in a step",
        (gone(_GATHER, "            self._written.add(piece.name)\n"),),
        (_PROCESSES,),
    ),
    Mutation(
        "gather-failed-rank-leaves",
        "a rank that fails takes part in the remaining broadcasts",
        (
            Edit(
                _GATHER,
                "        found = self._end()\n        if found is None or",
                "        found = None\n        if found is None or",
            ),
        ),
        (_PROCESSES,),
    ),
    Mutation(
        "gather-failure-not-told",
        "a rank tells the others that it has failed",
        (Edit(_GATHER, "share_bytes(_cause(self._error), ", 'share_bytes(b"", '),),
        (_PROCESSES,),
    ),
    Mutation(
        "gather-lost-slots",
        "slots are given back when their values have arrived",
        (Edit(_GATHER, "            self._buffer.give(oldest.slot)\n", "            pass\n"),),
        (_PROCESSES,),
    ),
    Mutation(
        "gather-sends-again",
        "a chunk that comes after its values were sent is an error",
        (Edit(_GATHER, "        if number < self._num_rounds_begun:\n", "        if False:\n"),),
        (_PROCESSES,),
    ),
    Mutation(
        "gather-unlimited-wait",
        "a rank waits for another one no longer than the limit",
        (
            Edit(
                _GROUPS,
                "        limit = timedelta(seconds=timeout_s)\n",
                "        limit = timedelta(seconds=1800)\n",
            ),
        ),
        (_PROCESSES,),
    ),
    Mutation(
        "agree-no-steps",
        "all ranks take the same step",
        (Edit(_AGREEMENT, "        if len({*steps}) > 1:\n", "        if False:\n"),),
        (_AGREED,),
    ),
    Mutation(
        "agree-no-gradients",
        "all ranks step the same parameters",
        (Edit(_AGREEMENT, "        if len({*digests}) > 1:\n", "        if False:\n"),),
        (_AGREED,),
    ),
    Mutation(
        "agree-old-orders",
        "ranks learn an order of chunks that has changed",
        (Edit(_AGREEMENT, "        if orders != self._known:\n", "        if not self._known:\n"),),
        (_AGREED,),
    ),
    Mutation(
        "agree-no-refusals",
        "a rank that cannot take a step stops all",
        (Edit(_AGREEMENT, "        if any(refuses):\n", "        if False:\n"),),
        (_AGREED,),
    ),
    Mutation(
        "agree-own-inf",
        "all ranks skip a step that one of them must skip",
        (
            Edit(
                _AGREEMENT,
                "any(value for (value,) in flags)",
                "bool(mine)",
            ),
        ),
        (_AGREED,),
    ),
)
