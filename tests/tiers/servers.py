"""Servers of object stores on this machine, for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.tiers.proxy import KEY_ID, SECRET

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY_ID,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
    # No proxy of the machine may be asked for addresses of the machine.
    "NO_PROXY": "*",
}


@contextlib.contextmanager
def moto() -> Iterator[tuple[str, int]]:
    """Run moto's server of S3 in this process."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()
    finally:
        server.stop()


@contextlib.contextmanager
def juicefs(directory: Path) -> Iterator[tuple[str, int]]:
    """Run JuiceFS's gateway of S3, which is MinIO's code, in a process of its own."""
    program = os.path.join(os.path.dirname(sys.executable), "juicefs")
    environment = {**os.environ, "MINIO_ROOT_USER": KEY_ID, "MINIO_ROOT_PASSWORD": SECRET}
    database = f"sqlite3://{directory}/meta.db"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    with (directory / "log").open("wb") as log:
        subprocess.run(
            [program, "format", "--storage", "file", "--bucket", f"{directory}/data/",
             "--trash-days", "0", database, "tier"],
            check=True, stdout=log, stderr=log, env=environment,
        )  # fmt: skip
        gateway = subprocess.Popen(
            [program, "gateway", "--no-usage-report", "--cache-dir", f"{directory}/cache",
             "--cache-size", "512", database, f"127.0.0.1:{port}"],
            stdout=log, stderr=log, env=environment,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert gateway.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline, (directory / "log").read_text()
            time.sleep(0.05)
        yield "127.0.0.1", port
    finally:
        gateway.terminate()
        gateway.wait()
        shutil.rmtree(directory, ignore_errors=True)


def make_bucket(host: str, port: int, name: str) -> None:
    """Make a bucket with moto, which asks nobody who he is."""
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/{name}", method="PUT"))
