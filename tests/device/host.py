"""The kernels' sources compiled for the CPU: the same arithmetic, element by element."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from offload.device.kernels.forms import Form
from offload.device.kernels.loading import digest_source, update_source
from offload.device.kernels.update import ARGUMENTS, DeviceRun, Launch, launches
from offload.format.digests import LEAF_BYTES
from tests.device.blocks import DeviceBlock

SHIM = Path(__file__).with_name("shim.h")

_LANES = """
#define LANES 8
#define FOR_LANES(l) for (int l = 0; l < LANES; l++)
#define FIRST_OF(offset) (int)((offset) * BLOCK)
#define OF_LANE(at, l) ((at) + QUAD * (l))
static inline unsigned int group_max(const unsigned int *values) {
  unsigned int largest = 0;
  for (int l = 0; l < LANES; l++)
    if (values[l] > largest) largest = values[l];
  return largest;
}
"""

_ENTRY = """
extern "C" void update_{index}(const Arguments *a, u32 num_tiles) {{
  float quotients[256];
  for (u32 code = 0; code < 256; code++) quotients[code] = signed_quotient(code);
  Constants c;
  c.quotients = quotients;
  for (u32 tile = 0; tile < num_tiles; tile++)  // as 256 threads do, 8 at a time
    for (u32 offset = 0; offset < 32; offset++) update_tile(*a, c, tile, offset);
}}
extern "C" unsigned long long arguments_bytes_{index}() {{ return sizeof(Arguments); }}
"""

_DIGEST_ENTRY = """
extern "C" void digest(const u8 *data, u64 num_bytes, u64 *sums, u64 *out) {
  for (u64 block = 0; block * BLOCK_BYTES < num_bytes; block++)
    for (u32 lane = 0; lane < LANES; lane++) digest_block(data, num_bytes, sums, block, lane);
  const u64 num_leaves = (num_bytes + LEAF_BYTES - 1) / LEAF_BYTES;
  for (u64 leaf = 0; leaf < num_leaves; leaf++)
    for (u32 lane = 0; lane < LANES; lane++) digest_chain(num_bytes, sums, leaf, lane);
  for (u64 leaf = 0; leaf < num_leaves; leaf++)
    out[leaf] = digest_leaf(data, num_bytes, sums, leaf);
}
"""


def compiler() -> str:
    """Return a C++ compiler, or skip the test."""
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return found
    pytest.skip("no C++ compiler (g++, clang++ or c++) to compile the kernels for the CPU with")


def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory for compiled code, which the workers of a run share; or skip."""
    compiler()
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    directory = base / "device-kernels"
    directory.mkdir(exist_ok=True)
    return directory


def build(source: str, directory: Path, *, options: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile C++ to a library and load it; once for all processes that share the directory."""
    command = [compiler(), "-std=c++17", "-O0", "-fPIC", "-shared", "-ffp-contract=off", *options]
    name = hashlib.sha256(repr((command, source)).encode()).hexdigest()[:16]
    library, text = directory / f"{name}.so", directory / f"{name}.cpp"
    with (directory / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            text.write_text(source)
            unfinished = directory / f"{name}.new"
            subprocess.run([*command, "-o", unfinished, text], check=True, timeout=240)
            unfinished.rename(library)
    return ctypes.CDLL(str(library))


class HostKernels:
    """Variants of the update, each compiled when it is first used."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._entries: dict[Form, ctypes.CDLL] = {}

    def prepare(self, forms: Sequence[Form]) -> None:
        """Compile several at a time, which is much faster than one by one."""
        missing = [form for form in dict.fromkeys(forms) if form not in self._entries]
        if not missing:
            return
        text = SHIM.read_text() + _LANES
        # once; the rest is in a namespace of its own for each variant
        source = update_source()
        for index, form in enumerate(missing):
            macros = form.macros
            text += "".join(f"#define {name} {value}\n" for name, value in macros.items())
            text += f"namespace variant_{index} {{\n{source}{_ENTRY.format(index=index)}}}\n"
            text += "".join(f"#undef {name}\n" for name in macros)
        library = build(text, self._directory)
        for index, form in enumerate(missing):
            size = getattr(library, f"arguments_bytes_{index}")
            size.restype = ctypes.c_ulonglong
            assert size() == ARGUMENTS.itemsize
            entry = getattr(library, f"update_{index}")
            entry.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
            entry.restype = None
            self._entries[form] = entry

    def launch(self, launch: Launch) -> None:
        """Run a launch, on CPU tensors."""
        self.prepare([launch.form])
        self._entries[launch.form](launch.arguments.ctypes.data, launch.num_tiles)

    def update_run(self, optimizer_class, group, run: DeviceRun, **options) -> None:
        """Like `update.update_run`, now and here."""
        if run.is_new:
            for array in run.arrays.values():
                array.zero_()
        for launch in launches(optimizer_class, group, run, **options):
            self.launch(launch)

    def update_block(
        self,
        optimizer_class,
        group,
        block: DeviceBlock,
        *,
        step: int,
        seed: int = 0,
        rounding_step: int | None = None,
        **options,
    ) -> None:
        """Step a block of one parameter."""
        run = block.run(seed, step if rounding_step is None else rounding_step)
        self.update_run(optimizer_class, group, run, step=step, **options)


class HostDigests:
    """The digests' kernels."""

    def __init__(self, directory: Path) -> None:
        library = build(SHIM.read_text() + digest_source() + _DIGEST_ENTRY, directory)
        self._entry = library.digest
        self._entry.restype = None
        self._entry.argtypes = [
            ctypes.c_void_p,
            ctypes.c_ulonglong,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]

    def leaf_digests(self, data: torch.Tensor) -> bytes:
        """Return what `offload.format.digests.leaf_digests` returns for the tensor's bytes."""
        sums = torch.full((-(-data.nbytes // 1024) * 8,), -1, dtype=torch.int64)
        out = torch.zeros(-(-data.nbytes // LEAF_BYTES), dtype=torch.int64)
        self._entry(data.data_ptr(), data.nbytes, sums.data_ptr(), out.data_ptr())
        return out.numpy().tobytes()
