"""Parts of a store that further ranks own: folders ``owner-<i>`` with a lock each.

`claims` are the parts that an owner must not recycle, `slot` is what an owner writes a step into,
and `store.OwnerStore` opens, readies and publishes them.
"""
