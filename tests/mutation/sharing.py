"""Steps of ranks that write and read one model file: whose bytes, when, and checked by whom."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone

_SHARES = "offload/format/shares/model_shares.py"
_RANGES = "offload/format/shares/box_ranges.py"
_BLOCKS = "offload/format/shares/model_blocks.py"
_SHARDS = "offload/format/model_shard.py"
_WRITER = "offload/model/model_sharing.py"
_IMAGE = "offload/model/tensor_image.py"
_LIVE = "offload/model/live_boxes.py"
_READER = "offload/model/share_reading.py"
_PURE = "tests/ranks_model/test_shares.py"
_CUT = "tests/ranks_model/test_blocks.py"
_WRITING = "tests/ranks_model/test_writing.py"
_READING = "tests/ranks_model/test_reading.py"
_DEVICE = "tests/ranks_model/test_on_a_device.py"
_TRANSFERS = f"{_WRITING}::TestTheTransfers"
_FILE = f"{_WRITING}::TestTheFile::test_seals_in_a_row_are_what_safetensors_writes"

SHARING = (
    Mutation(
        "share-gap",
        "elements that no rank writes are refused",
        (Edit(_RANGES, "        if len(owners) != 1:\n", "        if len(owners) > 1:\n"),),
        (f"{_PURE}::test_gaps_and_overlaps_are_refused_by_name",),
    ),
    Mutation(
        "share-overlap",
        "elements that several ranks write are refused",
        (Edit(_RANGES, "        if len(owners) != 1:\n", "        if not owners:\n"),),
        (f"{_PURE}::test_gaps_and_overlaps_are_refused_by_name",),
    ),
    Mutation(
        "share-rest-unwritten",
        "tensors that no rank lists are the writer's",
        (
            Edit(
                _SHARES,
                "            owners = [(writer, Box.whole(entry.shape))]\n",
                "            continue\n",
            ),
        ),
        (f"{_PURE}::test_what_no_rank_lists_is_the_writers",),
    ),
    Mutation(
        "share-shared-block-whole",
        "a block that ranks share is not written as a whole",
        (
            Edit(
                _BLOCKS,
                "    head, tail = min(_up(first), last), max(_down(last), min(_up(first), last))\n",
                "    head, tail = _down(first), _up(last)\n",
            ),
        ),
        (f"{_CUT}::test_every_byte_is_written_by_its_owner_and_shared_blocks_byte_by_byte",),
    ),
    Mutation(
        "share-memory-unaligned",
        "bytes lie in memory at their file offset modulo 4096",
        (
            Edit(
                _BLOCKS,
                "return end if adjoins else _up(end) + piece.start % ALIGNMENT",
                "return end",
            ),
        ),
        (f"{_CUT}::test_every_byte_is_written_by_its_owner_and_shared_blocks_byte_by_byte",),
    ),
    Mutation(
        "share-carry-lost",
        "the start of a block that two batches have is carried from one to the other",
        (
            gone(
                _WRITER,
                "            _carry(batch.segments[0], previous[:end], memory)\n",
            ),
        ),
        (_FILE,),
    ),
    Mutation(
        "share-carry-unchanged",
        "a carried start of a block that has changed is written",
        (
            Edit(
                _WRITER,
                "            changed = [part for part in changed if part[1] > first]\n",
                "            changed = [part for part in changed if part[1] > first][:0]\n",
            ),
        ),
        (f"{_WRITING}::TestWhatIsKnown",),
    ),
    Mutation(
        "share-edges-lost",
        "the edges of a share are written",
        (Edit(_WRITER, "        file.write_bytes(data, offset)\n", "        pass\n"),),
        (_FILE,),
    ),
    Mutation(
        "share-edges-amid-blocks",
        "order: edges come after all direct writes of the rank",
        (
            Edit(
                _WRITER,
                "found.edges.append((start, bytes(view[at : at + stop - start])))",
                "file.write_bytes(bytes(view[at : at + stop - start]), start)",
            ),
        ),
        (f"{_TRANSFERS}::test_edges_follow_all_blocks_and_the_sync_is_last",),
    ),
    Mutation(
        "share-no-sync",
        "each rank syncs what it has written",
        (gone(_WRITER, "    file.sync()\n"),),
        (f"{_TRANSFERS}::test_a_rank_without_bytes_syncs_as_well",),
    ),
    Mutation(
        "share-sync-before-edges",
        "order: the sync comes after the edges",
        (
            Edit(
                _WRITER,
                "    for offset, data in written.edges:\n"
                "        file.write_bytes(data, offset)\n"
                "    file.sync()\n",
                "    file.sync()\n"
                "    for offset, data in written.edges:\n"
                "        file.write_bytes(data, offset)\n",
            ),
        ),
        (f"{_TRANSFERS}::test_edges_follow_all_blocks_and_the_sync_is_last",),
    ),
    Mutation(
        "share-copied-early",
        "tensors are said to be copied when they are",
        (
            gone(_WRITER, "            copied(batch.position)\n"),
            Edit(
                _WRITER,
                "            _gather(image, batch, memory, on_one_thread=not has_caught_up)\n",
                "            copied(batch.position)\n"
                "            _gather(image, batch, memory, on_one_thread=not has_caught_up)\n",
            ),
        ),
        (f"{_TRANSFERS}::test_tensors_may_change_as_soon_as_they_are_said_to_be_copied",),
    ),
    Mutation(
        "share-stop-early",
        "a step waits for the end of its boxes",
        (Edit(_SHARES, "self.positions[index + 1]\n", "self.positions[index]\n"),),
        (f"{_PURE}::test_a_step_waits_for_the_boxes_of_its_chunk_and_no_others",),
    ),
    Mutation(
        "share-edit-unnoticed",
        "a tensor that changes before it has been copied fails the seal",
        (
            Edit(
                _LIVE,
                "            if tensor._version != version:\n",
                "            if False:\n",
            ),
        ),
        ("tests/ranks_model/test_live_boxes.py::TestEdits",),
    ),
    Mutation(
        "share-captured-by-reference",
        "what a forward may change is captured by value",
        (
            Edit(
                _LIVE,
                "replace(self, tensor=self.tensor.detach().clone()) if self.by_value else self",
                "self",
            ),
        ),
        ("tests/ranks_model/test_live_boxes.py::test_what_is_captured_by_value_does_not_change",),
    ),
    Mutation(
        "share-memory-in-use",
        "memory is not filled again before its writes have ended",
        (
            gone(
                _WRITER,
                "            for write in writes.get(index - 2, []):\n"
                "                write.result()\n",
            ),
        ),
        (f"{_TRANSFERS}::test_memory_is_not_filled_again_before_its_writes_have_ended",),
    ),
    Mutation(
        "share-writes-go-on",
        "when a share has failed none of its writes is under way any more",
        (Edit(_WRITER, "                has_failed(write)\n", "                pass\n"),),
        (f"{_WRITING}::test_after_a_failed_write_no_other_write_is_under_way",),
    ),
    Mutation(
        "share-known-believed",
        "content that differs from what is known is written",
        (
            Edit(
                _WRITER,
                "        if leaves[at : at + _DIGEST_BYTES] != known[at : at + _DIGEST_BYTES]\n",
                "        if False\n",
            ),
        ),
        (f"{_WRITING}::TestWhatIsKnown::test_one_tensor_that_changes_is_written",),
    ),
    Mutation(
        "share-tensor-unchecked",
        "a live tensor that is not the box any more is refused",
        (
            Edit(
                _WRITER,
                "            if (dtype, tuple(tensor.shape)) != (entry.dtype, entry.box.sizes):\n",
                "            if False:\n",
            ),
        ),
        (f"{_WRITING}::TestImages::test_a_tensor_that_is_not_the_box_is_refused",),
    ),
    Mutation(
        "share-digest-without-box",
        "a digest is bound to its box",
        (
            Edit(
                _SHARES,
                'return f"{MODEL_ARRAY}/{self.name}{self.cut.box.notation()}"',
                "return MODEL_ARRAY",
            ),
        ),
        (f"{_READING}::TestDamage::test_boxes_and_pieces_that_have_changed_places_are_damaged",),
    ),
    Mutation(
        "share-digest-without-number",
        "a digest is bound to the place of its piece",
        (
            Edit(
                _WRITER,
                "context.digest_leaves(array, piece.number, leaves)",
                "context.digest_leaves(array, 0, leaves)",
            ),
            Edit(
                _READER,
                "context.digest_leaves(array, piece.number, leaves)",
                "context.digest_leaves(array, 0, leaves)",
            ),
            Edit(
                _READER,
                "partial(context.digest, array, piece.number)",
                "partial(context.digest, array, 0)",
            ),
        ),
        (f"{_READING}::TestDamage::test_boxes_and_pieces_that_have_changed_places_are_damaged",),
    ),
    Mutation(
        "share-read-unchecked",
        "what a rank reads is compared with its digest",
        (Edit(_READER, "    if found != expected:\n", "    if False:\n"),),
        (f"{_READING}::TestDamage",),
    ),
    Mutation(
        "share-read-known-wrong",
        "what is known after reading is noted for its own piece",
        (
            Edit(
                _READER,
                "stored.known.note(number, leaves)",
                "stored.known.note(0, leaves)",
            ),
        ),
        (f"{_READING}::TestTheSameRanks::test_what_has_been_read_is_known_to_the_next_seal",),
    ),
    Mutation(
        "share-read-uncovered",
        "a wanted box that nobody has written is refused",
        (
            Edit(
                _READER,
                "    for box, ranks in uncovered(sizes, parts):\n",
                "    for box, ranks in ():\n",
            ),
        ),
        (f"{_READING}::TestRefusals",),
    ),
    Mutation(
        "flat-copy-unordered",
        "order: new values are sent to a contiguous copy after the old ones are in it",
        (
            Edit(
                _IMAGE,
                "return flat, boundary.fetch([], [])",
                "return flat, boundary.send([], [])",
            ),
        ),
        (f"{_DEVICE}::test_a_tensor_that_is_not_contiguous_is_sent_block_by_block",),
    ),
    Mutation(
        "shard-offsets-lost",
        "a shard file says where its boxes lie",
        (Edit(_SHARDS, "list(box.offsets)", "[0] * len(box.offsets)"),),
        ("tests/ranks_model/test_shard_files.py::test_torchs_reader_opens_them",),
    ),
)
