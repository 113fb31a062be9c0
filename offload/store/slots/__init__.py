"""Slots that steps write into, and the parts of them on further drives.

`slot` is one slot with open files, `folder` its directory, or that of a part. What may be rewritten
is in `free` and `part_pool`, and `supply` finds or makes the next slot.
"""
