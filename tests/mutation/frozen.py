"""Steps of a seal that leaves out what a slot holds already: what it may believe, and what not."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation

_WRITING = "offload/model/model_writing.py"
_BACK = "offload/model/read_back.py"
_SHARING = "offload/model/model_sharing.py"
_SHARES = "tests/ranks_model/test_writing.py"
_MODEL = "offload/model/model_file.py"
_SLOT = "offload/store/slots/slot.py"
_WHOLE = "offload/engine/whole_model.py"
_COPY = "offload/model/model_copy.py"
_WITHDRAWAL = "offload/store/withdrawal.py"
_POSIX = "gds/backends/posix_file.py"
_FROZEN = "tests/numerics/test_frozen.py"
_IN_ONE = f"{_FROZEN}::TestInOneProcess"
_RESUMED = f"{_FROZEN}::TestAfterAResume"
_CRASHES = "tests/crash/test_frozen_parameters.py"

FROZEN = (
    Mutation(
        "failed-seal-model-read-back",
        "after a failed seal the slot is not asked what it holds: a cache may answer",
        (
            Edit(
                _COPY,
                "self._known.forget(readable=False)",
                "self._known.forget(readable=True)",
            ),
        ),
        (f"{_IN_ONE}::test_after_a_write_that_failed_everything_is_written_and_nothing_is_asked",),
    ),
    Mutation(
        "failed-seal-writes-go-on",
        "when a seal has failed none of its writes is under way any more",
        (Edit(_WRITING, "    finally:\n        writer.wait()\n", "    finally:\n        pass\n"),),
        (f"{_CRASHES}::test_no_write_is_under_way_any_more_when_a_seal_has_failed",),
    ),
    Mutation(
        "slot-read-back-believed",
        "what is read back of a slot is compared with the live bytes",
        (
            Edit(
                _WRITING,
                "{n for n, leaf in zip(numbers, found, strict=True) if leaf == wanted[n]}",
                "{n for n, leaf in zip(numbers, found, strict=True) if leaf}",
            ),
        ),
        (f"{_RESUMED}::test_a_bit_that_has_flipped_in_a_slot_is_mended",),
    ),
    Mutation(
        "share-read-back-believed",
        "what a rank reads back of its share is compared with the live bytes",
        (
            Edit(
                _SHARING,
                "before = held.get(number, known.of(number))",
                "before = leaves if number in held else known.of(number)",
            ),
        ),
        (f"{_SHARES}::TestWhatAnEarlierProcessLeft::test_a_byte_that_is_wrong_is_mended",),
    ),
    Mutation(
        "share-read-back-unasked",
        "a rank does not read back what may be in a cache only",
        (
            Edit(
                _SHARING,
                "    if changing is None or not known.readable:\n",
                "    if changing is None:\n",
            ),
        ),
        (f"{_SHARES}::TestWhatAnEarlierProcessLeft::test_nothing_is_read_if_it_may_not_be",),
    ),
    Mutation(
        "slot-read-error-believed",
        "what could not be read back is written",
        (
            Edit(
                _BACK,
                "            if not has_failed(read):",
                "            if read.result() is not None:",
            ),
        ),
        (f"{_CRASHES}::test_what_is_read_back_late_and_fails_is_written",),
    ),
    Mutation(
        "slot-read-back-from-the-cache",
        "what an earlier process left in the page cache is not believed",
        (
            Edit(
                _BACK,
                "self._file.read_again(part, offset, direct=True)",
                "self._file.read(part, offset)",
            ),
        ),
        (f"{_RESUMED}::test_the_drive_is_asked_and_not_the_page_cache",),
    ),
    Mutation(
        "new-slot-read-back",
        "nothing is read of a slot that has just been made",
        (
            Edit(
                _SLOT,
                "_model_leaves(backend, path, layout, readable=False)",
                "_model_leaves(backend, path, layout, readable=True)",
            ),
        ),
        (f"{_IN_ONE}::test_each_slot_is_written_once_and_then_only_the_leaves_that_change",),
    ),
    Mutation(
        "unequal-bytes-cloned",
        "only leaves that equal the live ones are cloned",
        (Edit(_WRITING, "if held[n] == wanted[n] and n < num_whole]", "if n < num_whole]"),),
        (f"{_IN_ONE}::test_a_frozen_tensor_that_is_edited_is_found_by_its_digest",),
    ),
    Mutation(
        "trained-bytes-cloned",
        "nothing near what is trained shares space: an overwrite must not need any",
        (
            Edit(
                _WRITING,
                "source.trained.touch(start - CLONE_REACH_BYTES, stop + CLONE_REACH_BYTES)",
                "source.trained.touch(start, stop)",
            ),
        ),
        (f"{_IN_ONE}::test_where_files_share_space_a_new_slot_takes_over_what_is_frozen",),
    ),
    Mutation(
        "failed-clone-believed",
        "what could not be cloned is written",
        (
            Edit(
                _WRITING,
                "                self._source = None  # the next clone would fail as well\n"
                "                return missing\n",
                "                self._source = None\n",
            ),
        ),
        (f"{_RESUMED}::test_what_cannot_be_cloned_is_read_back_or_written",),
    ),
    Mutation(
        "failed-clone-read-back",
        "after a clone that failed the slot is not asked what it holds",
        (
            Edit(
                _WRITING,
                "                self._known.readable = False  # as",
                "                # as",
            ),
        ),
        (f"{_RESUMED}::test_what_cannot_be_cloned_is_read_back_or_written",),
    ),
    Mutation(
        "damaged-checkpoint-cloned",
        "nothing is cloned from a checkpoint that was found damaged",
        (
            Edit(
                _WHOLE,
                "        if not store.is_usable(newest):\n",
                "        if False:\n",
            ),
        ),
        (f"{_RESUMED}::test_nothing_is_cloned_from_a_checkpoint_that_a_reader_has_found_damaged",),
    ),
    Mutation(
        "other-layout-cloned",
        "nothing is cloned from a model file of another layout",
        (
            Edit(
                _WHOLE,
                "    if source.layout.model_header.encoded != slot.layout.model_header.encoded:\n",
                "    if False:\n",
            ),
        ),
        (
            f"{_IN_ONE}::test_a_longer_header_moves_what_is_frozen_and_it_is_not_cloned_from_where_it_was",
        ),
    ),
    Mutation(
        "damaged-slot-believed",
        "nothing is known any more of a slot that a reader has found damaged",
        (
            Edit(
                _WITHDRAWAL,
                "                        slot.model_leaves.forget(readable=True)\n",
                "                        pass\n",
            ),
        ),
        (
            f"{_RESUMED}::test_damage_that_a_reader_has_found_is_not_in_the_next_checkpoint_of_that_slot",
        ),
    ),
    Mutation(
        "other-model-file-believed",
        "a model file that was put in the place of the one that is known is another one",
        (
            Edit(
                _SLOT,
                "        if known is not None and known.inode == self._model_leaves.inode != 0:\n",
                "        if known is not None:\n",
            ),
        ),
        (
            f"{_IN_ONE}::test_a_model_file_that_somebody_has_put_there_is_not_taken_for_the_one_that_was",
        ),
    ),
    Mutation(
        "damaged-block-known",
        "only blocks that are what was written are known after a restore",
        (
            Edit(
                _MODEL,
                "            if known is not None:\n                known.note(index, leaves)\n",
                "            if known is not None:\n                known.note(0, leaves)\n",
            ),
        ),
        (f"{_RESUMED}::test_what_is_frozen_is_read_once_for_each_slot_and_not_written",),
    ),
    Mutation(
        "file-closed-while-cloned",
        "a file whose range is being cloned is not closed",
        (
            Edit(
                _POSIX,
                '        with source._held("clone"), self._held("clone"):\n',
                "        if True:\n",
            ),
        ),
        ("tests/contract/test_posix.py::test_closing_a_file_waits_for_a_clone_of_it",),
    ),
)
