"""Steps between a device and a drive: order, memory, and what is said of a device that fails."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation

_CUDA = "gds/buffers/cuda.py"
_BUFFERS = "gds/buffers/device.py"
_KVIKIO = "gds/backends/kvikio.py"
_FILE = "gds/backends/kvikio_file.py"
_LIBRARY = "gds/backends/kvikio_library.py"
_DIRECT = "gds/backends/direct_storage.py"
_BOUNDARY = "offload/device/boundary.py"
_FRAMES = "offload/stream/device_frames.py"
_STREAMER = "offload/stream/streamer.py"
_STEP_TIME = "offload/sizing/step_time.py"
_TESTS = "tests/contract/test_kvikio.py"
_CALLS = "tests/placement/test_cuda_calls.py"
_FAILURES = "tests/placement/test_device_failures.py"
_PLACEMENT = "tests/placement/test_placement.py"
_STORAGE = "tests/placement/test_device_storage.py"
_CUFILE = "tests/contract/test_cufile_calls.py"

DEVICE = (
    Mutation(
        "copies-wait-for-training",
        "copies run on streams that do not wait for the default stream",
        (Edit(_CUDA, "Stream(non_blocking=True)", "Stream(non_blocking=False)"),),
        (f"{_TESTS}::test_only_compatibility_mode_is_ordered_with_the_default_stream",),
    ),
    Mutation(
        "copies-share-a-stream",
        "copies of each direction have a stream of their own",
        (
            Edit(
                _CUDA,
                "                stream = self._streams[direction]\n",
                '                stream = self._streams["to host"]\n',
            ),
        ),
        (f"{_TESTS}::test_copies_of_each_direction_have_a_stream_of_their_own",),
    ),
    Mutation(
        "plain-calls-of-kvikio",
        "GPUDirect Storage is not called by the calls of KvikIO that wait for training",
        (
            Edit(
                _DIRECT,
                "        return self._calls.move(direction, memory, offset)\n",
                "        handle = self._calls._handle  # type: ignore[attr-defined]\n"
                "        start = handle.pread if direction == 'read' else handle.pwrite\n"
                "        return int(start(memory, memory.nbytes, offset).get())\n",
            ),
        ),
        (f"{_TESTS}::test_only_compatibility_mode_is_ordered_with_the_default_stream",),
    ),
    Mutation(
        "stream-result-freed",
        "the result of a stream-ordered call lives until the stream has written it",
        (
            Edit(
                _DIRECT,
                "            future = call(whole, stream, memory.nbytes, offset, start)\n"
                "            self._streams.wait(stream)\n"
                "            return int(future.check_bytes_done())\n",
                "            call(whole, stream, memory.nbytes, offset, start)\n"
                "            self._streams.wait(stream)\n"
                "            return memory.nbytes\n",
            ),
        ),
        (f"{_TESTS}::test_a_write_waits_for_the_kernel_before_it",),
    ),
    Mutation(
        "short-count-taken-for-all",
        "after a short count the transfer continues",
        (
            Edit(
                _FILE,
                "            done += min(whole_blocks(moved), stop - done)\n",
                "            done = stop\n",
            ),
        ),
        (f"{_TESTS}::TestDirectStorageWithShortTransfers",),
    ),
    Mutation(
        "registered-base-forgotten",
        "cuFile is told the address that memory was registered by",
        (
            Edit(
                _BUFFERS,
                "address, whole, base=memory.ptr)",
                "address, whole)",
            ),
        ),
        (f"{_TESTS}::test_device_memory_is_registered_once_and_before_it_goes",),
    ),
    Mutation(
        "pool-of-the-last",
        "KvikIO's pool has the threads of all open backends",
        (Edit(_LIBRARY, "sum(_num_threads.values())", "_num_threads[self]"),),
        (f"{_TESTS}::test_backends_of_several_drives_do_not_take_threads_from_each_other",),
    ),
    Mutation(
        "compat-by-default",
        "without GPUDirect Storage our own copies are taken",
        (
            Edit(
                _KVIKIO,
                '        if self._path == "compat" and self._library is not None:\n'
                "            compat =",
                '        if self._path != "bounce":\n'
                "            self._library = self._library or Library()\n"
                "            compat =",
            ),
        ),
        (f"{_TESTS}::TestWithoutDirectStorage",),
    ),
    Mutation(
        "other-device-switched-to",
        "calls for a device leave the current device of the caller alone",
        (
            Edit(
                _CUDA,
                "        if int(self._runtime.getDevice()) == self.device:\n"
                "            return call()\n"
                "        results",
                "        before = int(self._runtime.getDevice())\n"
                "        try:\n"
                "            self.use()\n"
                "            return call()\n"
                "        finally:\n"
                "            self._runtime.setDevice(before)\n"
                "        results",
            ),
        ),
        (f"{_TESTS}::test_no_other_device_is_touched",),
    ),
    Mutation(
        "cufile-without-context",
        "cuFile is called in threads that have a context",
        (
            Edit(
                _CUDA,
                "        self._runtime.setDevice(self.device)\n\n",
                "        if int(self._runtime.getDevice()) != self.device:\n"
                "            self._runtime.setDevice(self.device)\n\n",
            ),
        ),
        (f"{_TESTS}::test_device_memory_is_registered_once_and_before_it_goes",),
    ),
    Mutation(
        "stream-without-guard",
        "the device is current before one of its streams becomes the current one",
        (Edit(_BOUNDARY, "            torch.cuda.device(self._device),\n", ""),),
        (f"{_CALLS}::test_copies_are_ordered_by_events_on_two_streams_made_once",),
    ),
    Mutation(
        "default-priority",
        "our streams come before those of training",
        (Edit(_BOUNDARY, "PRIORITY: Final = -1", "PRIORITY: Final = 0"),),
        (f"{_CALLS}::test_copies_are_ordered_by_events_on_two_streams_made_once",),
    ),
    Mutation(
        "pinned-as-asked",
        "page-locked memory is counted as torch's pool takes it",
        (
            Edit(
                _BOUNDARY, "return 1 << (nbytes - 1).bit_length() if nbytes else 0", "return nbytes"
            ),
        ),
        (f"{_CALLS}::test_pinned_memory_is_counted_as_torchs_pool_takes_it",),
    ),
    Mutation(
        "pages-not-counted",
        "resident chunks never take more than `device_memory`",
        (
            Edit(
                _STREAMER,
                "        while most and frames_bytes(kept_in, layout, most) > resident_bytes:\n"
                "            most -= 1\n",
                "",
            ),
        ),
        (f"{_FAILURES}::test_residents_never_take_more_than_device_memory",),
    ),
    Mutation(
        "allocation-per-array",
        "the frames of a device are one allocation",
        (
            Edit(
                _FRAMES,
                "        total = _slab_bytes(sizes)\n        if not total:\n",
                "        if len(sizes) > 1:\n"
                "            return [part for n in sizes for part in self.allocate([n])]\n"
                "        total = _slab_bytes(sizes)\n        if not total:\n",
            ),
        ),
        (f"{_FAILURES}::test_frames_of_a_device_are_parts_of_one_allocation",),
    ),
    Mutation(
        "lost-device-not-named",
        "a device that is lost is named",
        (Edit(_LIBRARY, "    if is_lost(error):\n", "    if False:\n"),),
        (f"{_TESTS}::test_a_device_that_is_lost_is_named",),
    ),
    Mutation(
        "refused-lock-is-fatal",
        "copies go on without page-locked memory if CUDA refuses it",
        (
            Edit(
                _KVIKIO,
                "                self._lock_refused = True\n",
                "                raise\n",
            ),
        ),
        (f"{_TESTS}::test_a_refused_page_lock_is_named_and_copies_go_on_without_it",),
    ),
    Mutation(
        "copies-priced-by-the-cpu",
        "copies through the host are priced by its memory",
        (
            Edit(
                "offload/placement/model.py",
                "memory_gbps=None if rates.direct else rates.memory_gbps",
                "memory_gbps=None if rates.direct else 2 * rates.update_gbps",
            ),
        ),
        (_PLACEMENT,),
    ),
    Mutation(
        "memory-touched-twice",
        "each byte of state that is moved touches the host's memory four times",
        (Edit(_STEP_TIME, "= 4 * moved / memory_gbps", "= 2 * moved / memory_gbps"),),
        (_PLACEMENT,),
    ),
    Mutation(
        "uncompiled-kernels-end-the-training",
        'placement="auto" stays on the host if no kernel can be compiled',
        (
            Edit(
                "offload/placement/choose.py",
                '            if placement == "device":\n                raise\n',
                "            raise\n",
            ),
        ),
        (f"{_STORAGE}::test_auto_stays_on_the_host_where_no_kernel_can_be_compiled",),
    ),
    Mutation(
        "open-driver-refused",
        "cuFile is used if its driver has been opened before",
        (
            Edit(
                "gds/backends/cufile.py",
                "        if opened.err != _ALREADY_OPEN:\n            _check(",
                "        if opened.err != 0:\n            _check(",
            ),
        ),
        (f"{_CUFILE}::test_a_driver_that_another_library_has_opened_is_used",),
    ),
)
