"""Limits that a Linux container puts on this process (control groups, versions 1 and 2)."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def lines(path: Path) -> list[str]:
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
    for line in lines(root / "proc/self/cgroup"):
        parts = line.split(":", 2)
        if len(parts) == 3 and controller in parts[1].split(","):
            group = PurePosixPath(parts[2].lstrip("/"))
            if ".." not in group.parts:
                # Inside a container the path may be the host's: then only the top folder is there.
                return [base / group, *(base / above for above in group.parents)]
    return []


def _first_line(path: Path) -> str:
    found = lines(path)
    return found[0] if found else ""


def _integer(path: Path) -> int | None:
    text = _first_line(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None
