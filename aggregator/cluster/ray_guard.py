"""What keeps strangers out of a Ray cluster that we use: its token, and who reaches its folder.

Whoever reaches one of Ray's ports with its token runs code as its user. Ray makes its folder on a
machine open to all (0777, no sticky bit), wherever it lies: whoever reaches that can put a link in
the place of a log, which Ray's processes then write through as their user, and another socket in
the place of theirs. Only a folder above it can keep others out.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from aggregator.errors import AggregatorError

_LOOK_SECONDS = 0.05
_TRY_SECONDS = 60.0
_TOKEN = (
    "give all of its machines, and this process, the same RAY_AUTH_MODE=token and RAY_AUTH_TOKEN "
    "(or RAY_AUTH_TOKEN_PATH), and restart Ray: see docs/cluster.md"
)
# Another process: Ray reads once in a process whether it shows a token.
_STRANGER = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", b"session", timeout=5)
except AuthenticationError:
    print("refused")
else:
    print("let in")
"""


def require_strangers_refused(address: str, asked_to_end: Callable[[], bool]) -> bool:
    """Ask a Ray cluster's head for something without a token; False where we were asked to end
    meanwhile.

    Raises AggregatorError unless it refuses because there was none.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    }
    environment["RAY_AUTH_MODE"] = "disabled"
    until_seconds = time.monotonic() + _TRY_SECONDS
    with subprocess.Popen(
        [sys.executable, "-c", _STRANGER, address],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as stranger:
        try:
            while stranger.poll() is None and time.monotonic() < until_seconds:
                if asked_to_end():
                    return False
                time.sleep(_LOOK_SECONDS)
        finally:
            stranger.kill()
        said, errors = stranger.communicate()
    if said == "let in\n":
        raise AggregatorError(
            f"the Ray cluster at {address} needs no token: whoever reaches its ports can run code "
            f"there, and would read what this process sends it. To keep strangers out, {_TOKEN}"
        )
    if said != "refused\n":
        lines = errors.strip().splitlines() or ["no answer"]
        raise AggregatorError(
            f"the Ray cluster at {address} does not say whether it asks for a token "
            f"({lines[-1]}). Is it running, and of the same version?"
        )
    return True


def require_private_token(environment: Mapping[str, str], user_home: Path) -> None:
    """Raises AggregatorError where others can read the file that Ray takes its token from."""
    if environment.get("RAY_AUTH_TOKEN"):
        return
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else user_home / ".ray" / "auth_token"
    try:
        found = path.stat()
    except OSError:
        return  # there is none: Ray says so
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in _ours():
        raise AggregatorError(
            f"others can read Ray's token in {path}: chown it to this user and chmod 600 it, and "
            "draw a new token where somebody may have read it"
        )


def require_private_folder(folder: Path) -> None:
    """Raises AggregatorError where another user of this machine (but root) reaches a folder of
    Ray's, or can put another in its place."""
    if os.name != "posix" or is_private(folder):
        return
    raise AggregatorError(
        f"other users of this machine reach Ray's folder {folder}, and can have Ray write to any "
        "file of its user's through a link there: start Ray with --temp-dir below a folder of its "
        "user's own with mode 0700, such as ray start --temp-dir=$HOME/ray after chmod "
        "700 $HOME (see docs/cluster.md)"
    )


def is_private(folder: Path) -> bool:
    """Whether a folder above it, or itself, lets nobody in but its owner, who is this process's
    user or root, and nobody else can replace that one."""
    place = folder.resolve()
    for each in (*reversed(place.parents), place):
        found = each.lstat()
        if found.st_uid not in _ours() or not stat.S_ISDIR(found.st_mode):
            return False
        if not stat.S_IMODE(found.st_mode) & 0o077:
            return True
        if _is_replaceable_in(found.st_mode):
            return False
    return False


def is_lasting(folder: Path) -> bool:
    """Whether what this process makes in a folder stays there: nobody else can replace it."""
    place = folder.resolve()
    for each in (place, *place.parents):
        try:
            found = each.lstat()
        except OSError:
            return False
        if found.st_uid not in _ours() or _is_replaceable_in(found.st_mode):
            return False
    return True


def _is_replaceable_in(mode: int) -> bool:
    return bool(mode & 0o022) and not mode & stat.S_ISVTX


def _ours() -> tuple[int, int]:
    return (0, os.geteuid())
