"""What machine this is, as far as it explains a measurement; nothing here identifies it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from device_sdk.capability import cgroup

_DISTRIBUTION = "tessera-edge"
_CPUINFO_KEYS = ("model name", "Model", "Hardware", "cpu model", "uarch")


@dataclass(frozen=True)
class Machine:
    """`cores` counts what this process may use (affinity and container quota; may be a fraction).

    Memory is in bytes; None where the operating system does not tell.
    """

    cpu_model: str
    architecture: str
    cores: float
    threads: int
    provider: str
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    versions: dict[str, str]


def describe_machine(*, threads: int, provider: str, root: Path = Path("/")) -> Machine:
    """This machine. `root` is where `proc` and `sys` are looked for (Linux)."""
    total, available = _memory(root)
    return Machine(
        cpu_model=_cpu_model(root),
        architecture=platform.machine() or "unknown",
        cores=usable_cores(root),
        threads=threads,
        provider=provider,
        memory_total_bytes=total,
        memory_available_bytes=available,
        versions={
            "python": platform.python_version(),
            "numpy": _version("numpy"),
            "onnxruntime": _version("onnxruntime", "onnxruntime-gpu"),
            "tessera": _version(_DISTRIBUTION),
        },
    )


def usable_cores(root: Path = Path("/")) -> float:
    """Cores that the scheduler lets this process use, a container's quota included."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = cgroup.cpu_quota(root)
    return float(allowed) if quota is None else min(float(allowed), quota)


def _version(*distributions: str) -> str:
    """The version of the first of these that is installed."""
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _cpu_model(root: Path) -> str:
    found = _cpuinfo(root)
    if found is None and sys.platform == "darwin":
        found = _sysctl("machdep.cpu.brand_string")
    return found or platform.processor() or platform.machine() or "unknown"


def _cpuinfo(root: Path) -> str | None:
    fields: dict[str, str] = {}
    for line in cgroup.lines(root / "proc/cpuinfo"):
        key, separator, value = line.partition(":")
        if separator and value.strip():
            fields.setdefault(key.strip(), value.strip())
    return next((fields[key] for key in _CPUINFO_KEYS if key in fields), None)


def _sysctl(name: str) -> str | None:
    try:
        answer = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def _memory(root: Path) -> tuple[int | None, int | None]:
    """Total and available bytes, no more than a container's limit."""
    if sys.platform == "win32":
        return _windows_memory()
    total, available = _meminfo(root)
    if total is None:
        total = _sysconf_memory()
    limit = cgroup.memory_limit(root)
    if limit is not None and total is not None and limit < total:
        total = limit
        available = None if available is None else min(available, limit)
    return total, available


def _meminfo(root: Path) -> tuple[int | None, int | None]:
    kibibytes: dict[str, int] = {}
    for line in cgroup.lines(root / "proc/meminfo"):
        key, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            kibibytes[key] = int(words[0])
    total, available = kibibytes.get("MemTotal"), kibibytes.get("MemAvailable")
    return (
        None if total is None else total * 1024,
        None if available is None else available * 1024,
    )


def _sysconf_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


class _MemoryStatus(ctypes.Structure):
    # MEMORYSTATUSEX of the Windows API.
    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 5),
    )


def _windows_memory() -> tuple[int | None, int | None]:
    kernel = getattr(ctypes, "windll").kernel32  # noqa: B009 - absent from other systems' types
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if not kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None, None
    return int(status.total), int(status.available)
