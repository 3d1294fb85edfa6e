"""Times and sizes in words."""

from __future__ import annotations


def span(seconds: float) -> str:
    """Such as "4 s", "12 min", "3 h" or "9 d"."""
    for unit, length in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def ago(unix_seconds: float | None, now: float) -> str:
    """How long ago, or "never"."""
    return "never" if unix_seconds is None else f"{span(now - unix_seconds)} ago"


def size(count: float) -> str:
    """Bytes, such as "1.4 MB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
