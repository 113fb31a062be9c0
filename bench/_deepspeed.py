"""DeepSpeed's own environment: its version, and how to start a process in it."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Mapping

from bench._harness import BenchError
from bench._peer_protocol import Peer

REMEDY = "python -m bench.peers --help says how to set up its environment"


def add_deepspeed_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say where DeepSpeed is."""
    add = parser.add_argument
    add("--deepspeed-python", default="", help="python of the environment that has DeepSpeed")
    add("--deepspeed-extensions", default="", help="where its compiled extensions are kept")


def deepspeed_version(python: str) -> str:
    """Return the version of DeepSpeed in another environment, without importing it.

    Raises:
        BenchError: There is no DeepSpeed. The message says how to set up the environment.
    """
    if not python:
        raise BenchError(f"--deepspeed-python is not given: {REMEDY}")
    code = "from importlib.metadata import version; print(version('deepspeed'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise BenchError(f"--deepspeed-python {python}: {error.strerror}; {REMEDY}") from None
    if done.returncode != 0:
        raise BenchError(f"--deepspeed-python {python} has no DeepSpeed; {REMEDY}")
    return done.stdout.strip()


def deepspeed_peer(
    module: str, args: argparse.Namespace, *, log: str, environment: Mapping[str, str]
) -> Peer:
    """Start a module of this project with DeepSpeed's Python.

    Args:
        module: Name of the module.
        args: Has the arguments of `add_deepspeed_arguments`.
        log: Path of the file for the process's standard error.
        environment: Variables to add to the environment of this process.
    """
    python = os.path.abspath(args.deepspeed_python)
    # Its compiler driver is looked up beside its python.
    path = os.path.dirname(python) + os.pathsep + os.environ.get("PATH", "")
    more = {**environment, "PATH": path, "DS_ACCELERATOR": "cpu"}
    extensions = args.deepspeed_extensions or os.environ.get("TORCH_EXTENSIONS_DIR", "")
    if extensions:
        more["TORCH_EXTENSIONS_DIR"] = os.path.abspath(extensions)
    return Peer("deepspeed", [python, "-m", module], log=log, environment=more)
