"""Command ``offload serve``: update next to the drives, for training processes elsewhere."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from offload.cli.options import one_line
from offload.errors import NearError


def serve(
    directories: Annotated[
        list[str], typer.Argument(help="Directory for runs; several on several drives.")
    ],
    listen: Annotated[
        str, typer.Option("--listen", help="unix:PATH, or HOST:PORT; :PORT is for this machine.")
    ] = "unix:offload.sock",
    token_file: Annotated[
        str | None, typer.Option("--token-file", help="File with a secret that clients must know.")
    ] = None,
    host_memory: Annotated[
        str, typer.Option(help="Most memory for state of one run: its ring, and host_memory=.")
    ] = "2GiB",
) -> None:
    """Hold optimizer state for training processes elsewhere, and update it next to the drives.

    Gradients come in, and parameters go out. State and checkpoints stay here. The traffic is not
    encrypted: for another machine, use ssh -L, WireGuard or a network of your own. It ends with
    Ctrl-C or SIGTERM, and then closes all stores.
    """
    from offload.options import parse_bytes
    from offload.serve import listen as listen_on
    from offload.serve import run_server
    from offload.serve.listening import require_directories

    try:
        memory_bytes = parse_bytes(host_memory, "--host-memory")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    require_directories(directories)
    token = None if token_file is None else _token(token_file)
    listener, address = listen_on(listen)
    if token is None and listener.family != socket.AF_UNIX:
        listener.close()
        raise NearError(
            f"{listen} can be reached by other users: pass --token-file, and give clients the same "
            "file in OFFLOAD_TOKEN_FILE; or listen on unix:PATH"
        )
    run_server(
        directories,
        listener,
        token=token,
        memory_bytes=memory_bytes,
        ready=lambda: typer.echo(f'serving: directory="{one_line(address)}/RUN"'),
    )


def _token(path: str) -> str:
    try:
        found = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NearError(f"the token file {path} cannot be read: {error}") from error
    if len(found) < 16:
        raise NearError(f"the token in {path} has {len(found)} characters: use 16 or more")
    return found
