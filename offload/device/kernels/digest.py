"""Digests of bytes in device memory: the leaf digests of `offload.format.digests`."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from offload.device.kernels.loading import Kernel, digest_source, load
from offload.format.digests import LEAF_BYTES

_BLOCK_BYTES = 1024
_LANES = 8
_THREADS = 256


def workspace_bytes(num_bytes: int) -> int:
    """Return the bytes of workspace for digesting `num_bytes` bytes: 64 B for each KiB."""
    return -(-num_bytes // _BLOCK_BYTES) * _LANES * 8


def num_leaves(num_bytes: int) -> int:
    """Return the number of leaves in `num_bytes` bytes."""
    return -(-num_bytes // LEAF_BYTES)


def leaf_digests(
    data: torch.Tensor, workspace: torch.Tensor, out: torch.Tensor, *, stream: int
) -> None:
    """Enqueue the digests of the leaves of a tensor's bytes on a stream.

    This returns before the digests exist. The bytes of `out` are those that
    `offload.format.digests.leaf_digests` returns. `DigestContext.digest_leaves` turns them into the
    digest of a chunk.

    Args:
        data: Contiguous, of any dtype, on the current device; fastest if aligned to 8 bytes.
        workspace: Any dtype; at least `workspace_bytes` bytes, aligned to 8 bytes; overwritten.
        out: int64, one value for each leaf; overwritten.
        stream: Raw handle of a stream, as in torch's ``Stream.cuda_stream``.
    """
    num_bytes = data.nbytes
    _check(data, workspace, out)
    if not num_bytes:
        return
    blocks, scan, merge = kernels(data.device.index or 0)
    leaves = num_leaves(num_bytes)
    size = np.uint64(num_bytes)
    source, sums, results = (np.uint64(t.data_ptr()) for t in (data, workspace, out))
    num_threads = -(-num_bytes // _BLOCK_BYTES) * _LANES
    blocks.launch(_grid(num_threads, _THREADS), _THREADS, (source, size, sums), stream=stream)
    # The scan has few threads with long chains: small blocks spread them over multiprocessors.
    scan.launch(_grid(leaves * _LANES, 32), 32, (size, sums), stream=stream)
    merge.launch(_grid(leaves, 32), 32, (source, size, sums, results), stream=stream)


def _check(data: torch.Tensor, workspace: torch.Tensor, out: torch.Tensor) -> None:
    if not (data.is_contiguous() and workspace.is_contiguous() and out.is_contiguous()):
        raise ValueError("the data to digest, the workspace and the result must be contiguous")
    if len({t.device for t in (data, workspace, out)}) > 1:
        raise ValueError(
            f"data on {data.device}, workspace on {workspace.device} and result on {out.device} "
            "must be on one device"
        )
    needed = workspace_bytes(data.nbytes)
    if workspace.nbytes < needed or workspace.data_ptr() % 8:
        raise ValueError(
            f"the workspace must have {needed} bytes, aligned to 8: it has {workspace.nbytes}"
        )
    if out.dtype != torch.int64 or out.numel() < num_leaves(data.nbytes):
        raise ValueError(
            f"the result must have {num_leaves(data.nbytes)} int64: it has {out.numel()} of "
            f"{out.dtype}"
        )


def _grid(num_threads: int, threads: int) -> int:
    return -(-num_threads // threads)


@cache
def kernels(device: int) -> list[Kernel]:
    """Return the kernels for a device, which the first call compiles."""
    return load(digest_source(), ["digest_blocks", "digest_scan", "digest_merge"], device)
