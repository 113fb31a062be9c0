"""Copies of checkpoints that several ranks made: each rank sends the part that it serves.

- `rank_notes` is how the ranks of an upload talk, and `following` what all of them but the writer
  do.
- `owner_source` reads the part of an owner, and `owner_share` sends it.
- `download_owners` brings all parts back to one host.
"""
