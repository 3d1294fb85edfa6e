"""Downloading MovieLens 100K from GroupLens, checked before anything is unpacked."""

from __future__ import annotations

import hashlib
import http.client
import io
import urllib.request
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from device_sdk.system.files import write_atomically
from examples.datasets.movielens import DatasetError

URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
BYTES = 4_924_029
SHA256 = "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229"
FILES = ("u.data", "u.item", "README")
_CHUNK = 65_536
_TIMEOUT_SECONDS = 20.0


class Readable(Protocol):
    """What an opened address gives."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""


Open = Callable[[str], AbstractContextManager[Readable]]


def open_url(url: str) -> AbstractContextManager[Readable]:
    """The content behind an https address."""
    opened: AbstractContextManager[Readable] = urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS)
    return opened


def download_ml_100k(
    root: Path,
    *,
    open_address: Open = open_url,
    progress: Callable[[int, int], None] | None = None,
    sha256: str = SHA256,
) -> None:
    """Put u.data, u.item and README into `root`/ml-100k.

    `progress` gets the bytes so far and in all. Raises DatasetError where the network fails, the
    archive is not the published one, or the folder cannot be written.
    """
    archive = _fetch(open_address, progress)
    found = hashlib.sha256(archive).hexdigest()
    if found != sha256:
        raise DatasetError(f"what {URL} sent is not the published archive (SHA-256 {found:.16}...)")
    folder = root / "ml-100k"
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as zipped:
            contents = {name: zipped.read(f"ml-100k/{name}") for name in FILES}
        folder.mkdir(parents=True, exist_ok=True)
        # u.data last: where it is, everything is.
        for name in reversed(FILES):
            write_atomically(folder / name, contents[name])
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DatasetError(f"{folder} cannot be written: {error}") from None


def _fetch(open_address: Open, progress: Callable[[int, int], None] | None) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        with open_address(URL) as source:
            while part := source.read(_CHUNK):
                parts.append(part)
                size += len(part)
                if size > BYTES:
                    raise DatasetError(f"{URL} sends more than the {BYTES} bytes of the archive")
                if progress is not None:
                    progress(size, BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise DatasetError(f"{URL} cannot be downloaded: {error}") from None
    return b"".join(parts)
