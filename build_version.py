"""The version that a build is given, so that no two builds of different code have the same one."""

from __future__ import annotations

import subprocess
from pathlib import Path

RELEASE = "0.2.0"
"""The release that this code is, or is on its way to."""

ROOT = Path(__file__).resolve().parent


def version(root: Path = ROOT) -> str:
    """``0.1.0`` in a clean checkout of the tag of that name, and ``0.1.0.dev1843+g7fbee763``
    elsewhere, which is older: how many commits there are, and which one this is.

    An archive of the sources has its version in ``PKG-INFO``, or none: ``0.1.0.dev0``.
    """
    if _git(root, "rev-parse", "--show-toplevel") != str(root):
        return _archived(root) or f"{RELEASE}.dev0"
    dirty = _git(root, "status", "--porcelain", "--untracked-files=no") != ""
    if not dirty and RELEASE in _git(root, "tag", "--points-at", "HEAD").split():
        return RELEASE
    commits, commit = _git(root, "rev-list", "--count", "HEAD"), _git(root, "rev-parse", "HEAD")
    return f"{RELEASE}.dev{commits or 0}+g{commit[:8]}" + ".dirty" * dirty


def _archived(root: Path) -> str:
    file = root / "PKG-INFO"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return next((one.removeprefix("Version: ") for one in lines if one.startswith("Version: ")), "")


def _git(root: Path, *arguments: str) -> str:
    """What git prints; nothing where there is no git, or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", root, *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
