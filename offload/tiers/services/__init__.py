"""What a tier is kept in: object stores and folders, behind one interface of named objects.

- `objects` is the interface. `cloud_objects` implements it for object stores, whose errors
  `cloud_errors` puts into words, and `folder_objects` for folders.
- `address` reads URLs, and `opening` chooses the code for one.
- `reused` is memory for what is read.
"""
