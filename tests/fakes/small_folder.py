"""A folder on a file system of its own, which can be full or read-only: no error is made up."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_BYTES = 256 << 10


class SmallFolder:
    """A tmpfs of 256 KiB, empty."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def set_read_only(self, value: bool) -> None:
        _mount("-o", f"remount,{'ro' if value else 'rw'}", str(self.path))

    def fill(self) -> None:
        """Leave no byte of room."""
        with (self.path / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def make_room(self) -> None:
        """Take back what :meth:`fill` did."""
        (self.path / "filler").unlink()


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def small_folder(tmp_path: Path) -> Iterator[SmallFolder]:
    """Skips where this user may mount none."""
    path = tmp_path / "small"
    path.mkdir()
    try:
        _mount("-t", "tmpfs", "-o", f"size={_BYTES}", "none", str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system may be mounted here: {getattr(error, 'stderr', error)}")
    yield SmallFolder(path)
    subprocess.run(["umount", "--lazy", str(path)], check=True)
