"""A GPU that is not there: one machine, as each layer of the two packages sees it.

| module | stands for | used by tests of |
|---|---|---|
| `machine` | CuPy and KvikIO, with memory and streams by address | `gds`, and kernels' launches |
| `device` | tensors on a device, and the boundary that may touch them | placement, copies |
| `compute` | the library's own stream and its kernels | updates on the device |
| `backend` | storage that reads and writes device memory | state that stays on the device |

All of them queue work with `streams`: it happens when somebody waits for it. A child process that
loads CUDA by `ctypes` gets C code instead (`tests/gds_cli/cuda_stub.c`), and `compute` runs kernels
whose sources `tests/device/host.py` has compiled for the CPU.
"""
