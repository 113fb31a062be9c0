"""Working memory of one layout, which state and parameters pass through."""

from __future__ import annotations

from offload.device.compute import Compute
from offload.format.layout import Layout
from offload.model.model_file import BlockBuffers
from offload.options import Options
from offload.stream.device_frames import DeviceFrames
from offload.stream.drives import Drives
from offload.stream.frame import FrameMemory, HostFrames, frame_bytes
from offload.stream.host_memory import host_memory_bytes, resident_frames
from offload.stream.meter import Meter
from offload.stream.streamer import Streamer


class WorkingMemory:
    """The ring, resident chunks and block buffers. Each is created when it is first needed.

    Args:
        drives: Drives that allocate the memory and determine the number of ring chunks.
        options: Options of the user.
        meter: Meter that counts seconds and traffic.
    """

    def __init__(self, drives: Drives, options: Options, meter: Meter) -> None:
        self._drives = drives
        self._options = options
        self._meter = meter
        self.streamer: Streamer | None = None
        """Streamer that `ring` has created; None before."""
        self._blocks: BlockBuffers | None = None

    def ring(self, layout: Layout, compute: Compute | None) -> Streamer:
        """Return the streamer for a layout, with its ring and resident chunks.

        Args:
            layout: Layout of the state.
            compute: Compute of the device that holds a ring created now; None for a ring in host
                memory.
        """
        if self.streamer is None:
            options, backend = self._options, self._drives.backends[0]
            memory: FrameMemory
            kept_in: FrameMemory
            if compute is not None:
                memory = kept_in = DeviceFrames(backend, compute, self._meter.traffic)
                resident_bytes = options.device_memory_bytes
            else:
                memory = HostFrames(backend)
                kept_in = resident_frames(options, backend)
                resident_bytes = host_memory_bytes(options)
            ring_chunks = self._drives.tune(layout.state_bytes, frame_bytes(layout))
            self.streamer = Streamer(
                memory,
                layout,
                ring_chunks,
                self._meter,
                resident_bytes=resident_bytes,
                resident_memory=kept_in,
                verify_reads=options.verify == "always",
            )
        return self.streamer

    def blocks(self, layout: Layout) -> BlockBuffers:
        """Return the buffers that ``model.safetensors`` is copied through."""
        if self._blocks is None:
            header = layout.model_header
            data_bytes = header.file_bytes - header.data_start
            self._blocks = BlockBuffers(self._drives.backends[0], data_bytes, self._meter.traffic)
        return self._blocks

    @property
    def error(self) -> Exception | None:
        """The error of a transfer of state that failed, if one has; see `Streamer.error`."""
        return self.streamer.error if self.streamer is not None else None

    def synchronize(self) -> None:
        """Wait until every transfer of state that has been started has ended.

        Raises:
            gds.StorageError: A write failed.
        """
        if self.streamer is not None:
            self.streamer.synchronize()

    def reset(self) -> None:
        """Wait for all transfers, then discard chunks in memory and forget errors."""
        if self.streamer is not None:
            self.streamer.reset()

    def release(self) -> None:
        """Release all memory for good, after `reset`. The sizes of the ring are still known."""
        if self.streamer is not None:
            self.streamer.release()
        self._blocks = None

    def drop(self) -> None:
        """Release all memory, before another layout is used.

        Raises:
            gds.StorageError: A write failed.
        """
        self.synchronize()
        self.reset()
        self.streamer = self._blocks = None
