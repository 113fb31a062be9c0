"""Slots that steps write into, and the parts of them on further drives.

`slot` is one slot with open files, `folder` its directory, `part` its share on a further drive.
`free` and `part_pool` are the ones that may be rewritten, and `supply` finds or makes the next one.
"""
