"""Benchmark behind `gds bench`: the speed of a directory, measured with the ordinary backends.

This wing may know every other wing of `gds` except `testing`, `kvikio` and `cli`.
"""
