"""Steps that keep numbers the same: which value counts, how it is rounded, what is matched."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone

_TABLE = "offload/model/table.py"
_LAYOUT = "offload/format/layout.py"
_MANIFEST = "offload/format/manifest.py"
_MATCHING = "offload/engine/matching.py"
_EDITS = "tests/numerics/test_edits_are_read.py"
_OLD = "tests/format/test_old_stores.py"
_PLACES = "tests/format/test_layout.py"
_FREEZING = "tests/numerics/test_freezing.py"
_SHARED = "tests/torch_contract/test_shared_memory.py"
_DICTS = "tests/exchange/test_torch_dicts.py::TestNumberOfSteps"

NUMBERS = (
    Mutation(
        "edits-not-read",
        "readers take the live parameter where it is not what its master rounds to",
        (
            Edit(
                "offload/update/coding/decoder.py",
                "        return torch.where(edited, live.float(), master, out=out)\n",
                "        return out.copy_(master)\n",
            ),
        ),
        (_EDITS,),
    ),
    Mutation(
        "rule-of-a-store-forgotten",
        "a store keeps the rule that its blocks and random numbers are counted by",
        (
            Edit(
                _TABLE,
                "self.layout.counts_from if self.layout else NEW_STORES_COUNT_FROM",
                "NEW_STORES_COUNT_FROM",
            ),
        ),
        (_OLD,),
    ),
    Mutation(
        "version-says-nothing",
        "the version of a manifest says how its store counts",
        (
            Edit(
                _MANIFEST,
                '        return "parameter" if body["state_dtype"] == "float32" else "chunk"\n',
                '        return "parameter"\n',
            ),
        ),
        (_OLD,),
    ),
    Mutation(
        "version-beside-the-digest",
        "a version that was changed does not fit to the body, of which the digest is",
        (
            Edit(
                _MANIFEST,
                '    if body.get("counts_from") != expected:\n',
                "    if False:\n",
            ),
        ),
        ("tests/attacks/test_attacks.py",),
    ),
    Mutation(
        "blocks-cut-by-chunks",
        "no chunk of 8-bit state begins inside of a block",
        (
            Edit(
                _LAYOUT,
                '        return self.state_dtype == "int8" and self.counts_from == "parameter"\n',
                "        return False\n",
            ),
        ),
        (_PLACES,),
    ),
    Mutation(
        "chunk-of-nothing",
        "a chunk that would begin at the end of element space does not exist",
        (
            Edit(
                _LAYOUT,
                "        return num - 1 if num > 1 and self._chunk_start(num - 1) == "
                "self.num_elements else num\n",
                "        return num\n",
            ),
        ),
        (_PLACES,),
    ),
    Mutation(
        "one-key-for-all-parameters",
        "random numbers depend on the parameter's name",
        (
            Edit(
                "offload/format/rounding_keys.py",
                "        start = self._names[runs[:, 0]] + self._start\n",
                "        start = 0 * self._names[runs[:, 0]] + self._start\n",
            ),
        ),
        ("tests/numerics/test_codecs_stochastic.py",),
    ),
    Mutation(
        "codes-under-nan",
        "the codes of a block whose scale is NaN are 0",
        (
            Edit(
                "offload/update/coding/blocks8.py",
                "    codes.masked_fill_(scales.isnan().unsqueeze_(1), 0)\n",
                "    return\n",
            ),
        ),
        ("tests/numerics/test_codecs_blocks8_edges.py",),
    ),
    Mutation(
        "shared-memory-never-found",
        "parameters that share memory are refused",
        (
            gone(
                _TABLE,
                "        self._memory.check([(t.spec.name, t.memory) for t in now_stepped])\n",
            ),
        ),
        (_SHARED,),
    ),
    Mutation(
        "shared-memory-found-at-construction-only",
        "each step looks whether parameters have moved",
        (
            Edit(
                _TABLE,
                "self._memory.is_current([m for t, m in pairs if is_stepped(t.parameter)])",
                "True",
            ),
        ),
        (_SHARED,),
    ),
    Mutation(
        "frozen-gradients-ignored",
        "a frozen parameter with a gradient is stepped",
        (
            Edit(
                "offload/model/parameters.py",
                "    return parameter.requires_grad or parameter.grad is not None\n",
                "    return parameter.requires_grad\n",
            ),
        ),
        (_FREEZING,),
    ),
    Mutation(
        "frozen-gradients-after-backward-ignored",
        "so is one that got it between backward() and step()",
        (gone("offload/overlap/backward.py", "            self._step_others(groups)\n"),),
        (_FREEZING,),
    ),
    Mutation(
        "frozen-state-not-matched",
        "a parameter with state that is frozen now keeps it",
        (Edit(_MATCHING, "            also=saved_specs,\n", ""),),
        (_FREEZING,),
    ),
    Mutation(
        "state-without-a-group-not-matched",
        "so does one that is not given to the optimizer any more",
        (
            gone(
                _MATCHING,
                "    live |= _not_given(manifest, restored, model, rule, state_format, "
                "live.keys(), path, shards)\n",
            ),
        ),
        (_FREEZING,),
    ),
    Mutation(
        "forgotten-parameter-taken-for-frozen",
        "one that requires gradients and was not given is refused",
        (
            Edit(
                _MATCHING,
                "        if parameter.requires_grad and (manifest.order is None or spec.name in "
                "were_given):\n",
                "        if False:\n",
            ),
        ),
        (_FREEZING,),
    ),
    Mutation(
        "steps-counted-by-parameters",
        "a full state dict sets the number of steps that it says",
        (Edit("offload/engine/state_dict.py", "= loaded.stated_steps\n", "= None\n"),),
        (_DICTS,),
    ),
    Mutation(
        "empty-entries-taken-for-no-state",
        "an entry of a state dict that should have state and is empty is refused",
        (
            Edit(
                "offload/exchange/torch_dicts.py",
                "    if not present and found is not NO_ENTRY and expected:\n",
                "    if False:\n",
            ),
        ),
        (_DICTS,),
    ),
    Mutation(
        "listed-by-step",
        "checkpoints are listed by generation",
        (
            Edit(
                "offload/checkpoint/listing.py",
                "key=lambda info: info.generation)\n",
                "key=lambda info: info.step)\n",
            ),
        ),
        ("tests/torch_contract/test_listing.py",),
    ),
)
