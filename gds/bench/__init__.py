"""How fast a directory is, measured through the backends that everything else uses.

This wing may know every other one of `gds` but `testing` and `cli`.
"""
