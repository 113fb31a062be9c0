"""Copies of checkpoints that several ranks made: each rank sends the part that it serves.

- `download_owners` brings all parts back to one host.
"""
