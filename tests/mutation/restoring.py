"""Steps of a restore, and of the steps after it: what is checked, forgotten and waited for."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, faults, gone, power

_SEALED_SLOT = "offload/checkpoint/sealed_slot.py"
_SLOT = "offload/store/slots/slot.py"
_RESUME = "offload/engine/resume.py"
_MODEL = "offload/model/model_file.py"
_STREAMER = "offload/stream/streamer.py"
_STATE = "offload/engine/training_state.py"
_PASSES = "offload/engine/state_passes.py"
_USABLE = "offload/engine/lifecycle.py"
_CONCURRENCY = "tests/crash/test_concurrency.py"
_DAMAGE = "tests/torch_contract/test_damaged_checkpoints.py::TestDamage"
_RESUMING = "tests/torch_contract/test_refused_restores.py::TestResuming"
_LOST = "tests/crash/test_lost_writes.py"
_STEPS = "tests/crash/test_protocol_steps.py"
_OVERLAP = "tests/numerics/test_overlap.py"
_RESIDENT = "tests/numerics/test_resident.py"
_IDENTITY = "tests/numerics/test_resume_identity.py"
_INTERRUPTED = "tests/crash/test_interrupted.py"

RESTORING = (
    Mutation(
        "restore-parameters-unchecked",
        "parameters are compared with their digests when they are restored",
        (Edit(_MODEL, "            if found != expected[index]:\n", "            if False:\n"),),
        (_DAMAGE, _LOST),
    ),
    Mutation(
        "first-pass-unchecked",
        "state is compared with its digests in the first step after a restore",
        (Edit(_STREAMER, "check_read(frame, source)\n", "pass\n"),),
        (f"{_INTERRUPTED}::test_damaged_state_is_not_trained_on",),
    ),
    Mutation(
        "first-pass-believed",
        "what an earlier process wrote is not believed",
        (
            Edit(_SEALED_SLOT, "        self.distrust()\n", ""),
            Edit(_RESUME, "    slot.distrust()  #", "    #"),
        ),
        (f"{_INTERRUPTED}::test_damaged_state_is_not_trained_on",),
    ),
    Mutation(
        "digest-of-any-generation",
        "a digest speaks for one generation of one store",
        (
            Edit(
                "offload/format/digests.py",
                'f"{self.store_id}/{self.generation}/{array}/{chunk}"',
                'f"{array}/{chunk}"',
            ),
        ),
        ("tests/format/test_spec.py",),
    ),
    Mutation(
        "digest-of-any-chunk",
        "a digest speaks for one chunk of one array",
        (
            Edit(
                "offload/format/digests.py",
                'f"{self.store_id}/{self.generation}/{array}/{chunk}"',
                'f"{self.store_id}/{self.generation}"',
            ),
        ),
        ("tests/format/test_spec.py",),
    ),
    Mutation(
        "restore-train-state-unread",
        "the train state is read and checked before anything is changed",
        (gone(_RESUME, "            _ = checkpoint.train_state\n"),),
        (_LOST, _DAMAGE),
    ),
    Mutation(
        "restore-half-way-goes-on",
        "a restore that failed half way leaves an optimizer that refuses to go on",
        (gone(_RESUME, '        lifecycle.broken = f"restoring {found.path} failed half way"\n'),),
        (_DAMAGE, *faults("read-once-keep=1")),
    ),
    Mutation(
        "going-back-before-reading",
        "order: newer checkpoints are withdrawn when the older one has proved readable",
        (
            gone(
                _RESUME,
                "        store.withdraw_newer(found)"
                "  # now that the older one has proved to be readable\n",
            ),
            Edit(
                _RESUME,
                '        lifecycle.broken = f"restoring {found.path} failed half way"\n',
                '        lifecycle.broken = f"restoring {found.path} failed half way"\n'
                "        store.withdraw_newer(found)\n",
            ),
        ),
        (_RESUMING,),
    ),
    Mutation(
        "going-back-unasked",
        "an older checkpoint is restored only with discard_newer=True",
        (
            Edit(
                _RESUME,
                "    if found is not newest and found is not None and not discard_newer:\n",
                "    if False:\n",
            ),
        ),
        (_RESUMING,),
    ),
    Mutation(
        "undecided-goes-on",
        "nothing is stepped or sealed beside checkpoints that nobody has decided about",
        (Edit(_USABLE, "        if not self.decided:\n", "        if False:\n"),),
        (_RESUMING,),
    ),
    Mutation(
        "refused-in-silence",
        "a checkpoint that is not used is named, and why",
        (
            Edit(
                _RESUME,
                'warnings.warn(f"not using {path}: {reason}", RuntimeWarning, stacklevel=_CALLER)',
                "del path, reason",
            ),
        ),
        (_DAMAGE,),
    ),
    Mutation(
        "torn-step-goes-on",
        "a step that failed half way leaves an optimizer that refuses to go on",
        (
            gone(
                _PASSES,
                '    state.lifecycle.broken = f"step {state_pass.step}'
                ' failed half way ({error!r})"\n',
            ),
        ),
        faults("write-once-keep=1", "read-once-keep=1"),
    ),
    Mutation(
        "failed-transfer-unheeded",
        "a transfer that failed behind a step leaves an optimizer that refuses to go on",
        (Edit(_USABLE, "if self.broken or error is None:", "if True:"),),
        faults("write-once-keep=1", "write-once-keep=2"),
    ),
    Mutation(
        "failed-write-unnoticed",
        "the error of a write that nobody waits for is kept",
        (Edit(_STREAMER, "self.error = self.error or _error_of(future)", "_error_of(future)"),),
        faults("write-once-keep=1", "write-once-keep=2"),
    ),
    Mutation(
        "flush-after-failed-write",
        "no seal begins when a write before it has failed",
        (
            Edit(
                _STREAMER,
                "            self.raise_error()\n            pending =",
                "            pending =",
            ),
        ),
        (*faults("write-once-keep=1"), f"{_CONCURRENCY}::TestFailedSeal", _RESIDENT),
    ),
    Mutation(
        "flush-forgets-pending",
        "a seal waits for the writes that are in progress",
        (
            Edit(
                _STREAMER,
                "[f for frame in self._writing.values() for f in frame.futures]",
                "list[IOFuture]()",
            ),
        ),
        (_OVERLAP, *faults("write-once-keep=1", "write-once-keep=2")),
    ),
    Mutation(
        "flush-not-frozen",
        "resident state does not change while a seal is about to write it",
        (
            Edit(
                _STREAMER,
                "        busy = chunk in self._flushing or chunk in self._writing\n",
                "        busy = False\n",
            ),
        ),
        (f"{_STEPS}::test_resident_state_that_a_seal_is_about_to_write_is_not_stepped",),
    ),
    Mutation(
        "read-before-written",
        "a chunk is read again only when its write has ended",
        (
            Edit(
                _STREAMER,
                "            if chunk in self._writing:\n"
                "                break  # this method is called again when that write ends\n",
                "",
            ),
        ),
        (f"{_STEPS}::test_a_chunk_is_not_read_again_before_its_writes_have_ended",),
    ),
    Mutation(
        "read-ahead-of-another-slot",
        "what was read ahead from another slot is dropped",
        (Edit(_STREAMER, "            if source is self._source:\n", "            if True:\n"),),
        (f"{_STEPS}::test_what_was_read_ahead_from_another_slot_is_not_taken",),
    ),
    Mutation(
        "restore-keeps-memory",
        "a restore forgets what was read ahead, and what is resident",
        (
            Edit(
                _STATE,
                "        self.memory.reset()\n        self.memory.drop()\n"
                "        self.slots.forget()",
                "        self.slots.forget()",
            ),
        ),
        (f"{_RESIDENT}::test_a_restore_in_the_same_process_forgets_what_was_in_memory", _IDENTITY),
    ),
    Mutation(
        "source-released-while-written",
        "a slot is free again when the last transfer has ended",
        (gone(_PASSES, "        ring.synchronize()\n"),),
        ("tests/numerics/test_added_parameters.py", *power("added-group-keep=1")),
        redundant="a guard: a pass that moves the state has taken every chunk, so no read of the "
        "old slot is left, and the change of layout before it has waited for all writes",
    ),
    Mutation(
        "written-digests-of-old-content",
        "what is known of a slot's content is forgotten when it is written anew",
        (
            gone(
                _SLOT,
                "        self._digests = {name: [None] * self.layout.num_chunks"
                " for name in self.layout.array_names}\n",
            ),
        ),
        (*power("three-checkpoints-keep=1"), _IDENTITY),
    ),
    Mutation(
        "poison-tells-nobody",
        "a failed sync is remembered",
        (
            Edit(
                "offload/store/poison.py",
                '            self.reason = self.reason or f"{what} ({reason_of(error)})"\n',
                "            del error, what\n",
            ),
        ),
        faults("sync-once-keep=1", "sync_dir-once-keep=1"),
    ),
)
