"""The update and the digests of state that is in device memory, as CUDA kernels.

`update.update_block` steps a block in a single pass; `digest.leaf_digests` gives what
`offload.format.digests.leaf_digests` gives. The kernels are compiled with CuPy when they are first
used; nothing is imported, and nothing compiled, where there is no device. What they compute, to the
bit, is said in `docs/device.md`.
"""
