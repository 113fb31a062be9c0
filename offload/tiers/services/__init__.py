"""What a tier is kept in: object stores and folders, behind one interface of named objects.

- `objects` is the interface. `cloud_objects` implements it for object stores, with `requests` that
  are repeated, whose errors `cloud_errors` puts into words; and `folder_objects` for folders.
- `presence` tells an empty tier from one that is not there.
- `address` reads URLs, and `opening` chooses the code for one.
- `reused` is memory for what is read.
"""
