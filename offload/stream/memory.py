"""The memory that state and parameters pass through, sized for one layout."""

from __future__ import annotations

from offload.device.compute import Compute
from offload.format.layout import Layout
from offload.model.model_file import BlockBuffers
from offload.options import Options
from offload.stream.device_frames import DeviceFrames
from offload.stream.drives import Drives
from offload.stream.frame import FrameMemory, HostFrames, frame_bytes
from offload.stream.meter import Meter
from offload.stream.streamer import Streamer


class WorkingMemory:
    """The ring, resident chunks and block buffers; made when they are first needed.

    Args:
        drives: Allocate the memory, and say how many chunks the ring should have.
        options: The user's.
        meter: Counts seconds.
    """

    def __init__(self, drives: Drives, options: Options, meter: Meter) -> None:
        self._drives = drives
        self._options = options
        self._meter = meter
        self.streamer: Streamer | None = None
        """What `ring` has made."""
        self._blocks: BlockBuffers | None = None

    def ring(self, layout: Layout, compute: Compute | None) -> Streamer:
        """Return the streamer for a layout, with its ring and what is resident.

        Args:
            layout: Of the state.
            compute: Of the device that the ring is to be on, if it is made now; None for host
                memory.
        """
        if self.streamer is None:
            options, backend = self._options, self._drives.backends[0]
            memory: FrameMemory = HostFrames(backend)
            resident_bytes = options.host_memory_bytes
            if compute is not None:
                memory = DeviceFrames(backend, compute, self._meter.traffic)
                resident_bytes = options.device_memory_bytes
            ring_chunks = self._drives.tune(layout.state_bytes, frame_bytes(layout))
            self.streamer = Streamer(
                memory,
                layout,
                ring_chunks,
                self._meter,
                resident_bytes=resident_bytes,
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
        """Wait for all transfers, then forget what was read ahead, kept, and what failed."""
        if self.streamer is not None:
            self.streamer.reset()

    def drop(self) -> None:
        """Free everything, for another layout.

        Raises:
            gds.StorageError: A write failed.
        """
        self.synchronize()
        self.reset()
        self.streamer = self._blocks = None
