"""The server that updates next to the drives: ``offload serve``.

It runs an ordinary `OffloadedOptimizer` for each client. The tensors of the model are in a file on
the drive, and gradients pass through memory of a bounded size, so the server never holds the model.

This wing may know everything but `cli`, `demo`, `integrations` and `report`.
"""

from offload.serve.listening import listen, run_server
from offload.serve.server import Server

__all__ = ["Server", "listen", "run_server"]
