"""What a tier is kept in: object stores and folders, behind one interface of named objects.

- `objects` is the interface. `cloud_objects` implements it for object stores, with `requests` that
  are repeated, and whose errors are put into words; and `folder_objects` for folders.
- `address` reads URLs. `opening` chooses the code for one, and tells an empty tier from one that is
  not there.
"""
