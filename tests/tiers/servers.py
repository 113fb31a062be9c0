"""Servers of object stores on this machine, for tests."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

from tests.dying import dying
from tests.tiers.proxy import KEY_ID, SECRET

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY_ID,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
    # No proxy of the machine may be asked for addresses of the machine.
    "NO_PROXY": "*",
}


AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Account that Azurite has from the start, which its documentation names."""


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
    port = _free_port()
    with (directory / "log").open("wb") as log:
        subprocess.run(
            [program, "format", "--storage", "file", "--bucket", f"{directory}/data/",
             "--trash-days", "0", database, "tier"],
            check=True, stdout=log, stderr=log, env=environment,
        )  # fmt: skip
        gateway = subprocess.Popen(
            dying([program, "gateway", "--no-usage-report", "--cache-dir", f"{directory}/cache",
                   "--cache-size", "512", database, f"127.0.0.1:{port}"]),
            stdout=log, stderr=log, env=environment,
        )  # fmt: skip
    try:
        _wait_for(gateway, port, directory / "log")
        yield "127.0.0.1", port
    finally:
        gateway.terminate()
        gateway.wait()
        shutil.rmtree(directory, ignore_errors=True)


def find_azurite() -> str | None:
    """Return the path of Azurite, Microsoft's emulator of Azure; None if it is not installed.

    `make integration` installs it where npm is.
    """
    beside = Path(sys.prefix) / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    return str(beside) if beside.exists() else shutil.which("azurite-blob")


@contextlib.contextmanager
def azurite(directory: Path, program: str) -> Iterator[tuple[str, int]]:
    """Run Azurite, with a container ``bucket``, in a process of its own."""
    port = _free_port()
    with (directory / "log").open("wb") as log:
        emulator = subprocess.Popen(
            dying([program, "--silent", "--disableTelemetry", "--skipApiVersionCheck", "--location",
                   str(directory), "--blobHost", "127.0.0.1", "--blobPort", str(port)]),
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        _wait_for(emulator, port, directory / "log")
        _make_container("127.0.0.1", port, "bucket")
        yield "127.0.0.1", port
    finally:
        emulator.terminate()
        emulator.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until a server takes connections."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def _make_container(host: str, port: int, name: str) -> None:
    """Make a container of Azure Blob Storage, with a request that is signed by the shared key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = [f"{key}:{value}" for key, value in headers.items()]
    path = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}"
    text = "\n".join(["PUT", *[""] * 11, *lines, path, "restype:container"])
    digest = hmac.digest(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"http://{host}:{port}/{AZURE_ACCOUNT}/{name}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers))


def make_bucket(host: str, port: int, name: str) -> None:
    """Make a bucket with moto, which asks nobody who he is."""
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/{name}", method="PUT"))
