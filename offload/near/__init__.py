"""The connection between a training process and a server that updates next to the drives.

The training process sends gradients, and receives parameters. Neither optimizer state nor
checkpoints cross the connection. `wire` has its frames, `terms` the documents in them. The
training process uses `link` and `engine`, or `ranks` if it is one of several; who only looks at a
store uses `reading`. The server is the wing `serve`.

This wing may know everything below `optimizer`.
"""
