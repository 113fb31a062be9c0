"""A model that is mostly frozen on real file systems: what reaches the device, and full disks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import safetensors.torch
import torch

from offload import AdamW, open_checkpoint
from offload.errors import DamagedError, SealError
from tests.dying import dying
from tests.kernel import loop_devices
from tests.kernel.loop_devices import Mounted, mounted, unmount

MIB: Final = 1 << 20
FROZEN_BYTES: Final = 128 * MIB
FROZEN_IN_LAYERS_BYTES: Final = 64 * MIB
TRAINED_BYTES: Final = 1 * MIB
MARGIN_BYTES: Final = 4 * MIB
NUM_SLOTS: Final = 3
BESIDE_BYTES: Final = 2 * 16 * MIB
"""Of what is frozen, next to what is trained: that much of a slot is never shared."""

CODE_BYTES: Final = 16 * MIB
"""That a process may read of its own program when it does something for the first time."""

CLONING: Final = ("xfs", "btrfs")


@contextlib.contextmanager
def drive_of(filesystem: str, tmp_path: Path) -> Iterator[Mounted]:
    if reason := loop_devices.why_not(filesystem):
        pytest.skip(reason)
    with mounted(filesystem, tmp_path, size_bytes=1024 * MIB) as found:
        yield found


@pytest.fixture(params=CLONING)
def drive(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mounted]:
    with drive_of(request.param, tmp_path) as found:
        yield found


def train_elsewhere(drive: Mounted, num_seals: int) -> list[dict[str, float]]:
    """Let a process train and seal, from where the one before it has ended."""
    device = os.path.basename(drive.device)
    sizes = [str(FROZEN_IN_LAYERS_BYTES), str(TRAINED_BYTES), str(num_seals)]
    command = [sys.executable, "-m", "bench._frozen_child", f"{drive.path}/run", *sizes]
    done = subprocess.run(
        dying([*command, "bfloat16", device]),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["frozen_bytes"] == FROZEN_IN_LAYERS_BYTES
    assert found["trained_bytes"] == TRAINED_BYTES
    return found["seals"]


@pytest.mark.parametrize("filesystem", loop_devices.MAKE)
def test_what_a_seal_gives_to_the_device(filesystem: str, tmp_path: Path) -> None:
    """By the kernel's count of the process, and by the device's own, which nobody else uses."""
    with drive_of(filesystem, tmp_path) as drive:
        before = train_elsewhere(drive, NUM_SLOTS + 2)
        after = train_elsewhere(drive, NUM_SLOTS + 1)
    clones = filesystem in CLONING
    allowed = TRAINED_BYTES + MARGIN_BYTES
    for count in ("written_bytes", "device_bytes"):
        first, *others = (seal[count] for seal in before)
        assert first >= FROZEN_IN_LAYERS_BYTES, "nothing is there to begin with"
        for written in others[: NUM_SLOTS - 1]:
            assert (
                (written <= allowed + BESIDE_BYTES)
                if clones
                else (written >= FROZEN_IN_LAYERS_BYTES)
            )
        assert max(others[NUM_SLOTS - 1 :]) <= allowed, count
        assert max(seal[count] for seal in after) <= allowed, count
    read = [seal["read_bytes"] for seal in after]
    once = BESIDE_BYTES if clones else FROZEN_IN_LAYERS_BYTES
    assert max(read[: NUM_SLOTS - 1]) <= once + CODE_BYTES
    assert max(read[NUM_SLOTS - 1 :]) < CODE_BYTES, "the slot that was restored is known"


class Adapted(torch.nn.Module):
    """A trained vector beside a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = torch.nn.Parameter(torch.ones(TRAINED_BYTES // 4))
        frozen = torch.arange(FROZEN_BYTES // 4, dtype=torch.int32).view(torch.float32)
        self.frozen = torch.nn.Parameter(frozen, requires_grad=False)


class Run:
    """A process that trains one."""

    def __init__(self, drive: Mounted) -> None:
        self.store = f"{drive.path}/run"
        self.model = Adapted()
        self.optimizer = AdamW([self.model.trained], directory=self.store, model=self.model, lr=0.1)
        checkpoint = self.optimizer.restore()
        self.step_number = checkpoint.step if checkpoint else 0

    def step(self) -> None:
        self.step_number += 1
        self.model.trained.grad = torch.ones_like(self.model.trained)
        self.optimizer.step()

    def step_and_seal(self) -> None:
        self.step()
        checkpoint = self.optimizer.checkpoint().result()
        self.check(self.step_number)
        assert checkpoint.step == self.step_number

    def check(self, step: int, expected: torch.Tensor | None = None) -> None:
        """See that a checkpoint is whole, by its digests and by the safetensors library."""
        with open_checkpoint(f"{self.store}/step-{step:08d}") as found:
            assert found.verify().problems == ()
            tensors = safetensors.torch.load_file(f"{found.path}/model.safetensors")
        expected = self.model.frozen if expected is None else expected
        assert torch.equal(tensors["frozen"].view(torch.int32), expected.view(torch.int32))

    def close(self) -> None:
        self.optimizer.close()


def test_slots_share_what_is_frozen(drive: Mounted) -> None:
    os.sync()
    before = drive.free_bytes()
    run = Run(drive)
    for _ in range(NUM_SLOTS + 1):
        run.step_and_seal()
    run.close()
    os.sync()
    one_each = NUM_SLOTS * (BESIDE_BYTES + 4 * TRAINED_BYTES + 2 * MIB)
    assert before - drive.free_bytes() <= FROZEN_BYTES + one_each + 16 * MIB  # metadata


def test_on_a_full_disk_sealing_goes_on_although_slots_share_space(drive: Mounted) -> None:
    run = Run(drive)
    for _ in range(NUM_SLOTS):
        run.step_and_seal()
    drive.fill()
    for _ in range(2 * NUM_SLOTS):
        run.step_and_seal()
    run.close()
    run = Run(drive)
    for _ in range(NUM_SLOTS):
        run.step_and_seal()
    run.close()


def test_on_a_full_disk_an_edit_of_what_is_shared_fails_the_seal_by_name(drive: Mounted) -> None:
    run = Run(drive)
    for _ in range(NUM_SLOTS):
        run.step_and_seal()
    filler = drive.fill()
    was = run.model.frozen.detach().clone()
    with torch.no_grad():
        run.model.frozen.view(torch.int32)[16 * MIB :] += 1
    run.step()
    with pytest.raises(SealError, match=r"model\.safetensors: .*No space left") as caught:
        run.optimizer.checkpoint().result()
    assert caught.value.__cause__.errno == errno.ENOSPC  # type: ignore[union-attr]
    run.check(NUM_SLOTS, was)
    filler.unlink()
    with pytest.raises(SealError):
        run.optimizer.checkpoint()
    run.optimizer.checkpoint().result()
    run.check(run.step_number)
    for _ in range(NUM_SLOTS):
        run.step_and_seal()
    run.close()


def test_power_is_lost_after_seals_that_share_space(tmp_path: Path) -> None:
    with drive_of("xfs", tmp_path) as drive:
        run = Run(drive)
        for _ in range(NUM_SLOTS + 1):
            run.step_and_seal()
        run.step()
        drive.lose_power()
        with contextlib.suppress(OSError):
            run.close()
        drive.mount_again()
        again = Run(drive)
        assert again.step_number == NUM_SLOTS + 1
        for step in (NUM_SLOTS, NUM_SLOTS + 1):
            again.check(step)
        again.step_and_seal()
        again.close()


_FIEMAP: Final = 0xC020660B


def place_on_device(path: Path, offset: int) -> int:
    """Return where a byte of a file is on its device."""
    request = bytearray(struct.pack("=QQLLLL", offset, 1, 1, 0, 1, 0) + bytes(56))
    with path.open("rb") as file:
        fcntl.ioctl(file, _FIEMAP, request)
    logical, physical = struct.unpack_from("=QQ", request, 32)
    return physical + offset - logical


def mend(store: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
    """Put frozen tensors back into a checkpoint, as `docs/recovery.md` has it."""
    with open(f"{store}/step-{step:08d}/model.safetensors", "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, tensor in tensors.items():
            file.seek(8 + length + header[name]["data_offsets"][0])
            file.write(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())


def test_damage_of_what_slots_share_is_in_all_of_them_and_can_be_mended(tmp_path: Path) -> None:
    with drive_of("xfs", tmp_path) as drive:
        run = Run(drive)
        for _ in range(NUM_SLOTS + 1):
            run.step_and_seal()
        run.close()
        steps = (NUM_SLOTS, NUM_SLOTS + 1)
        files = [Path(f"{run.store}/step-{step:08d}/model.safetensors") for step in steps]
        places = {place_on_device(file, 100 * MIB) for file in files}
        assert len(places) == 1
        unmount(drive.path)
        with open(drive.device, "r+b") as device:
            device.seek(places.pop())
            byte = device.read(1)[0]
            device.seek(-1, os.SEEK_CUR)
            device.write(bytes([byte ^ 1]))
        subprocess.run(["mount", drive.device, drive.path], check=True)
        with (
            pytest.warns(RuntimeWarning, match="is quarantined; continuing from the one before"),
            pytest.raises(DamagedError, match=r"model\.safetensors.*are damaged"),
        ):
            Run(drive)
        base = Adapted()
        mend(run.store, steps[-1], {"frozen": base.frozen})
        Path(f"{run.store}/step-{steps[-1]:08d}/damaged.txt").unlink()
        again = Run(drive)
        assert again.step_number == steps[-1]
        for _ in range(NUM_SLOTS):
            again.step_and_seal()
        again.close()
