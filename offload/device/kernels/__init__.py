"""CUDA kernels of the update and the digests, for state in device memory.

`update.update_run` steps many pieces of parameters in a single pass. `digest.leaf_digests` computes
the same values as `offload.format.digests.leaf_digests`. CuPy compiles the kernels when they are
first used, and they are kept for later processes. Without a device, nothing is imported or
compiled. `docs/device.md` specifies the results to the bit.
"""
