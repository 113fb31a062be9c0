"""Buffers of all devices, and the thread that reads ahead into them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from offload.blocks.places import Place, place_of
from offload.blocks.pool import Pool
from offload.blocks.sources import Source
from offload.blocks.units import ALIGNMENT, Arrival, Unit
from offload.device.boundary import Event
from offload.stream.meter import Meter


class Buffers:
    """Fills buffers with the values of units, and counts what is read. Not safe for threads.

    Args:
        units: Units that are read.
        meter: Counters of the optimizer.
        source: Function that returns where the values are, given the place of each device.
        num_buffers: Number of buffers to keep on each device.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        meter: Meter,
        source: Callable[[Mapping[torch.device, Place]], Source],
        num_buffers: int,
    ) -> None:
        sizes: dict[torch.device, int] = {}
        for unit in units:
            sizes[unit.device] = max(sizes.get(unit.device, ALIGNMENT), unit.nbytes)
        self.places = {device: place_of(device, meter.traffic) for device in sizes}
        self._pools = {
            device: Pool(place, sizes[device], num_buffers) for device, place in self.places.items()
        }
        self.source = source(self.places)
        self._meter = meter
        self._reader = ThreadPoolExecutor(1, "offload-blocks")

    def begin(self, unit: Unit) -> None:
        """Begin to read a unit on the thread."""
        buffer, after = self._pools[unit.device].get()
        unit.coming = Arrival(buffer, self._reader.submit(self.source.read, unit, buffer, after))

    def abandon(self, unit: Unit) -> None:
        """Wait for what `begin` reads, if it was called, and take the buffer back.

        An error of the read is ignored: nobody needs the values.
        """
        coming, unit.coming = unit.coming, None
        if coming is not None:
            self._meter.block_loads_unused += 1
            has_failed = coming.filled.exception() is not None
            self._pools[unit.device].put(
                coming.buffer, None if has_failed else coming.filled.result()
            )

    def read(self, unit: Unit) -> tuple[torch.Tensor, Event]:
        """Return a buffer with a unit's values, and the point after which it may be used."""
        meter, started = self._meter, time.perf_counter()
        coming, unit.coming = unit.coming, None
        after: Event = None
        if coming is not None:
            meter.block_loads_ahead += 1
            meter.block_loads_waited += not coming.filled.done()
            buffer = coming.buffer
        else:
            buffer, after = self._pools[unit.device].get()
        try:
            if coming is None:
                ready = self.source.read(unit, buffer, after)
            else:
                ready = coming.filled.result()
        except BaseException:
            self._pools[unit.device].put(buffer, after)
            raise
        meter.wait_blocks_s += time.perf_counter() - started
        meter.block_loads += 1
        meter.block_bytes += unit.nbytes
        num_made = sum(pool.num_made for pool in self._pools.values())
        meter.block_buffers = max(meter.block_buffers, num_made)
        return buffer, ready

    def read_again(self, unit: Unit, buffer: torch.Tensor) -> Event:
        """Fill a unit's buffer with new values, after all that uses it now."""
        place = self.places[unit.device]
        ready = self.source.read(unit, buffer, place.now())
        place.follow(ready)
        return ready

    def put(self, unit: Unit, buffer: torch.Tensor) -> None:
        """Take a buffer back, which may be overwritten after all that uses it now."""
        self._pools[unit.device].put(buffer, self.places[unit.device].now())

    def have_room(self, device: torch.device, num_used: int) -> bool:
        """Return whether another buffer may be used on a device beside a number of others."""
        return num_used < self._pools[device].limit

    def wait(self, units: Iterable[Unit]) -> None:
        """Wait until nothing reads from the source any more."""
        for unit in units:
            if unit.coming is not None:
                unit.coming.filled.exception()
        for place in self.places.values():
            place.wait_filled()

    def close(self) -> None:
        """End the thread, which may be the one that collects garbage."""
        self._reader.shutdown(wait=False)
