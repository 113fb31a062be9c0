"""Examination of GPU, driver, nvidia-fs, cuFile and KvikIO, and the findings about them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from dataclasses import dataclass
from typing import Any, Final

from gds.buffers.cuda import REMEDY
from gds.check import cuda_child
from gds.check.machine import GIB, Finding, kernel_version, unless
from gds.check.storage import Storage
from gds.check.system import Child, System

# Names of Python packages.
KVIKIO: Final = ("kvikio-cu13", "kvikio-cu12", "kvikio")
CUPY: Final = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
CUFILE: Final = ("nvidia-cufile", "nvidia-cufile-cu13", "nvidia-cufile-cu12")

_P2PDMA_SINCE: Final = (6, 2)
_TRUE: Final = frozenset({"1", "true", "on", "yes"})


@dataclass(frozen=True, slots=True)
class CuFile:
    """Result of the trial to move GPU memory with cuFile, with its fallbacks switched off."""

    reads: bool
    writes: bool
    reason: str
    """Reason why a direction does not work; empty if both work."""


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration file of cuFile."""

    path: str
    """Path of the file; empty if there is none."""

    options: dict[str, Any]
    problem: str
    """Reason why the file cannot be used; empty if it can."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Everything on the machine that matters for device memory; versions are empty if not known."""

    no_driver: str
    """Reason why the CUDA driver cannot be used; empty if it can."""

    cuda: str
    """Newest CUDA version that the driver supports."""

    driver: str
    open_driver: bool
    """Whether the kernel module is NVIDIA's open one."""

    devices: tuple[str, ...]
    nvidia_fs: str
    """Version of nvidia-fs, or ``loaded`` if that is not known; empty if it is not loaded."""

    p2pdma_off_reason: str
    """Reason why PCI peer-to-peer transfers, which need no nvidia-fs, are off; empty if on."""

    config: Config
    kvikio: str
    cupy: str
    cufile: CuFile


def examine_gpu(system: System, storage: Storage, *, timeout_s: float) -> Gpu:
    """Examine everything that moves device memory, partly in two child processes."""
    error = system.library_error("libcuda.so.1")
    version = ""
    devices: tuple[str, ...] = ()
    if not error:
        child = system.child(cuda_child.__file__, ["devices"], timeout_s=timeout_s)
        reported = _reported(child)
        error = _failure(child, reported, timeout_s)
        number = reported.get("version", 0)
        version = f"{number // 1000}.{number % 1000 // 10}" if number else ""
        devices = tuple(
            f"{device['name']} ({device['bytes'] / GIB:.0f} GiB)"
            for device in reported.get("devices", ())
        )
        if not error and not devices:
            error = "the driver sees no device"
    module = system.text("/proc/driver/nvidia/version") or ""
    found = re.search(r"(\d+\.\d+(?:\.\d+)?)", module)
    open_driver = "Open Kernel Module" in module
    config = _config(system)
    return Gpu(
        no_driver=error,
        cuda=version,
        driver=found[1] if found else "",
        open_driver=open_driver,
        devices=devices,
        nvidia_fs=_nvidia_fs(system),
        p2pdma_off_reason=_no_p2pdma(system, config, open_driver=open_driver),
        config=config,
        kvikio=_version(system, KVIKIO),
        cupy=_version(system, CUPY),
        cufile=_try_cufile(system, storage, error, timeout_s),
    )


def gpu_findings(system: System, gpu: Gpu) -> list[Finding]:
    """Return the findings about device memory."""
    return [
        _driver(gpu),
        _devices(gpu),
        _module(gpu),
        _peer(gpu),
        _configuration(gpu),
        _packages(system, gpu),
        _surroundings(system),
        _attempt(gpu),
    ]


def _driver(gpu: Gpu) -> Finding:
    kind = "open" if gpu.open_driver else "proprietary"
    value = f"kernel module {gpu.driver} ({kind})" if gpu.driver else "no kernel module"
    if not gpu.no_driver:
        value += f", CUDA {gpu.cuda or 'of unknown version'}"
    do = "install the NVIDIA driver; in a container: --gpus all"
    return unless(gpu.no_driver, "gpu", "driver", value, do, "missing")


def _devices(gpu: Gpu) -> Finding:
    if gpu.devices:
        return Finding("gpu", "devices", ", ".join(gpu.devices), "ok")
    return Finding("gpu", "devices", "none", "missing", gpu.no_driver or "the driver sees none")


def _module(gpu: Gpu) -> Finding:
    if gpu.nvidia_fs:
        return Finding("gpu", "nvidia-fs", gpu.nvidia_fs, "ok")
    if not gpu.p2pdma_off_reason:
        return Finding("gpu", "nvidia-fs", "not loaded", "ok", "PCI peer-to-peer is used instead")
    why = "the module is not loaded: cuFile would copy through the host"
    do = "install nvidia-gds and modprobe nvidia-fs; in a container: on the host"
    return Finding("gpu", "nvidia-fs", "not loaded", "missing", why, do)


def _peer(gpu: Gpu) -> Finding:
    if not gpu.p2pdma_off_reason:
        return Finding("gpu", "PCI peer-to-peer", "switched on", "ok")
    if gpu.nvidia_fs:
        return Finding("gpu", "PCI peer-to-peer", "off", "ok", "nvidia-fs does not need it")
    why = f"to use it instead of nvidia-fs: {gpu.p2pdma_off_reason}"
    return Finding("gpu", "PCI peer-to-peer", "off", "limits", why)


def _configuration(gpu: Gpu) -> Finding:
    config = gpu.config
    value, why, do = config.path or "none, defaults", config.problem, f"correct {config.path}"
    shown = ", ".join(
        f"{name}={json.dumps(config.options[name])}"
        for name in ("allow_compat_mode", "force_compat_mode", "use_pci_p2pdma")
        if name in config.options
    )
    value += f" ({shown})" if shown else ""
    if config.options.get("force_compat_mode") is True:
        why = "force_compat_mode makes cuFile copy through the host"
        do = f"set it to false in {config.path}"
    return unless(why, "gpu", "cuFile configuration", value, do)


def _packages(system: System, gpu: Gpu) -> Finding:
    value = gpu.kvikio or "not installed"
    value += f", CuPy {gpu.cupy}" if gpu.cupy else ", no CuPy"
    cufile = _version(system, CUFILE)
    value += f", cuFile {cufile}" if cufile else ""
    why = ""
    if not gpu.cupy:
        why = "CuPy moves all device memory"
    elif not gpu.kvikio:
        why = "GPUDirect Storage is reached through kvikio; without it, data is copied by the host"
    return unless(why, "gpu", "kvikio", value, REMEDY, "missing")


def _surroundings(system: System) -> Finding:
    """Return the finding about files that cuFile and KvikIO need and containers may lack."""
    needed = {
        "/run/udev": "without /run/udev, cuFile does not find the drives",
        "/proc/modules": "without /proc/modules, opening a file with cuFile can loop forever",
    }
    absent = {path: why for path, why in needed.items() if not system.exists(path)}
    value = f"no {' and no '.join(absent)}" if absent else "/run/udev and /proc/modules exist"
    do = "in a container: --volume /run/udev:/run/udev:ro" if "/run/udev" in absent else ""
    return unless("; ".join(absent.values()), "gpu", "surroundings", value, do)


def _attempt(gpu: Gpu) -> Finding:
    works = gpu.cufile
    if works.reads and works.writes:
        return Finding("gpu", "cuFile tried", "reads and writes GPU memory directly", "ok")
    value = "reads only" if works.reads else "writes only" if works.writes else "no"
    return Finding("gpu", "cuFile tried", value, "missing", works.reason)


def _nvidia_fs(system: System) -> str:
    """Return the version of nvidia-fs, ``loaded`` if that is not known, or "" if not loaded."""
    text = system.text("/proc/driver/nvidia-fs/version")
    if text is not None:
        found = re.search(r"\d+(?:\.\d+)+", text)
        return found[0] if found else "loaded"
    return "loaded" if system.exists("/proc/driver/nvidia-fs") else ""


def _no_p2pdma(system: System, config: Config, *, open_driver: bool) -> str:
    """Return the reason why PCI peer-to-peer transfers are off; empty if they are on."""
    if kernel_version(system.kernel()) < _P2PDMA_SINCE:
        return "it needs kernel 6.2 or newer"
    if not open_driver:
        return "it needs NVIDIA's open kernel module"
    wanted = system.environment("CUFILE_USE_PCIP2PDMA")
    on = wanted.lower() in _TRUE if wanted else config.options.get("use_pci_p2pdma") is True
    return "" if on else "set use_pci_p2pdma in cufile.json, or CUFILE_USE_PCIP2PDMA=true"


def _config(system: System) -> Config:
    path = system.environment("CUFILE_ENV_PATH_JSON") or "/etc/cufile.json"
    text = system.text(path)
    if text is None:
        if system.environment("CUFILE_ENV_PATH_JSON"):
            return Config(path, {}, "CUFILE_ENV_PATH_JSON names a file that cannot be read")
        return Config("", {}, "")
    try:
        # The file is JSON with comments. The pattern matches strings first, because a string may
        # hold slashes.
        plain = re.sub(
            r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', lambda m: m[1] or "", text, flags=re.DOTALL
        )
        content = json.loads(re.sub(r",(\s*[}\]])", r"\1", plain))
    except (ValueError, RecursionError) as error:
        return Config(path, {}, f"it is not JSON: {error}")
    options = content.get("properties", {}) if isinstance(content, dict) else None
    if not isinstance(options, dict):
        return Config(path, {}, "it has no object 'properties'")
    return Config(path, options, "")


def _version(system: System, names: tuple[str, ...]) -> str:
    """Return the version of the first package that is installed; empty if none is."""
    return next((found for name in names if (found := system.version(name))), "")


def _try_cufile(system: System, storage: Storage, no_driver: str, timeout_s: float) -> CuFile:
    """Try cuFile in a child process, unless it is already clear that it cannot work."""
    reason = ""
    if no_driver:
        reason = f"no CUDA driver: {no_driver}"
    elif storage.gds_refusal:
        reason = storage.gds_refusal
    elif not storage.writable:
        reason = "not tried: no file can be made here"
    if reason:
        return CuFile(False, False, reason)
    path = os.path.join(storage.directory, f".gds-check-{secrets.token_hex(8)}")
    environment = {
        # Otherwise cuFile may silently copy through the host.
        "CUFILE_ALLOW_COMPAT_MODE": "false",
        "CUFILE_LOGFILE_PATH": "cufile.log",  # in the child's directory, which is temporary
        "CUFILE_LOGGING_LEVEL": "ERROR",
    }
    try:
        child = system.child(
            cuda_child.__file__,
            ["cufile", os.path.abspath(path)],
            timeout_s=timeout_s,
            environment=environment,
        )
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    reported = _reported(child)
    reads, writes = reported.get("reads") is True, reported.get("writes") is True
    reason = _failure(child, reported, timeout_s)
    if not reason and not (reads and writes):
        reason = "it transferred wrong data"
    return CuFile(reads, writes, reason)


def _reported(child: Child) -> dict[str, Any]:
    """Return the values that a child reported; later lines override earlier ones."""
    merged: dict[str, Any] = {}
    for line in child.output.splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                merged |= value
    return merged


def _failure(child: Child, reported: dict[str, Any], timeout_s: float) -> str:
    """Return the reason why a child failed; empty if it ended well."""
    stage = reported.get("stage", "start")
    if child.status is None:
        return f"no answer within {timeout_s:g} s of {stage}: killed"
    if "error" in reported:
        return f"{stage}: {reported['error']}"
    if child.status < 0:
        return f"was killed by signal {-child.status} in {stage}"
    if child.status or not reported.get("done"):
        last = child.error.strip().splitlines()[-1:] or [f"status {child.status}"]
        return f"{stage}: {last[0]}"
    return ""
