"""What machine this is, as far as it explains a measurement; nothing here identifies it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from device_sdk.fields import Declared

_DISTRIBUTION = "tessera-edge"
_CPUINFO_KEYS = ("model name", "Model", "Hardware", "cpu model", "uarch")


@dataclass(frozen=True)
class Machine(Declared):
    """`cores` counts what this process may use (affinity and container quota; may be a fraction).

    `affinity`: numbers of the processors that the scheduler lets it use, as `taskset` sets them;
    `quota`: cores' worth of time that a container may take. Memory is in bytes. None where the
    operating system does not tell.
    """

    cpu_model: str
    architecture: str
    cores: float
    threads: int
    provider: str
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    versions: Mapping[str, str]
    affinity: tuple[int, ...] | None = None
    quota: float | None = None


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
        affinity=_affinity(),
        quota=cpu_quota(root),
    )


def usable_cores(root: Path = Path("/")) -> float:
    """Cores that the scheduler lets this process use, a container's quota included."""
    allowed = len(_affinity() or ()) or os.cpu_count() or 1
    quota = cpu_quota(root)
    return float(allowed) if quota is None else min(float(allowed), quota)


def _affinity() -> tuple[int, ...] | None:
    ask = getattr(os, "sched_getaffinity", None)
    return None if ask is None else tuple(sorted(ask(0)))


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
    for line in _lines(root / "proc/cpuinfo"):
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
    limit = memory_limit(root)
    if limit is not None and total is not None and limit < total:
        total = limit
        available = None if available is None else min(available, limit)
    return total, available


def _meminfo(root: Path) -> tuple[int | None, int | None]:
    kibibytes: dict[str, int] = {}
    for line in _lines(root / "proc/meminfo"):
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


# Limits that a Linux container puts on this process (control groups, versions 1 and 2).


def _lines(path: Path) -> list[str]:
    """The file's lines, or none where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def cpu_quota(root: Path) -> float | None:
    """Cores' worth of processor time that the tightest group allows, or None without a limit."""
    quotas = [
        int(words[0]) / int(words[1])
        for folder in _folders(root, "")
        for words in (_first_line(folder / "cpu.max").split(),)
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0
    ]
    for folder in _folders(root, "cpu"):
        quota = _integer(folder / "cpu.cfs_quota_us")
        period = _integer(folder / "cpu.cfs_period_us")
        if quota is not None and period is not None and quota > 0 and period > 0:
            quotas.append(quota / period)
    return min((quota for quota in quotas if quota > 0.0), default=None)


def memory_limit(root: Path) -> int | None:
    """Bytes that the tightest group allows, or None without a limit."""
    files = [folder / "memory.max" for folder in _folders(root, "")]
    files += [folder / "memory.limit_in_bytes" for folder in _folders(root, "memory")]
    limits = [_integer(file) for file in files]
    return min((limit for limit in limits if limit is not None and limit > 0), default=None)


def _folders(root: Path, controller: str) -> list[Path]:
    """The process' group under a controller ("" is version 2) and all groups above it."""
    base = root / "sys/fs/cgroup" / controller
    for line in _lines(root / "proc/self/cgroup"):
        parts = line.split(":", 2)
        if len(parts) == 3 and controller in parts[1].split(","):
            group = PurePosixPath(parts[2].lstrip("/"))
            if ".." not in group.parts:
                # Inside a container the path may be the host's: then only the top folder is there.
                return [base / group, *(base / above for above in group.parents)]
    return []


def _first_line(path: Path) -> str:
    found = _lines(path)
    return found[0] if found else ""


def _integer(path: Path) -> int | None:
    text = _first_line(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None
